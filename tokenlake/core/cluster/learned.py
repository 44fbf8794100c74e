"""Statistics of the eviction policy: shared with the other nodes, and saved across restarts of the process.

They are counts per pool (tenant and slot size) and hold no key, token or secret. A node sees only those segments of a
prompt that it stores. The exchange lets each node decide nearly as if it saw all segments, and gives all segments of a
prompt the same value on every node.
"""

from __future__ import annotations

import msgspec

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context
from tokenlake.core.instructions import Note
from tokenlake.identity import TenantId
from tokenlake.memory import PoolId
from tokenlake.memory.eviction.odds import Odds
from tokenlake.wire import peer as wire

SEND_S = 2.0
"""Seconds between two messages with statistics; each goes to one peer in turn."""
POOLS_SENT = 4
"""Maximum number of pools whose statistics are in one message; the other pools follow in later messages."""
MAX_LEARNED_BYTES = 16 << 20
"""Maximum bytes of saved statistics that a node accepts; no node saves as many."""


class _Saved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pools: tuple[tuple[str, int, bytes], ...]
    """Statistics of each pool: (tenant, bytes of a slot, result of `EvictionPolicy.save`)."""


_decoder = msgspec.msgpack.Decoder(_Saved)


class Learned:
    """The statistics that one node's eviction policy has learned: sends, receives, saves and restores them."""

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

    def save(self) -> bytes:
        """Returns the encoded statistics of all pools, those without memory included. Changes nothing."""
        pools = tuple((tenant, size, data) for (tenant, size), data in self._context.store.models.save().items())
        return msgspec.msgpack.encode(_Saved(pools))

    def check(self, data: bytes) -> None:
        """Raises `ValueError` with the reason why `restore` cannot use the data. Changes nothing."""
        for _, _, learned in self._decoded(data).pools:
            Odds().restore(learned)

    def restore(self, data: bytes) -> None:
        """Begin with the statistics that an earlier process saved; called after `check`, before the node has
        segments."""
        saved = self._decoded(data)
        self._context.store.models.restore(
            {PoolId(TenantId(name), size): learned for name, size, learned in saved.pools}
        )

    def _decoded(self, data: bytes) -> _Saved:
        try:
            if len(data) > MAX_LEARNED_BYTES:
                raise ValueError(f"{len(data)} bytes; at most {MAX_LEARNED_BYTES}")
            return _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"not eviction statistics: {error}") from error
