"""Matches that wait for whoever computes what comes next, instead of computing it too.

::

    first gap PENDING ----> its directory node is asked again, at growing intervals, until it is there, given up, or
    `in_flight_wait_s`
                            have passed
    first gap MISSING ----> claimed at its directory node: granted -> answered, the engine computes; others find it
    PENDING
                                                 PENDING -> somebody was faster: wait
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.peers import Peers, Reply
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.wire import Code
from tokenlake.wire import peer as wire

__all__ = ["MAX_IN_FLIGHT_WAIT_S", "Pendings", "Waiting"]

WAITED = Metric("tokenlake_pending_waits_total", "Matches that waited for somebody who was computing what they missed")
CLAIMED = Metric("tokenlake_pending_claims_total", "Matches whose engine was told to compute while others wait for it")

MAX_IN_FLIGHT_WAIT_S = 10.0
"""What is found meanwhile stays leased at other nodes, whose leases last `peer_lease_s`."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.05


class Waiting:
    """One match's patience."""

    def __init__(self, now: float, in_flight_wait_s: float, segment_s: float = 0.0) -> None:
        """`segment_s`: of `in_flight_wait_s`, for each segment that is missing; 0: all of it."""
        self._segment_s = segment_s
        self.in_flight_wait_s = min(in_flight_wait_s, MAX_IN_FLIGHT_WAIT_S)
        self.until = now + self.in_flight_wait_s
        self.pause_s = FIRST_PAUSE_S
        self.waited = False

    def lacks(self, segments: int) -> None:
        """So many are missing. Only what is said first counts: the fewer are left, the longer it has waited."""
        segment_s, self._segment_s = self._segment_s, 0.0
        if segment_s:
            less = max(0.0, self.in_flight_wait_s - segments * segment_s)
            self.in_flight_wait_s -= less
            self.until -= less


class Pendings:
    """Who waits, and who computes."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node

    def patient(self, waiting: Waiting, code: int) -> bool:
        """May a match whose first gap is `code` be answered later?"""
        return code in (Code.PENDING, Code.MISSING) and self._context.now + waiting.pause_s <= waiting.until

    def may_come_again(self, waiting: Waiting) -> bool:
        """Is there time to be told to wait by whoever has it, and to ask there after all?"""
        return self._context.now + 2 * LONGEST_PAUSE_S <= waiting.until

    def wait(self, waiting: Waiting, again: Callable[[], None]) -> None:
        """Somebody computes it: ask `again` soon."""
        if not waiting.waited:
            waiting.waited = True
            self._context.counters.add(WAITED)
        self._context.after(waiting.pause_s, again)
        waiting.pause_s = min(LONGEST_PAUSE_S, 2 * waiting.pause_s)

    def claim(
        self, waiting: Waiting, tenant: TenantId, key: SegmentKey, directory_node: NodeId, done: Callable[[Code], None]
    ) -> None:
        """Nobody has `key`: ask its directory node whether this node is the one to write it. `done` is called once:
        PENDING when
        another is, LOCAL when it came meanwhile, else MISSING: compute it."""

        def answered(code: Code) -> None:
            self._context.counters.add(CLAIMED, code is Code.MISSING)
            done(code)

        if directory_node == self._context.node:
            code, elsewhere = self._directory_node.ask(tenant, [key])[0]
            if code is Code.MISSING:
                self._directory_node.claim(directory_node, tenant, key, waiting.in_flight_wait_s)
            answered(Code.LOCAL if elsewhere is not None else code)
            return
        self._peers.call(
            directory_node,
            lambda call: wire.Lookup(call, tenant, key, "", waiting.in_flight_wait_s),
            self._context.config.match_deadline_s,
            partial(self._heard, directory_node, answered),
        )

    def _heard(self, directory_node: NodeId, answered: Callable[[Code], None], reply: Reply | None) -> None:
        code = Code.UNKNOWN
        if isinstance(reply, wire.LookupReply) and len(reply.codes) == 1:
            if reply.lease:
                self._peers.tell(directory_node, wire.ReleaseLease((reply.lease,)))
            code = Code(reply.codes[0]) if reply.codes[0] in (Code.PENDING, Code.MISSING) else Code.LOCAL
        answered(code)
