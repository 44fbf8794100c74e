"""Lookups: questions to the pool for the cached prefix of a prompt. No call waits for the daemon. Imports no engine.

The waits of lookups for other engines are decided by `in_flight_waits`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenlake.errors import TokenLakeError
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake_client.engines.common.in_flight import NO_WAIT, InFlightWait
from tokenlake_client.engines.common.pool import RequestInfo
from tokenlake_client.engines.vllm.late_lookup import LateLookup
from tokenlake_client.engines.vllm.load_cost import HERE, LOCAL, Owner
from tokenlake_client.engines.vllm.pool import MatchedLease, PendingHeartbeat, PendingMatch, PendingNodes, SchedulerPool


class Lookup:
    """A request for the cached prefix of a prompt, and its answer: a lease, and the node of each leased segment. The
    daemon is asked for the nodes by a second request, only if some segments lie on other nodes."""

    def __init__(
        self,
        pending: PendingMatch,
        keys: Sequence[SegmentKey],
        node: str,
        deadline_s: float,
        clock: Callable[[], float],
        wait: InFlightWait = NO_WAIT,
    ) -> None:
        """`pending`: the match for `keys`. `node`: the name of this node. `wait`: how long the answer may wait for
        another engine."""
        self.keys = keys
        self.wait = wait
        self._pending = pending
        self._node = node
        self._deadline_s = deadline_s
        self._clock = clock
        self._pending_nodes: PendingNodes | None = None
        self.started = clock()
        self.due = self.started + deadline_s
        """The time from which the next answer to the lookup counts as late, unless the lookup waits for another
        engine."""
        self.lease: MatchedLease | None = None
        self.owners: tuple[Owner, ...] = ()
        """The owner of each segment that is still leased."""
        self.hits = 0
        """The number of segments that the lookup found in the pool."""
        self._done = False
        self._took: tuple[int, int, float] | None = None

    @property
    def waiting(self) -> bool:
        """True if the daemon may still hold the answer back because another engine computes the segments."""
        return self.wait.total_s > 0 and self.lease is None

    @property
    def answered(self) -> bool:
        """True if the answer of the lookup has arrived."""
        return self._done

    @property
    def marker_s(self) -> float:
        """The seconds for which in-flight markers of the missing segments should last: as long as another engine would
        wait for these segments."""
        return self.wait.seconds(len(self.keys) - self.hits)

    def poll(self) -> bool:
        """True if the answer of the lookup has arrived. Raises `TokenLakeError` if it will not arrive."""
        if self.lease is None:
            answers = self._pending.answers
            self.lease = self._pending.poll()
            if self._pending.answers > answers:
                # A long prompt takes several requests, and the engine may poll only between its steps.
                self.due = max(self.due, self._clock() + self._deadline_s)
            if self.lease is not None and self._took is not None:
                self.lease.takes(*self._took)
        if self.lease is not None and not self._done:
            self._find_owners(self.lease)
        return self._done

    def takes(self, start: int, stop: int, saved_s: float = 0.0) -> None:
        """Record the tokens that are loaded, as `MatchedLease.takes`. A later call replaces an earlier one."""
        self._took = start, stop, saved_s
        if self.lease is not None:
            self.lease.takes(start, stop, saved_s)

    def keep(self, count: int) -> None:
        """Keep the first `count` leased segments of the lookup's answer, and release the others."""
        if self.lease is not None and count < len(self.owners):
            self.lease.release(count)
            self.owners = self.owners[:count]

    def drop(self) -> None:
        """Release the lookup's lease, now or when the answer arrives."""
        self._pending.cancel()
        if self._pending_nodes is not None:
            self._pending_nodes.cancel()

    def _find_owners(self, lease: MatchedLease) -> None:
        if lease.local_hits < lease.hits:
            if self._pending_nodes is None:
                self._pending_nodes = lease.begin_nodes()
                self.due = max(self.due, self._clock() + self._deadline_s)
            nodes = self._pending_nodes.poll()
            if nodes is None:
                return
            names = (HERE if node == self._node else node for node in nodes)
            self.owners = tuple(map(Owner, names, self._pending_nodes.disk_s))
        else:
            self.owners = (LOCAL,) * lease.hits
        self.hits = len(self.owners)
        self._pending_nodes, self._done = None, True


class Lookups:
    """Starts lookups and gives up those whose answer is late (`late_lookup`). A lookup that waits for another engine is
    given up as early if the daemon does not answer heartbeats. For the scheduler's thread."""

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._late = LateLookup(clock)
        self._heartbeat = _Heartbeat(deadline_s, clock)

    @property
    def silent(self) -> bool:
        """True if the daemon has not answered a late lookup for more than `late_lookup.SILENT_S`."""
        return self._late.silent

    def begin(
        self,
        pool: SchedulerPool,
        keys: Sequence[SegmentKey],
        request: str,
        hints: Hints | None = None,
        tokens: int = 0,
        wait: InFlightWait = NO_WAIT,
    ) -> Lookup | None:
        """Start a lookup for `keys`; None while a lookup that was given up has no answer. `request`: the request's name
        in logs. `tokens`: the length of the prompt. Raises `TokenLakeError`."""
        if not self._late.answered():
            return None
        options = RequestInfo(request, hints, tokens).match_options(wait)
        pending = pool.begin_match(keys, options, deadline_s=self._deadline_s)
        try:
            if wait.total_s:
                self._heartbeat.begin(pool)
        except BaseException:
            pending.cancel()
            raise
        return Lookup(pending, keys, pool.node, self._deadline_s, self._clock, wait)

    def give_up_late(self, lookup: Lookup) -> bool:
        """Give `lookup` up if its answer is late, and return whether it was. Raises `TokenLakeError`."""
        now = self._clock()
        if now < lookup.due:
            return False
        if lookup.waiting and self._heartbeat.alive():
            # The limit is one deadline more than the wait for the other engine, because the daemon looks up the
            # segments that were stored meanwhile before it answers.
            if now < lookup.due + lookup.wait.total_s + self._deadline_s:
                return False
            lookup.drop()
        else:
            self._late.give_up(lookup)
        return True


class _Heartbeat:
    """Sends a heartbeat per deadline to the daemon while a lookup waits for longer than a deadline, to notice that the
    daemon is frozen."""

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._pool: SchedulerPool | None = None
        self._beat: PendingHeartbeat | None = None
        self._begun = 0.0

    def begin(self, pool: SchedulerPool) -> None:
        """Send a heartbeat over `pool`, unless the reply to an earlier one is outstanding. Raises `TokenLakeError`."""
        if not self._outstanding():
            self._pool, self._begun = pool, self._clock()
            self._beat = pool.begin_heartbeat()

    def alive(self) -> bool:
        """True if the daemon answers heartbeats; False if the reply to a heartbeat has been outstanding for a deadline.
        Sends the next heartbeat when it is due. Raises `TokenLakeError`."""
        now = self._clock()
        if self._outstanding():
            return now < self._begun + self._deadline_s
        if self._pool is not None and now >= self._begun + self._deadline_s:
            self.begin(self._pool)
        return True

    def _outstanding(self) -> bool:
        try:
            if self._beat is not None and not self._beat.poll():
                return True
        except TokenLakeError:
            # The connection has ended. The lookup, which uses the same connection, raises that error too.
            pass
        self._beat = None
        return False
