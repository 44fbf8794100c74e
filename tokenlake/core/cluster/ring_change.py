"""A change of the ring: members join, drain and leave while this node goes on serving.

::

    RingChanged(record), newer than the record of now
        the ring of now becomes the previous one, which counts for `previous_ring_s` from here on
        peers come and go; calls, leases and directory entries of members that left end
        owners        one walk: tell the new directory nodes what moved to them, then AdvertisingDone(ring)
        directory     UNKNOWN for keys that this node gained, until all peers have advertised or `sync_grace_s` is over
        this node drains (`drain`)
    `previous_ring_s` later
        entries of keys that moved away are forgotten

No bytes move: a segment stays at its owner, and only the directory nodes that name it change. Messages between nodes
carry the ring of their sender, as (epoch, digest). A node that hears of a newer epoch asks its driver to read the
membership (`ReadRing`). Nodes with different rings go on working together: a node without the newest ring asks previous
directory nodes, which go on answering.

If the ring changes again before all segments were told on it, the previous ring stays the one before both changes: it
is the last one on which each directory node was told everything. So a change that is taken back, or two changes at
once, lose nothing.
"""

from __future__ import annotations

import math

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.drain import Drain
from tokenlake.core.cluster.handover import Handover
from tokenlake.core.cluster.owner import Ownership
from tokenlake.core.cluster.peers import Peer, Peers
from tokenlake.core.cluster.serve import Serving
from tokenlake.core.context import Context, Part, ring_of
from tokenlake.core.instructions import Note, ReadRing
from tokenlake.directory.ring_record import RingRecord
from tokenlake.metrics import Metric
from tokenlake.timers import Timer
from tokenlake.wire.fields import NO_RING

CHANGES = Metric("tokenlake_ring_changes_total", "Changes of the ring that this node has followed")

READ_S = 1.0
"""Minimum seconds between two instructions to read the membership."""
TELLING_S = 1.0
"""Seconds by which the previous ring counts longer, while this node still tells which of its segments moved."""


class RingChange(Part):
    """Follows the ring record, and compares the rings that other nodes name with that of this node. Owner of the ring
    fields of `Context`."""

    def __init__(
        self,
        context: Context,
        peers: Peers,
        directory_node: DirectoryNode,
        ownership: Ownership,
        serving: Serving,
        handover: Handover,
        drain: Drain,
    ) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._ownership = ownership
        self._serving = serving
        self._handover = handover
        self._drain = drain
        self._previous_timer: Timer | None = None
        self._read_at = -math.inf
        """Time in seconds of the last `ReadRing`."""

    def start(self) -> None:
        """Called when the rules start. Other nodes may have changed the ring shortly before, and take this node for a
        previous directory node of keys: the entries that they tell it are forgotten when that time is over."""
        self._context.after(self._context.config.previous_ring_s, self._directory_node.forget_moved)

    def changed(self, record: RingRecord) -> None:
        """Follow a record that is newer than the one of now; another record changes nothing."""
        context = self._context
        if record.epoch <= context.record.epoch:
            if (record.epoch, record.digest()) != context.ring_version and record.epoch == context.record.epoch:
                context.emit(Note(f"a second ring record of epoch {record.epoch} is not used: its members differ"))
            return
        context.counters.add(CHANGES)
        self._directory_node.before_ring_change()
        if context.previous_ring is None or not self._directory_node.telling:
            context.previous_ring = context.ring
        context.record, context.ring_version = record, (record.epoch, record.digest())
        context.ring = ring_of(record, context.node)
        if self._previous_timer is not None:
            self._previous_timer.cancel()
        self._previous_timer = context.after(context.config.previous_ring_s, self._end_previous)
        left = self._peers.follow()
        self._directory_node.after_ring_change(left)
        for peer in left:
            self._peers.end(peer)
            self._serving.release_all(peer.node)
            self._ownership.owner_lost(peer)
        self._handover.ring_changed()
        self._drain.ring_changed()

    def _end_previous(self) -> None:
        if self._directory_node.telling:
            self._previous_timer = self._context.after(TELLING_S, self._end_previous)
            return
        self._previous_timer = None
        self._context.previous_ring = None
        self._directory_node.forget_moved()

    # -- rings of other nodes

    def differs(self, peer: Peer) -> None:
        """`peer` has named a ring that is not that of this node."""
        now, (epoch, _), (here, _) = self._context.now, peer.ring, self._context.ring_version
        if epoch > here and now >= self._read_at + READ_S:
            self._read_at = now
            self._context.emit(ReadRing())

    def states(self) -> dict[str, str]:
        """How the ring of each peer compares with that of this node: see `NodeCore.ring_states`."""
        here, own = self._context.ring_version
        return {peer.node: _state(peer.ring, here, own) for peer in self._peers}

    # -- checks

    def check_integrity(self) -> None:
        context = self._context
        assert (context.previous_ring is None) == (self._previous_timer is None)
        assert context.ring_version == (context.record.epoch, context.record.digest())
        assert context.ring.members == ring_of(context.record, context.node).members


def _state(ring: tuple[int, int], here: int, own: int) -> str:
    epoch, digest = ring
    if digest == NO_RING[1]:
        return "unknown"
    if epoch != here:
        return "newer" if epoch > here else "older"
    return "same" if digest == own else "differs"
