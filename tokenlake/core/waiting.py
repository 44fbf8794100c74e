"""In-flight markers: they let the engines of the cluster compute a missing segment once instead of all at once.

A directory node keeps the marker of a segment that an engine computes; a lookup of the segment is answered PENDING
until the segment is stored, the marker is withdrawn or its time is over. A match that may wait uses the markers so::

    first missing segment PENDING    ask its directory node again, at growing intervals, until the segment is there,
                                     its marker is gone, or the match has waited for `in_flight_wait_s`
    first missing segment DEFERRED   the same: the owner is sending the segment to other nodes
    first missing segment MISSING    set the marker at its directory node. Granted: answer the match, its engine
                                     computes the segment. PENDING: another engine set the marker first; wait for it

An engine that computes a long prompt stores it in parts. It sets markers for the whole prompt (`engine.Claim`), because
the waiting matches would otherwise compute the rest as soon as the first part is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.peers import Peers, Reply
from tokenlake.core.sessions import Process
from tokenlake.identity import ConnectionId, NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.wire import Code, engine
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import split_keys

__all__ = ["MAX_CLAIMED", "MAX_IN_FLIGHT_WAIT_S", "InFlightMarkers", "Wait", "WaitingMatches"]

IN_FLIGHT_WAITS = Metric(
    "tokenlake_in_flight_waits_total",
    "Matches that waited for a segment that another engine was computing",
)
DEFERRED_WAITS = Metric(
    "tokenlake_deferred_waits_total",
    "Matches that waited for a segment whose owner was sending it to other nodes",
)
IN_FLIGHT_CLAIMS = Metric(
    "tokenlake_in_flight_claims_total",
    "Matches whose engine was told to compute a segment while the matches of other engines wait for it",
)

MAX_IN_FLIGHT_WAIT_S = 10.0
"""Upper bound on the wait of a match: the segments that it has found stay leased meanwhile, and leases at other nodes
end after `peer_lease_s`."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.005, 0.05
"""Seconds between two lookups of a waiting match: the first, and the maximum after repeated doubling."""
MAX_CLAIMED = 1024
"""Maximum number of in-flight markers of one process: markers of segments that are never stored must not fill a
directory, whose size is bounded."""


MAX_CLAIMED_BY_TENANT = 16 * MAX_CLAIMED
"""Maximum number of in-flight markers of all processes of a tenant; further ones are not set."""


class Wait:
    """The time for which one match may still wait for a segment that another engine computes."""

    def __init__(self, now: float, in_flight_wait_s: float, per_segment_s: float = 0.0) -> None:
        """`in_flight_wait_s`: maximum wait in seconds. `per_segment_s`: if above 0, the wait is also at most this many
        seconds for each missing segment."""
        self._per_segment_s = per_segment_s
        self.in_flight_wait_s = min(in_flight_wait_s, MAX_IN_FLIGHT_WAIT_S)
        self.until = now + self.in_flight_wait_s
        self.pause_s = FIRST_PAUSE_S
        self.counted: dict[Metric, None] = {}
        """Metrics (of the reasons for waiting) that have counted this match already, so that each counts it once."""

    def limit_to(self, missing: int) -> None:
        """Shorten the wait to the time allowed for `missing` segments. Only the first call has an effect, because the
        number of missing segments falls while the match waits."""
        per_segment_s, self._per_segment_s = self._per_segment_s, 0.0
        if per_segment_s:
            surplus_s = max(0.0, self.in_flight_wait_s - missing * per_segment_s)
            self.in_flight_wait_s -= surplus_s
            self.until -= surplus_s


class WaitingMatches:
    """Delays the answer to a match until its first missing segment is stored, or until its own engine should compute
    the segment."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node

    def may_wait(self, wait: Wait, code: int) -> bool:
        """Returns True if a match whose first missing segment has this code could find more segments by waiting, and
        has time left for it."""
        waits = code in (Code.PENDING, Code.DEFERRED, Code.MISSING)
        return waits and self._context.now + wait.pause_s <= wait.until

    def may_be_deferred(self, wait: Wait) -> bool:
        """Returns True if the match has time left to ask an owner again that answers DEFERRED because it is sending the
        segment to others."""
        return self._context.now + 2 * MAX_PAUSE_S <= wait.until

    def pause(self, wait: Wait, code: int, resume: Callable[[], None]) -> None:
        """Call `resume` after a pause, which grows from call to call. `code`: PENDING or DEFERRED, the code of the
        first missing segment, by which the wait is counted."""
        metric = DEFERRED_WAITS if code == Code.DEFERRED else IN_FLIGHT_WAITS
        if metric not in wait.counted:
            wait.counted[metric] = None
            self._context.counters.add(metric)
        self._context.after(wait.pause_s, resume)
        wait.pause_s = min(MAX_PAUSE_S, 2 * wait.pause_s)

    def claim(
        self, wait: Wait, tenant: TenantId, key: SegmentKey, directory_node: NodeId, done: Callable[[Code], None]
    ) -> None:
        """Ask the directory node of `key` to set the in-flight marker for this node. Calls `done` once, possibly before
        this returns, with MISSING: this node has the marker and its engine computes the segment; PENDING: another node
        has the marker; LOCAL: the segment is stored by now; UNKNOWN: the directory node cannot tell, or did not
        answer."""

        def answered(code: Code) -> None:
            self._context.counters.add(IN_FLIGHT_CLAIMS, code is Code.MISSING)
            done(code)

        def replied(reply: Reply | None) -> None:
            code = Code.UNKNOWN
            if isinstance(reply, wire.LookupReply) and len(reply.codes) == 1:
                if reply.lease:
                    self._peers.tell(directory_node, wire.ReleaseLease((reply.lease,)))
                code = Code(reply.codes[0]) if reply.codes[0] in (Code.PENDING, Code.MISSING) else Code.LOCAL
            answered(code)

        if directory_node == self._context.node:
            code, owner = self._directory_node.ask(tenant, [key])[0]
            if code is Code.MISSING:
                self._directory_node.claim(directory_node, tenant, key, wait.in_flight_wait_s)
            answered(Code.LOCAL if owner is not None else code)
            return
        self._peers.call(
            directory_node,
            lambda call: wire.Lookup(call, tenant, key, "", wait.in_flight_wait_s, ring=self._context.ring_version),
            self._context.config.match_deadline_s,
            replied,
        )


class InFlightMarkers:
    """The in-flight markers that this node has set at directory nodes for its engines. They end when the process
    withdraws them or ends; a directory node drops a marker by itself when its time is over or the segment is stored."""

    def __init__(self, context: Context, directory_node: DirectoryNode) -> None:
        self._context = context
        self._directory_node = directory_node
        self._claimed: dict[ConnectionId, tuple[TenantId, dict[SegmentKey, None]]] = {}
        self._by_tenant: Counter[TenantId] = Counter()
        """Number of markers of each tenant."""

    def claim(self, process: Process, request: engine.Claim) -> None:
        """Set in-flight markers for the segments that an engine's process is about to compute, or, if the request has 0
        seconds, withdraw them. A process with more than `MAX_CLAIMED` markers loses its oldest ones."""
        keys = split_keys(request.keys)[:MAX_CLAIMED]
        tenant, claimed = self._claimed.setdefault(process.connection, (process.session.tenant, {}))
        before = len(claimed)
        for key in keys:
            claimed.pop(key, None)
        self._by_tenant[tenant] += len(claimed) - before
        if not request.seconds:
            self._end(tenant, keys)
            return
        keys = keys[: max(0, MAX_CLAIMED_BY_TENANT - self._by_tenant[tenant])]
        before = len(claimed)
        claimed.update(dict.fromkeys(keys))
        surplus = list(claimed)[: max(0, len(claimed) - MAX_CLAIMED)]
        for key in surplus:
            del claimed[key]
        self._by_tenant[tenant] += len(claimed) - before
        self._end(tenant, surplus)
        absent = [key for key in keys if self._context.store.get(tenant, key) is None]
        self._directory_node.announce(tenant, absent, min(request.seconds, MAX_IN_FLIGHT_WAIT_S))

    def process_gone(self, connection: ConnectionId) -> None:
        """Withdraw the in-flight markers of a process that left or died."""
        tenant, claimed = self._claimed.pop(connection, (TenantId(""), {}))
        self._by_tenant[tenant] -= len(claimed)
        self._end(tenant, list(claimed))

    def _end(self, tenant: TenantId, keys: list[SegmentKey]) -> None:
        """Withdraw the in-flight markers of these segments, except those that are stored or being written on this
        node."""
        self._directory_node.withdraw(tenant, [key for key in keys if self._context.store.get(tenant, key) is None])

    def census(self) -> dict[str, int]:
        """How many objects this part of the rules keeps, by kind: for gauges, and for tests that look for leaks."""
        return {"claims": sum(len(claimed) for _, claimed in self._claimed.values())}
