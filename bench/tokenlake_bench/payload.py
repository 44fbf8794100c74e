"""The expected bytes of a segment, derived from its tokens without the pool's keys.

    digest  = xxh3-128(seed, tenant, layout fingerprint, all tokens up to the segment's end)
    word[i] = page[i mod 8192] xor tag(digest, i div 8192)

`page` is 64 KiB of fixed words, all different. So each 64-byte line depends on the digest and on its place in the
segment: a read that returns another segment's bytes, or shifted bytes, is detected, also if the pool's keys are wrong.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenlake_bench.mixing import GOLDEN, mix64

_PAGE_WORDS: Final = 8_192
_PAGE_BYTES: Final = _PAGE_WORDS * 8
_PAGE: Final = mix64(np.arange(1, _PAGE_WORDS + 1, dtype=np.uint64) * np.uint64(GOLDEN))


@dataclass(frozen=True, slots=True)
class PayloadIdentity:
    """The values that, with its tokens, determine the expected bytes of a segment: the seed of the run, the
    tenant's name and the layout's fingerprint."""

    seed: int
    tenant: str
    fingerprint: bytes

    def digests(self, tokens: NDArray[np.uint32], segment_tokens: int) -> list[bytes]:
        """Digests of 16 bytes, one per full segment of `tokens` (one-dimensional), in order. Tokens behind the last
        full segment are ignored."""
        tenant = self.tenant.encode()
        head = struct.pack("<QQ", self.seed & ((1 << 64) - 1), len(tenant)) + tenant
        running = xxhash.xxh3_128(head + struct.pack("<Q", len(self.fingerprint)) + self.fingerprint)
        data = np.ascontiguousarray(tokens, dtype="<u4").view(np.uint8).data
        size = segment_tokens * 4
        digests: list[bytes] = []
        for end in range(size, len(data) + 1, size):
            running.update(data[end - size : end])
            digests.append(running.digest())
        return digests


def fill(out: NDArray[np.uint8], digest: bytes) -> None:
    """Write the expected bytes of the segment with this `digest` into all of `out` (contiguous, one-dimensional,
    writable)."""
    tags = _tags(digest, len(out))
    whole = len(out) // _PAGE_BYTES
    pages = out[: whole * _PAGE_BYTES].view(np.uint64).reshape(whole, _PAGE_WORDS)
    np.bitwise_xor(_PAGE, tags[:whole, None], out=pages)
    if rest := len(out) - whole * _PAGE_BYTES:
        out[-rest:] = (_PAGE ^ tags[whole]).view(np.uint8)[:rest]


def wrong_bytes(data: NDArray[np.uint8], digest: bytes) -> int:
    """Number of bytes of `data` that are not the expected ones of the segment with this `digest` (contiguous,
    one-dimensional; may be read-only)."""
    expected = np.empty_like(data)
    fill(expected, digest)
    return 0 if np.array_equal(data, expected) else int(np.count_nonzero(data != expected))


def _tags(digest: bytes, size: int) -> NDArray[np.uint64]:
    """The tag words of a segment of `size` bytes: one 64-bit word per page of 64 KiB, the last of which may be
    incomplete."""
    low, high = np.frombuffer(digest, dtype="<u8").reshape(2, 1).astype(np.uint64)
    pages = np.arange(1, -(-size // _PAGE_BYTES) + 1, dtype=np.uint64)
    return mix64(mix64(low + pages * np.uint64(GOLDEN)) ^ high)
