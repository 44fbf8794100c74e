"""Lookups: questions to the pool for the cached segments of a prompt. No call waits for the daemon. Imports no engine.

No lookup is started until the daemon has answered the late one, so that a frozen daemon delays one request by one
deadline and not every request. The waits of lookups for other engines are decided by `in_flight_waits`; they end at
their limit, also where the daemon is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake_client.engines.common.in_flight import NO_WAIT, InFlightWait
from tokenlake_client.engines.common.request import RequestInfo
from tokenlake_client.engines.vllm.known.load_cost import HERE, LOCAL, Owner
from tokenlake_client.engines.vllm.polled_match import LateLookup, PolledMatch
from tokenlake_client.lease import Lease, PendingNodes
from tokenlake_client.match import PendingMatch
from tokenlake_client.pool import Pool


class Lookup(PolledMatch):
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
        another engine; `due` does not limit it."""
        super().__init__(pending, deadline_s, clock)
        self.keys = keys
        self.wait = wait
        self._node = node
        self._pending_nodes: PendingNodes | None = None
        self.owners: tuple[Owner, ...] = ()
        """The owner of each segment that is still leased."""
        self.hits = 0
        """The number of segments that the lookup found in the pool."""
        self.answered = False
        """True: the answer of the lookup has arrived."""

    @property
    def waiting(self) -> bool:
        """True if the daemon may still hold the answer back because another engine computes the segments."""
        return self.wait.total_s > 0 and self.lease is None

    @property
    def marker_s(self) -> float:
        """The seconds for which in-flight markers of the missing segments should last: as long as another engine would
        wait for these segments."""
        return self.wait.seconds(len(self.keys) - self.hits)

    def poll(self) -> bool:
        """See `PolledMatch`."""
        super().poll()
        if self.lease is not None and not self.answered:
            self._find_owners(self.lease)
        return self.answered

    def keep(self, count: int) -> None:
        """Keep the first `count` leased segments of the lookup's answer, and release the others."""
        if self.lease is not None and count < len(self.owners):
            self.lease.release(count)
            self.owners = self.owners[:count]

    def drop(self) -> None:
        """See `PolledMatch`."""
        super().drop()
        if self._pending_nodes is not None:
            self._pending_nodes.cancel()

    def _find_owners(self, lease: Lease) -> None:
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
        self._pending_nodes, self.answered = None, True


class Lookups:
    """Starts lookups and gives up those whose answer is late (`LateLookup`). For the scheduler's thread."""

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._late = LateLookup(clock)

    @property
    def silent(self) -> bool:
        """True if the daemon has not answered a late lookup for more than `SILENT_S`."""
        return self._late.silent

    def begin(
        self,
        pool: Pool,
        keys: Sequence[SegmentKey],
        request: str,
        hints: Hints | None = None,
        tokens: int = 0,
        wait: InFlightWait = NO_WAIT,
        traceparent: str | None = None,
    ) -> Lookup | None:
        """Start a lookup for `keys`; None while a lookup that was given up has no answer. `request`: the request's name
        in logs. `tokens`: the length of the prompt. `traceparent`: as of `MatchOptions`. Raises `TokenLakeError`."""
        if not self._late.answered():
            return None
        options = RequestInfo(request, hints, tokens, traceparent).match_options(wait)
        pending = pool.engine.begin_match(keys, options, deadline_s=self._deadline_s)
        return Lookup(pending, keys, pool.node, self._deadline_s, self._clock, wait)

    def give_up_late(self, lookup: Lookup) -> bool:
        """Give `lookup` up if its answer is late, and return whether it was."""
        # One deadline more than the wait for the other engine, because the daemon looks up the segments that were
        # stored meanwhile before it answers.
        if self._clock() < lookup.due + (lookup.wait.total_s + self._deadline_s if lookup.waiting else 0.0):
            return False
        self._late.give_up(lookup)
        return True
