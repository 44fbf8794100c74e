"""The protocols of the pool that an engine integration uses; `tokenlake_client.pool.Pool` implements them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix, Salt, TokenIds
from tokenlake.layout import Layout
from tokenlake_client.engines.common.in_flight import NO_WAIT, InFlightWait
from tokenlake_client.match import MatchOptions


class CacheLease(Protocol):
    """A promise of the pool not to evict some segments until they are released."""

    @property
    def hits(self) -> int:
        """The number of leased segments: from the first key on, without a gap."""
        ...

    @property
    def local_hits(self) -> int:
        """The number of leased segments that lie on this node."""
        ...

    def nodes(self) -> list[str]:
        """The name of the node that has each leased segment. The list is shorter than `hits` when a segment was
        lost."""
        ...

    def sources(self) -> tuple[list[str], list[float]]:
        """As `nodes`, and the expected seconds for each segment until its node has read it from its disk; 0 for a
        segment in memory."""
        ...

    def fetch(self, start: int, stop: int, *, at_most_s: float = ...) -> list[NDArray[np.uint8]]:
        """Read-only arrays over the leased segments [start, stop), one per segment. The list is shorter when a segment
        was lost: it ends before that segment. `at_most_s`: limit of the seconds that transfers
        from other nodes may take; 0: none."""
        ...

    @property
    def unreleased(self) -> int:
        """The number of segments, from the first on, that are not released."""
        ...

    def used(self, start: int, stop: int) -> None:
        """Record that queries attended to the leased segments [start, stop) where they lie."""
        ...

    def takes(self, start: int, stop: int, saved_s: float = 0.0) -> None:
        """Record which tokens of the prompt the engine takes from the pool: those from `start` to `stop`. `saved_s`:
        the seconds in which it would compute them; 0: unknown."""
        ...

    def release(self, start: int = 0, stop: int | None = None, *, counted: bool = True) -> None:
        """End the lease of the leased segments [start, stop) (default: all). `counted`: False if the engine matches the
        same tokens again."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class CachePool(Protocol):
    """A connection to the pool for one layout. Several threads may use it."""

    @property
    def layout(self) -> Layout:
        """The layout of every segment that this connection reads or writes."""
        ...

    @property
    def node(self) -> str:
        """The name of the daemon's node."""
        ...

    def prefix(self, tokens: TokenIds = (), *, adapter: str | None = None, salt: Salt = None) -> Prefix:
        """The keys of a prompt's segments, hash-chained over its tokens."""
        ...

    def match(self, keys: Sequence[SegmentKey], options: MatchOptions = ...) -> CacheLease:
        """Lease the longest sequence of segments that the pool has, beginning with the first key."""
        ...

    def mark_in_flight(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        """Set in-flight markers: this engine computes these segments, and matches wait for them for at most `seconds`.
        0 removes the markers. Never waits, never raises."""
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
        """Store consecutive segments of one prompt, the first at index `first`. Returns one `Code` per key.

        `fill(index into keys, array)` writes a segment into the slot that was granted for it. While the write budget is
        full, the call retries for at most `patience` seconds without progress.
        """
        ...

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        """Send hints about consecutive segments that are stored already. Never waits, never raises."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class RequestInfo(NamedTuple):
    """The facts that an engine tells the pool about the request for which it reads or stores segments."""

    name: str | None = None
    """The request's name in logs and for `tokenlake explain`; None: the pool makes one up."""
    hints: Hints | None = None
    tokens: int = 0
    """The number of tokens of the request's prompt."""

    def match_options(self, wait: InFlightWait = NO_WAIT) -> MatchOptions:
        """The options of a match that the request makes. `wait`: how long the match may wait for other engines."""
        return MatchOptions(
            request=self.name,
            hints=self.hints,
            prompt_tokens=self.tokens,
            in_flight_wait_s=wait.total_s,
            in_flight_wait_per_segment_s=wait.segment_s,
            in_flight_expected_s=wait.expected_s,
        )


UNNAMED = RequestInfo()


class PrefixView(Protocol):
    """Segments that queries attend to in the arena where they lie."""

    @property
    def hits(self) -> int:
        """The number of segments in the view, from the first segment of its lease on."""
        ...

    @property
    def nodes(self) -> Sequence[str]:
        """The name of the node that had each segment of the view when the view was opened."""
        ...

    def close(self) -> None:
        """End the view and its lease."""
        ...


class QueryPool(CachePool, Protocol):
    """A pool with query engines; `tokenlake_client.queries` states the contracts."""

    def open_view(self, lease: Any, heads: int, scale: float) -> PrefixView:
        """Open a view of the segments of `lease`, for queries of `heads` heads; logits are `scale` x query . key. The
        view owns the lease afterwards, unless this call raises."""
        ...

    def init_query(self, parts: Sequence[tuple[Any, int]]) -> Any:
        """A buffer for the queries of `parts`, (view, number of query tokens) each, in the layout's dtype."""
        ...

    def query(self, buffer: Any, layer: int, *, deadline_s: float) -> Any:
        """Send the queries in `buffer`, for `layer`. Returns a ticket, whose `wait` returns the attention."""
        ...
