"""Statistics of the eviction policy: exchanged between the nodes.

They are counts per pool (tenant and slot size) and hold no key, token or secret. A node sees only those segments of a
prompt that it stores. The exchange lets each node decide nearly as if it saw all segments, and gives all segments of a
prompt the same value on every node.
"""

from __future__ import annotations

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context
from tokenlake.core.instructions import Note
from tokenlake.identity import TenantId
from tokenlake.memory import PoolId
from tokenlake.wire import peer as wire

SEND_S = 2.0
"""Seconds between two messages with statistics; each goes to one peer in turn."""
POOLS_SENT = 4
"""Maximum number of pools whose statistics are in one message; the other pools follow in later messages."""


class Learned:
    """The statistics that one node's eviction policy has learned: sends and receives them."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._sent = 0
        """Number of messages with statistics that were sent so far."""
        self._noted = False
        """True once the log notes that another node's statistics could not be used."""

    def start(self) -> None:
        """Begin to send the statistics to the other nodes in turn, one message per `SEND_S`."""
        self._context.after(SEND_S, self._send)

    def _send(self) -> None:
        reachable = [peer.node for peer in self._peers if peer.reachable]
        self._context.store.models.exchange_among(1 + len(reachable))
        # Without a reachable peer the statistics need not be collected.
        learned = self._context.store.models.save() if reachable else {}
        pools = [(tenant, size, data) for (tenant, size), data in learned.items()]
        if pools:
            node = reachable[self._sent % len(reachable)]
            # The next pools follow once all peers were sent these; otherwise each peer would always get the same ones.
            first = self._sent // len(reachable) * POOLS_SENT % len(pools)
            some = (pools[first:] + pools[:first])[:POOLS_SENT]
            self._peers.tell(node, wire.EvictionStatistics(tuple(some)))
            self._sent += 1
        self.start()

    def heard(self, message: wire.EvictionStatistics) -> None:
        """Merge the statistics of another node. Statistics of another version are ignored, and noted in the log
        once."""
        try:
            self._context.store.models.merge({PoolId(TenantId(name), size): data for name, size, data in message.pools})
        except ValueError as error:
            if not self._noted:
                self._context.emit(Note(f"eviction statistics of another node are not used: {error}"))
            self._noted = True
