"""Asking the pool for prompts without ever waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tokenlake.errors import TokenLakeError
from tokenlake.identity import LeaseId, SegmentKey, WriteId
from tokenlake.keys import Prefix, TokenIds

__all__ = ["AskedLease", "Desk", "Lookup", "LookupPool", "Reserved"]


class AskedLease(Protocol):
    """Segments promised not to be evicted until released."""

    @property
    def id(self) -> LeaseId:
        """For other processes of the session."""
        ...

    @property
    def incarnation(self) -> int:
        """Of the daemon that granted it."""
        ...

    @property
    def hits(self) -> int:
        """Leased segments, from the first on without a gap."""
        ...

    @property
    def local_hits(self) -> int:
        """How many of them lie in this node's arena."""
        ...

    def release(self) -> None:
        """End the promise. Idempotent; never raises."""
        ...


class _Pending(Protocol):
    def poll(self) -> AskedLease | None: ...

    def cancel(self) -> None: ...


class Reserved(Protocol):
    """Slots that the ranks fill."""

    @property
    def id(self) -> WriteId:
        """For the ranks; 0 when no slot was granted."""
        ...

    @property
    def incarnation(self) -> int:
        """Of the daemon that granted them."""
        ...

    @property
    def codes(self) -> bytes:
        """What happened to each key."""
        ...

    def release(self) -> None:
        """Hold them no longer."""
        ...


class LookupPool(Protocol):
    """What `tokenlake_client.pool.Pool` offers to a scheduler."""

    @property
    def session(self) -> int:
        """For the ranks, which join it."""
        ...

    @property
    def incarnation(self) -> int:
        """Of the daemon."""
        ...

    @property
    def connected(self) -> bool:
        """As far as anybody noticed."""
        ...

    def prefix(self, tokens: TokenIds = (), *, salt: str | None = None) -> Prefix:
        """The key chain of a prompt."""
        ...

    def begin_match(self, keys: Sequence[SegmentKey], *, deadline_s: float = ...) -> _Pending:
        """Ask which of these the pool has."""
        ...

    def reserve(self, keys: Sequence[SegmentKey], first: int = 0, *, deadline_s: float = ...) -> Reserved:
        """Reserve slots for other processes of the session."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class Lookup:
    """One question, and its answer once it is here."""

    def __init__(self, pending: _Pending, until: float) -> None:
        self.pending = pending
        self.until = until
        self.lease: AskedLease | None = None

    def poll(self) -> bool:
        """Is the answer here? Raises `TokenLakeError` when it will never be."""
        if self.lease is None:
            self.lease = self.pending.poll()
        return self.lease is not None

    def drop(self) -> None:
        """Nobody wants the answer: what was leased is given back, now or when it comes."""
        self.pending.cancel()


class Desk:
    """Begins lookups. One that was given up is owed: until the daemon answers it no other is begun, so that a frozen
    daemon costs one deadline and not one per request."""

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._owed: Lookup | None = None

    def begin(self, pool: LookupPool, keys: Sequence[SegmentKey]) -> Lookup | None:
        """None while an answer is owed. Raises `TokenLakeError`."""
        if self._owed is not None and not self._settled(self._owed):
            return None
        pending = pool.begin_match(keys, deadline_s=self._deadline_s)
        return Lookup(pending, self._clock() + self._deadline_s)

    def late(self, lookup: Lookup) -> bool:
        """Give `lookup` up if its time is over; True then."""
        if self._clock() < lookup.until:
            return False
        if self._owed is None:
            self._owed = lookup
        else:
            lookup.drop()
        return True

    def _settled(self, owed: Lookup) -> bool:
        try:
            if not owed.poll():
                return False
            assert owed.lease is not None
            owed.lease.release()
        except TokenLakeError:
            pass
        self._owed = None
        return True
