"""Asking the pool for prompts without ever waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tokenlake.errors import TokenLakeError
from tokenlake.hints import Hints
from tokenlake.identity import LeaseId, SegmentKey, WriteId
from tokenlake.keys import Prefix, TokenIds
from tokenlake_client.match import MatchOptions

__all__ = ["HERE", "AskedLease", "Desk", "Lookup", "LookupPool", "Reserved"]

HERE = ""
"""For the name of this node."""


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

    def begin_nodes(self) -> _PendingNodes:
        """Ask for the node of each."""
        ...

    def release(self, start: int = 0) -> None:
        """End the promise for the segments from `start` on. Idempotent; never raises."""
        ...


class _Pending(Protocol):
    def poll(self) -> AskedLease | None: ...

    def cancel(self) -> None: ...


class _PendingNodes(Protocol):
    def poll(self) -> list[str] | None: ...

    def cancel(self) -> None: ...


class _PendingHeartbeat(Protocol):
    def poll(self) -> bool: ...


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
    def node(self) -> str:
        """The daemon's name."""
        ...

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

    def prefix(self, tokens: TokenIds = (), *, salt: str | None = None, weights_digest: str | None = None) -> Prefix:
        """The key chain of a prompt. `weights_digest`: of weights that were changed in place."""
        ...

    def begin_match(
        self, keys: Sequence[SegmentKey], options: MatchOptions = ..., *, deadline_s: float | None = None
    ) -> _Pending:
        """Begin to lease the longest prefix of `keys` that the pool has."""
        ...

    def begin_heartbeat(self) -> _PendingHeartbeat:
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
    ) -> Reserved:
        """Reserve slots for other processes of the session."""
        ...

    def claim(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        """They are computed here, and others wait so long for them; 0: not any more. Never waits, never raises."""
        ...

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        """A word that came late. Never waits, never raises."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class Lookup:
    """One question, and its answer once it is here: a lease, and on which node each of its segments lies. The second is
    asked for only when not all of them are here."""

    def __init__(
        self,
        pending: _Pending,
        keys: Sequence[SegmentKey],
        here: str,
        deadline_s: float,
        clock: Callable[[], float],
        in_flight_wait_s: float = 0.0,
        segment_s: float = 0.0,
    ) -> None:
        """`keys`: that it asks for. `here`: this node's name. `in_flight_wait_s`: so long the answer may wait for
        somebody who
        computes what is missing; `segment_s`: of that, for each segment that is."""
        self.pending = pending
        self.keys = keys
        self.in_flight_wait_s = in_flight_wait_s
        self._segment_s = segment_s
        self._here = here
        self._deadline_s = deadline_s
        self._clock = clock
        self._nodes: _PendingNodes | None = None
        self.asked = clock()
        self.until = self.asked + deadline_s
        """When it is late, unless it waits."""
        self.lease: AskedLease | None = None
        self.owners: tuple[str, ...] = ()
        """The node of each segment that is leased and wanted, or `HERE`."""
        self.hits = 0
        """Segments that were found."""
        self._done = False

    @property
    def waits(self) -> bool:
        """May the first answer still be waiting for somebody who computes what is missing?"""
        return self.in_flight_wait_s > 0 and self.lease is None

    @property
    def missing_s(self) -> float:
        """Of `in_flight_wait_s`, once the answer is here, what is due to the segments that are missing."""
        return min(self.in_flight_wait_s, self._segment_s * (len(self.keys) - self.hits))

    def poll(self) -> bool:
        """Is the answer here? Raises `TokenLakeError` when it will never be."""
        if self.lease is None:
            self.lease = self.pending.poll()
        if self.lease is not None and not self._done:
            self._find(self.lease)
        return self._done

    def keep(self, count: int) -> None:
        """Only the first `count` segments are wanted: the others are given back at once."""
        if count < len(self.owners):
            assert self.lease is not None
            self.lease.release(count)
            self.owners = self.owners[:count]

    def drop(self) -> None:
        """Nobody wants the answer: what was leased is given back, now or when it comes."""
        self.pending.cancel()
        if self._nodes is not None:
            self._nodes.cancel()

    def _find(self, lease: AskedLease) -> None:
        nodes: Sequence[str] | None = [self._here] * lease.hits
        if lease.local_hits < lease.hits:
            if self._nodes is None:
                self._nodes = lease.begin_nodes()
                self.until = max(self.until, self._clock() + self._deadline_s)
            nodes = self._nodes.poll()
        if nodes is not None:
            self.owners = tuple(HERE if node == self._here else node for node in nodes)
            self.hits = len(self.owners)
            self._nodes, self._done = None, True


class Pulse:
    """Does the daemon answer? Asked while a lookup waits for longer than a deadline, at most once in each."""

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._pool: LookupPool | None = None
        self._beat: _PendingHeartbeat | None = None
        self._asked = 0.0

    def ask(self, pool: LookupPool) -> None:
        """From now on. Raises `TokenLakeError`."""
        if not self._owed():
            self._pool, self._asked = pool, self._clock()
            self._beat = pool.begin_heartbeat()

    def beats(self) -> bool:
        """False: it has owed a sign of life for a deadline. Raises `TokenLakeError`."""
        now = self._clock()
        if self._owed():
            return now < self._asked + self._deadline_s
        if self._pool is not None and now >= self._asked + self._deadline_s:
            self.ask(self._pool)
        return True

    def _owed(self) -> bool:
        try:
            if self._beat is not None and not self._beat.poll():
                return True
        except TokenLakeError:
            # Of a connection that ended: whoever was asked over it hears of that.
            pass
        self._beat = None
        return False


class Desk:
    """Begins lookups. One that was given up is owed: until the daemon answers it no other is begun, so that a frozen
    daemon costs one deadline and not one per request. One that waits for somebody is given up as soon when the daemon
    gives no sign of life either."""

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._owed: Lookup | None = None
        self._pulse = Pulse(deadline_s, clock)

    def begin(
        self,
        pool: LookupPool,
        keys: Sequence[SegmentKey],
        request: str,
        hints: Hints | None = None,
        tokens: int = 0,
        in_flight_wait_s: float = 0.0,
        segment_s: float = 0.0,
    ) -> Lookup | None:
        """None while an answer is owed. `request`: its name in the logs. `tokens`: of the prompt. `in_flight_wait_s`:
        how long
        the answer may wait for somebody who computes what is missing; `segment_s`: of that, for each segment that is.
        Raises `TokenLakeError`."""
        if self._owed is not None and not self._settled(self._owed):
            return None
        deadline_s = self._deadline_s
        options = MatchOptions(
            request=request,
            hints=hints,
            prompt_tokens=tokens,
            in_flight_wait_s=in_flight_wait_s,
            in_flight_wait_per_segment_s=segment_s,
        )
        pending = pool.begin_match(keys, options, deadline_s=deadline_s)
        if in_flight_wait_s:
            self._pulse.ask(pool)
        return Lookup(pending, keys, pool.node, deadline_s, self._clock, in_flight_wait_s, segment_s)

    def late(self, lookup: Lookup) -> bool:
        """Give `lookup` up if its time is over; True then. Raises `TokenLakeError`."""
        now = self._clock()
        if now < lookup.until:
            return False
        if lookup.waits and self._pulse.beats():
            # One deadline more: what came meanwhile is asked for again before it is answered.
            if now < lookup.until + lookup.in_flight_wait_s + self._deadline_s:
                return False
            lookup.drop()
        elif self._owed is None:
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
            owed.drop()
        self._owed = None
        return True
