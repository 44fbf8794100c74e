"""Memory with known bytes for `bench transfer`, already mapped: the segments to store, and the buffers to read into."""

from __future__ import annotations

import hashlib
import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import SegmentKey
from tokenlake_bench.transfer.base import WINDOWS, Size

_SEED: Final = 7


class Windows:
    """The arrays `source` and `target`, each of the shape [WINDOWS, count, segment_bytes]. All pages are touched; every
    segment of `source` differs from every other in each of its words."""

    def __init__(self, size: Size) -> None:
        shape = (WINDOWS, size.count, size.segment_bytes)
        self.source: NDArray[np.uint8] = np.empty(shape, np.uint8)
        memory = mmap.mmap(-1, self.source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The memory is excluded from forks: after a fork, the next write to each page would copy the page.
        memory.madvise(mmap.MADV_DONTFORK)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.target: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(shape)
        self.target[:] = 1
        fill_windows(self.source)


def fill_windows(source: NDArray[np.uint8]) -> None:
    """Fill the array `source` of shape [windows, count, segment_bytes] with bytes that are the same in every
    process."""
    page = np.random.default_rng(_SEED).integers(0, 1 << 63, source.shape[-1] // 8, dtype=np.uint64)
    segments = source.reshape(-1, source.shape[-1]).view(np.uint64)
    for number, segment in enumerate(segments):
        np.bitwise_xor(page, np.uint64(number + 1), out=segment)


def keys_of(label: str, number: int, count: int) -> list[SegmentKey]:
    """Segment keys of one window (set of segments). They are hashes and so spread evenly over the ring."""
    return [
        SegmentKey(hashlib.blake2b(f"{label}/{number}/{index}".encode(), digest_size=32).digest())
        for index in range(count)
    ]


def segment_names(label: str, number: int, count: int) -> list[str]:
    """Names of the segments of one window (set), for stores that have names instead of hashes."""
    return [f"{label}/{number}/{index}" for index in range(count)]
