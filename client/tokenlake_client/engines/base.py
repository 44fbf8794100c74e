"""What an engine integration needs of a pool; `tokenlake_client.pool.Pool` provides it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix, TokenIds
from tokenlake.layout import Layout

__all__ = ["CacheLease", "CachePool", "CacheWrite"]


class CacheLease(Protocol):
    """Segments promised not to be evicted until released."""

    @property
    def hits(self) -> int:
        """Leased segments, counted from the first key without a gap."""
        ...

    def fetch(self, start: int, stop: int) -> list[NDArray[np.uint8]]:
        """Read-only views, one per segment; fewer than asked when the rest was lost."""
        ...

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """End the promise for segments [start, stop)."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class CacheWrite(Protocol):
    """Slots to fill in place: committed when the block ends, aborted when it raises."""

    @property
    def slots(self) -> list[tuple[int, NDArray[np.uint8]]]:
        """(index into the keys, writable array of `segment_bytes`), for the granted keys only."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class CachePool(Protocol):
    """One connection to the pool, for one layout. Usable from several threads."""

    @property
    def layout(self) -> Layout:
        """The layout of every segment read or written here."""
        ...

    def prefix(self, tokens: TokenIds = (), *, adapter: str | None = None, salt: str | None = None) -> Prefix:
        """The key chain of a prompt."""
        ...

    def match(self, keys: Sequence[SegmentKey]) -> CacheLease:
        """Lease the longest run of present segments from the first key on."""
        ...

    def store(self, keys: Sequence[SegmentKey], first: int, patience: float = 0.0) -> CacheWrite:
        """Reserve slots for `keys`, which are the prompt's keys from segment `first` on."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...
