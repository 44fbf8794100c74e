"""What an engine integration needs of a pool; `tokenlake_client.pool.Pool` provides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix, TokenIds
from tokenlake.layout import Layout
from tokenlake_client.match import MatchOptions

__all__ = ["NOBODY", "Asked", "CacheLease", "CachePool", "PrefixView", "QueryPool"]


class CacheLease(Protocol):
    """Segments promised not to be evicted until released."""

    @property
    def hits(self) -> int:
        """Leased segments, counted from the first key without a gap."""
        ...

    @property
    def local_hits(self) -> int:
        """Those of them that lie on this node."""
        ...

    def nodes(self) -> list[str]:
        """The node of each; fewer than `hits` where one was lost."""
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


class CachePool(Protocol):
    """One connection to the pool, for one layout. Usable from several threads."""

    @property
    def layout(self) -> Layout:
        """The layout of every segment read or written here."""
        ...

    @property
    def node(self) -> str:
        """The daemon's."""
        ...

    def prefix(self, tokens: TokenIds = (), *, adapter: str | None = None, salt: str | None = None) -> Prefix:
        """The key chain of a prompt."""
        ...

    def match(self, keys: Sequence[SegmentKey], options: MatchOptions = ...) -> CacheLease:
        """Lease the longest prefix of `keys` that the pool has."""
        ...

    def claim(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        """These are about to be computed here: others wait for them, for so long at most; 0: not any more. Never waits,
        never raises."""
        ...

    def store_all(
        self,
        keys: Sequence[SegmentKey],
        fill: Callable[[int, NDArray[np.uint8]], None],
        first: int = 0,
        patience: float = 0.0,
        *,
        request: str | None = None,
        hints: Hints | None = None,
    ) -> bytes:
        """Store consecutive segments of one prompt, the first at index `first`; one `Code` per key.

        `fill(index into keys, array)` writes a segment into the slot that was granted for it. Goes on trying
        for at most `patience` seconds without progress while the write budget is full.
        """
        ...

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        """A word about consecutive segments of one prompt that came late. Never waits, never raises."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class Asked(NamedTuple):
    """On whose behalf segments are read or stored."""

    name: str | None = None
    """Of the request, in logs and for `tokenlake explain`; None: the pool makes one up."""
    hints: Hints | None = None
    tokens: int = 0
    """Of the prompt."""


NOBODY = Asked()


class PrefixView(Protocol):
    """Segments that queries attend to where they lie."""

    @property
    def hits(self) -> int:
        """How many, from the first of the lease on."""
        ...

    @property
    def nodes(self) -> Sequence[str]:
        """Where each of them was when it was opened."""
        ...

    def close(self) -> None:
        """Give it back, and its lease."""
        ...


class QueryPool(CachePool, Protocol):
    """A pool with query engines; the contracts are in `tokenlake_client.queries`."""

    def open_view(self, lease: Any, heads: int, scale: float) -> PrefixView:
        """Takes the lease over, unless it raises."""
        ...

    def init_query(self, parts: Sequence[tuple[Any, int]]) -> Any:
        """A buffer for the queries of these (view, tokens), of the layout's dtype."""
        ...

    def query(self, buffer: Any, layer: int, *, deadline_s: float) -> Any:
        """A ticket."""
        ...
