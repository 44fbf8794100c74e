"""The protocols of the pool that manager and workers use; `tokenlake_client.pool.Pool` implements them. Imports no
engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import Hints
from tokenlake.identity import LeaseId, SegmentKey, WriteId
from tokenlake.keys import Salt
from tokenlake_client.engines.vllm.pool import Reservation
from tokenlake_client.match import MatchOptions


class ChunkLease(Protocol):
    """A promise of the pool not to evict the segments of a match of independent keys."""

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
        """The number of leased segments."""
        ...

    @property
    def codes(self) -> bytes:
        """One `Code` for each key of the match; those with LOCAL or REMOTE are leased, in this order."""
        ...

    def fetch(self, start: int, stop: int) -> Sequence[NDArray[np.uint8]]:
        """Transfer the leased segments [start, stop) to this node and verify them. Returns an array for each, up to the
        first one that was lost or does not match its checksum."""
        ...

    def takes(self, start: int, stop: int) -> None:
        """Record that vLLM's own cache has the prompt's tokens before `start`, and that vLLM computes those from `stop`
        on."""
        ...

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Release the leased segments [start, stop). Idempotent; never raises."""
        ...


class PendingChunks(Protocol):
    """A match of independent keys whose answer is polled."""

    @property
    def answers(self) -> int:
        """The number of answers of the daemon so far, one per window of keys."""
        ...

    def poll(self) -> ChunkLease | None:
        """The lease, once the answer has arrived. Raises `TokenLakeError` when it will not arrive."""
        ...

    def cancel(self) -> None:
        """Release the lease of the match, now or when the answer arrives."""
        ...


class ChunkPool(Protocol):
    """The connection of the manager to the daemon."""

    @property
    def session(self) -> int:
        """The number of the session, which the ranks join."""
        ...

    @property
    def incarnation(self) -> int:
        """The daemon's incarnation: another number after each of its starts."""
        ...

    @property
    def connected(self) -> bool:
        """True if the connection exists, as far as is known."""
        ...

    def opaque_keys(
        self,
        engine_keys: Iterable[tuple[int, bytes]],
        *,
        adapter: str | None = None,
        salt: Salt = None,
        weights_digest: str | None = None,
    ) -> list[SegmentKey]:
        """The keys of segments: for each, (number of its cache group, vLLM's hash of its last block)."""
        ...

    def begin_match(
        self, keys: Sequence[SegmentKey], options: MatchOptions = ..., *, deadline_s: float | None = None
    ) -> PendingChunks:
        """Begin to lease the segments of `keys` that the pool has. The answer is polled."""
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

    def close(self) -> None:
        """End the connection."""
        ...


class AttachedChunks(Protocol):
    """A lease of the manager as a rank uses it."""

    @property
    def incarnation(self) -> int:
        """The incarnation of the daemon that granted the attached lease."""
        ...

    def fetch(self, start: int, stop: int) -> Sequence[NDArray[np.uint8]]:
        """Read-only arrays over the leased segments [start, stop), up to the first one that was lost."""
        ...

    def release(self) -> None:
        """End this process's share in the lease."""
        ...


class RankWrite(Protocol):
    """A reservation of the manager as a rank uses it."""

    @property
    def incarnation(self) -> int:
        """The incarnation of the daemon that granted the slots."""
        ...

    @property
    def slots(self) -> Sequence[tuple[int, NDArray[np.uint8]]]:
        """The granted slots: (index of the key, writable array over the slot)."""
        ...

    def commit(self, shards: int | None = None) -> bytes:
        """Publish the shards of the bit mask. Returns a `Code` for each key."""
        ...

    def leave(self) -> None:
        """End this process's part in the write."""
        ...

    def abort(self) -> None:
        """Give the slots back."""
        ...


class ChunkRankPool(Protocol):
    """The connection of a rank to the daemon: it has joined the manager's session."""

    @property
    def session(self) -> int:
        """The number of the session."""
        ...

    @property
    def incarnation(self) -> int:
        """The daemon's incarnation."""
        ...

    def attach(self, *parts: LeaseId, request: str, deadline_s: float | None = ...) -> AttachedChunks:
        """Attach to a lease of the manager, given by all its `ids`."""
        ...

    def attach_write(self, write: WriteId) -> RankWrite:
        """Attach to a reservation of the manager."""
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
        """Store segments; `fill(index, slot)` fills the slot of each one that is granted. Returns a `Code` for each
        key."""
        ...

    def close(self) -> None:
        """Leave the session."""
        ...
