"""The protocols of the pool that the connector uses; `tokenlake_client.pool.Pool` implements them. Imports no
engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import Hints
from tokenlake.identity import LeaseId, SegmentKey, WriteId
from tokenlake.keys import Prefix, Salt, TokenIds
from tokenlake.wire import Code
from tokenlake_client.match import MatchOptions


class MatchedLease(Protocol):
    """A promise of the pool not to evict the segments of a match until they are released."""

    @property
    def ids(self) -> tuple[LeaseId, ...]:
        """The numbers of the lease's parts, by which other processes of the session attach to it."""
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

    def takes(self, start: int, stop: int, saved_s: float = 0.0) -> None:
        """Record that vLLM's own cache has the prompt's tokens before `start`, and that vLLM computes those from `stop`
        on. `saved_s`: the seconds in which it would compute those between; 0: unknown."""
        ...

    def release(self, start: int = 0) -> None:
        """Release the leased segments from index `start` on. Idempotent; never raises."""
        ...


class PendingMatch(Protocol):
    """A match that was sent to the daemon and whose answer is polled."""

    @property
    def answers(self) -> int:
        """The number of answers of the daemon so far. After each of them but the last, `poll` asks for further keys."""
        ...

    def poll(self) -> MatchedLease | None:
        """The lease, once the daemon's answer to the match has arrived, and None before. Raises `TokenLakeError` when
        it will not arrive."""
        ...

    def cancel(self) -> None:
        """Release the lease of the match, now or when the daemon's answer arrives."""
        ...


class PendingNodes(Protocol):
    """A request to the daemon for the nodes of a lease's segments, whose answer is polled."""

    @property
    def disk_s(self) -> Sequence[float]:
        """Once the answer has arrived: the expected seconds for each segment until its node has read it from its disk;
        0 for a segment in memory."""
        ...

    def poll(self) -> list[str] | None:
        """The node of each leased segment, once the daemon's answer has arrived. Raises `TokenLakeError`."""
        ...

    def cancel(self) -> None:
        """Give up the request for the nodes of a lease's segments: the caller does not need the answer any more."""
        ...


class PendingHeartbeat(Protocol):
    """A heartbeat that was sent and whose reply is polled."""

    def poll(self) -> bool:
        """True if the daemon has answered the heartbeat. Raises `TokenLakeError`."""
        ...


class Reservation(Protocol):
    """The slots of a write that the scheduler's side reserved and the ranks fill."""

    @property
    def id(self) -> WriteId:
        """The reservation's number, by which the ranks attach to it; 0 when no slot was granted."""
        ...

    @property
    def incarnation(self) -> int:
        """The incarnation of the daemon that granted the slots."""
        ...

    @property
    def codes(self) -> bytes:
        """One `Code` per key of the segments whose slots were reserved."""
        ...

    def release(self) -> None:
        """Give up this process's share in the reservation; the slots stay reserved while other processes hold them."""
        ...


class SchedulerPool(Protocol):
    """The connection of the connector's scheduler side to the daemon."""

    @property
    def node(self) -> str:
        """The name of the daemon's node."""
        ...

    @property
    def session(self) -> int:
        """The number of the session that the scheduler's side opened, which the ranks join."""
        ...

    @property
    def incarnation(self) -> int:
        """The daemon's incarnation: another number after each of its starts."""
        ...

    @property
    def connected(self) -> bool:
        """True if the connection exists, as far as is known."""
        ...

    def prefix(
        self,
        tokens: TokenIds = (),
        *,
        adapter: str | None = None,
        salt: Salt = None,
        extras: Mapping[int, Sequence[bytes]] | None = None,
        weights_digest: str | None = None,
    ) -> Prefix:
        """The key chain of a prompt. `adapter`: the digest of its LoRA adapter. `extras`: by the index of a segment,
        digests of inputs that the tokens do not determine. `weights_digest`: the digest of weights that were changed in
        place."""
        ...

    def contents(
        self, prefix: Prefix, tokens: TokenIds, segments: range, model: str, adapter: str = ""
    ) -> tuple[bytes, ...]:
        """The contents of `segments` of a prompt for routers; empty unless the daemon publishes segments of `model`.
        `tokens`: those of the prompt from the first one on. `adapter`: the name of its LoRA adapter."""
        ...

    def begin_match(
        self, keys: Sequence[SegmentKey], options: MatchOptions = ..., *, deadline_s: float | None = None
    ) -> PendingMatch:
        """Begin to lease the longest sequence of segments that the pool has, beginning with the first key. The answer
        is polled."""
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
        contents: Sequence[bytes] = (),
    ) -> Reservation:
        """Reserve slots that other processes of the session fill."""
        ...

    def mark_in_flight(self, keys: Sequence[SegmentKey], seconds: float) -> None:
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
        """The incarnation of the daemon that granted the attached lease."""
        ...

    @property
    def hits(self) -> int:
        """The number of leased segments, from the first key on; 0 when the lease has ended."""
        ...

    def fetch(self, start: int, stop: int, *, at_most_s: float = ...) -> list[NDArray[np.uint8]]:
        """Read-only arrays over the leased segments [start, stop). The list is shorter when a segment was lost: it ends
        before that segment. `at_most_s`: limit of the seconds that transfers from other nodes may take; 0: none."""
        ...

    def code(self, index: int) -> Code:
        """The state of a leased segment; after a fetch that ended before it, the reason."""
        ...

    def release(self) -> None:
        """End this process's share in the lease; other processes of the session may hold it further."""
        ...


class RankPool(Protocol):
    """The connection of a rank to the daemon: it has joined the scheduler's session."""

    @property
    def session(self) -> int:
        """The number of the session; another number after a restart of the daemon."""
        ...

    @property
    def incarnation(self) -> int:
        """The daemon's incarnation."""
        ...

    def attach(self, *parts: LeaseId, request: str, deadline_s: float | None = ...) -> AttachedLease:
        """Attach to a lease of another process of this session, given by all its `ids`. `deadline_s`: None for that of
        the pool's calls."""
        ...

    def close(self) -> None:
        """Leave the session."""
        ...
