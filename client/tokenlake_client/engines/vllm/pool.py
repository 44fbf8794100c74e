"""The protocols of the pool that the connector uses; `tokenlake_client.pool.Pool` implements them. Imports no
engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import Hints
from tokenlake.identity import LeaseId, SegmentKey, WriteId
from tokenlake.keys import Prefix, TokenIds
from tokenlake_client.match import MatchOptions

__all__ = [
    "AttachedLease",
    "MatchedLease",
    "PendingHeartbeat",
    "PendingMatch",
    "PendingNodes",
    "RankPool",
    "Reservation",
    "SchedulerPool",
]


class MatchedLease(Protocol):
    """A promise of the pool not to evict the segments of a match until they are released."""

    @property
    def id(self) -> LeaseId:
        """The number by which other processes of the session attach to the lease."""
        ...

    @property
    def incarnation(self) -> int:
        """The incarnation of the daemon that granted the lease."""
        ...

    @property
    def hits(self) -> int:
        """The number of leased segments: from the first key on, without a gap."""
        ...

    @property
    def local_hits(self) -> int:
        """The number of leased segments that lie in this node's arena."""
        ...

    def begin_nodes(self) -> PendingNodes:
        """Ask the daemon for the node of each segment, without waiting for the answer."""
        ...

    def release(self, start: int = 0) -> None:
        """End the lease of the segments from `start` on. Idempotent; never raises."""
        ...


class PendingMatch(Protocol):
    """A match whose answer is polled."""

    def poll(self) -> MatchedLease | None:
        """The lease, once the answer has arrived. Raises `TokenLakeError` when it will not arrive."""
        ...

    def cancel(self) -> None:
        """Release the lease now, or when the answer arrives."""
        ...


class PendingNodes(Protocol):
    """A request for the nodes of a lease's segments, whose answer is polled."""

    def poll(self) -> list[str] | None:
        """The node of each segment, once the answer has arrived. Raises `TokenLakeError`."""
        ...

    def cancel(self) -> None:
        """Give the request up: the caller does not need the answer any more."""
        ...


class PendingHeartbeat(Protocol):
    """A heartbeat that was sent and whose reply is polled."""

    def poll(self) -> bool:
        """Has the daemon answered? Raises `TokenLakeError`."""
        ...


class Reservation(Protocol):
    """Slots that the scheduler's side reserved and the ranks fill."""

    @property
    def id(self) -> WriteId:
        """The number by which the ranks attach to the reservation; 0 when no slot was granted."""
        ...

    @property
    def incarnation(self) -> int:
        """The incarnation of the daemon that granted the slots."""
        ...

    @property
    def codes(self) -> bytes:
        """One `Code` per key."""
        ...

    def release(self) -> None:
        """Give up this process's part in the reservation."""
        ...


class SchedulerPool(Protocol):
    """The connection of the scheduler's side."""

    @property
    def node(self) -> str:
        """The name of the daemon's node."""
        ...

    @property
    def session(self) -> int:
        """The session, which the ranks join."""
        ...

    @property
    def incarnation(self) -> int:
        """The daemon's incarnation: another number after each of its starts."""
        ...

    @property
    def connected(self) -> bool:
        """Does the connection exist, as far as is known?"""
        ...

    def prefix(self, tokens: TokenIds = (), *, salt: str | None = None, weights_digest: str | None = None) -> Prefix:
        """The key chain of a prompt. `weights_digest`: the digest of weights that were changed in place."""
        ...

    def begin_match(
        self, keys: Sequence[SegmentKey], options: MatchOptions = ..., *, deadline_s: float | None = None
    ) -> PendingMatch:
        """Begin to lease the longest sequence of present segments from the first key on."""
        ...

    def begin_heartbeat(self) -> PendingHeartbeat:
        """Send a heartbeat; its reply shows that the daemon is alive."""
        ...

    def reserve(
        self,
        keys: Sequence[SegmentKey],
        first: int = 0,
        *,
        deadline_s: float = ...,
        request: str | None = None,
        hints: Hints | None = None,
    ) -> Reservation:
        """Reserve slots that other processes of the session fill."""
        ...

    def claim(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        """Set in-flight markers: this engine computes these segments, and matches wait for them for at most `seconds`.
        0 removes the markers. Never waits, never raises."""
        ...

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        """Send hints about segments that are stored already. Never waits, never raises."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class AttachedLease(Protocol):
    """A lease of the scheduler's side as a rank uses it."""

    @property
    def incarnation(self) -> int:
        """The incarnation of the daemon that granted the lease."""
        ...

    @property
    def hits(self) -> int:
        """The number of leased segments; 0 when the lease has ended."""
        ...

    def fetch(self, start: int, stop: int) -> list[NDArray[np.uint8]]:
        """Read-only views of segments [start, stop). The list is shorter when the rest was lost."""
        ...

    def release(self) -> None:
        """End this process's part in the lease."""
        ...


class RankPool(Protocol):
    """The connection of a rank: it has joined the scheduler's session."""

    @property
    def session(self) -> int:
        """The session; another number after a restart of the daemon."""
        ...

    @property
    def incarnation(self) -> int:
        """The daemon's incarnation."""
        ...

    def attach(self, lease: LeaseId, *, request: str) -> AttachedLease:
        """Attach to a lease of another process of this session."""
        ...

    def close(self) -> None:
        """Leave the session."""
        ...
