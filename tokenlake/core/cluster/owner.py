"""The owner of a segment: the node that computed it, or that took it over from another node.

::

    commit --> the policy admits it?  yes: PRIMARY here   no: CACHED here
           --> Owned to the directory node
                   |  another node owns it already
                   v
               Redundant: CACHED here, of less value

The bytes stay where they were computed. A read at another node fetches a cached copy. Where memory is full and the
segments that would be evicted have a higher retention value, a new segment becomes a cached copy without another owner:
its directory node names this node until it is evicted. A read raises its retention value, and the policy is asked
again.

A node whose cached copy outlives the owner of the segment, or the owner's copy, owns the segment from then on. It
learns of an eviction by the answer to its report of a read (`access`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.peers import Peer, Peers
from tokenlake.core.context import Context
from tokenlake.core.disk import Disk
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.memory import Cursor, Kind, Segment, State
from tokenlake.memory.removals import REDUNDANT_RULE
from tokenlake.metrics import Metric
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import split_keys

DUPLICATES = Metric("tokenlake_duplicate_commits_total", "Segments of this node that another node owned before")

ADOPT_SLOTS = 160
"""Slots that are examined at once, before other events are handled, when this node looks for segments of a lost
owner."""
_CACHED, _PRIMARY = Kind.CACHED, Kind.PRIMARY


class Ownership:
    """Decides which READY segments this node owns, and whether their copies are primary or cached."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode, disk: Disk) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._disk = disk
        self.given: Counter[tuple[NodeId, int]] = Counter()
        """Primary copies that other nodes took over while this one drains, by node and slot size; `Drain` empties
        it."""

    def committed(self, tenant: TenantId, segments: list[Segment]) -> None:
        """Make this node the owner of READY segments, which are given in the order of their depth: those of one write,
        or cached copies whose owner is lost. The policy decides for each whether the copy becomes a primary copy."""
        if not segments:
            return
        store, now = self._context.store, self._context.now
        # The policy is asked from the beginning of the prompt on, so that the first segments are admitted if not all
        # are, and none behind one that is not.
        kinds: list[Kind] = []
        refused: set[SegmentKey] = set()
        for segment in segments:
            admitted = segment.parent not in refused and store.admits_primary(segment, now)
            kinds.append(_PRIMARY if admitted else _CACHED)
            if not admitted:
                refused.add(segment.key)
        # The deepest segment changes its kind first, so that the beginning of the prompt is evicted last.
        for segment, kind in reversed(list(zip(segments, kinds, strict=True))):
            store.become(segment, kind, now)
        self._directory_node.tell_owned(tenant, [segment.key for segment in segments])

    def redundant(self, message: wire.Redundant, metric: Metric = DUPLICATES) -> None:
        """Handle the answer of a directory node that other nodes own these segments: the copies of this node become
        cached copies, counted in `metric`, and those on disk are dropped."""
        tenant = TenantId(message.tenant)
        self._disk.forget(tenant, split_keys(message.keys), REDUNDANT_RULE)
        for key, owner in zip(split_keys(message.keys), message.nodes, strict=False):
            segment = self._context.store.get(tenant, key)
            if segment is not None and (segment.owned or (segment.kind is _CACHED and segment.source is None)):
                # A cached copy without a source that is not READY is being read from disk: this node would own it from
                # the end of the read on.
                self.give_up(segment, NodeId(owner))
                self._context.counters.add(metric)

    def give_up(self, segment: Segment, owner: NodeId) -> None:
        """`owner` owns a segment of this node from now on: the copy here is a cached one."""
        if segment.kind is _PRIMARY and self._context.draining:
            self.given[owner, segment.slot_bytes] += 1
        self._context.store.disown(segment, owner, self._context.now)

    def owner_lost(self, peer: Peer) -> None:
        """`peer` is down or SUSPECT, or left the cluster. Unless it comes back with its incarnation, this node owns the
        segments that `peer` owned and of which it has cached copies. That waits until the directory nodes have noticed
        the loss: before, they would answer that `peer` owns the segments."""
        incarnation = peer.incarnation
        cursor: Cursor | None = Cursor()

        def work() -> bool:
            nonlocal cursor
            back = self._peers.get(peer.node)
            if cursor is None or (back is not None and back.reachable and back.incarnation == incarnation):
                return False
            segments, cursor = self._context.store.walk(cursor, ADOPT_SLOTS)
            self._adopt([segment for segment in segments if segment.source == peer.node])
            return cursor is not None

        self._context.after(self._peers.notices_s, lambda: self._context.in_slices(work))

    def owner_evicted(self, owner: NodeId, tenant: TenantId, keys: Iterable[SegmentKey]) -> None:
        """`owner` does not have these segments any more: this node becomes the owner of those that it has as cached
        copies of that owner."""
        found = (segment for segment in self._context.ready(tenant, keys) if segment is not None)
        self._adopt(segment for segment in found if segment.source == owner)

    def _adopt(self, segments: Iterable[Segment]) -> None:
        by_tenant: dict[TenantId, list[Segment]] = {}
        for segment in segments:
            if segment.kind is _CACHED and segment.state is State.READY:
                self._context.store.own(segment)
                by_tenant.setdefault(segment.tenant, []).append(segment)
        for tenant, its_segments in by_tenant.items():
            self.committed(tenant, sorted(its_segments, key=lambda segment: segment.depth))

    def read(self, segments: Iterable[Segment]) -> None:
        """Handle a read of READY segments of this node, in prompt order: the policy is asked again about those that it
        did not admit before, up to the first that it refuses again. Those that it admits become primary copies."""
        store, now = self._context.store, self._context.now
        for segment in segments:
            if segment.kind is _CACHED and segment.source is None and segment.state is State.READY:
                if not store.admits_primary(segment, now, again=True):
                    return
                store.become(segment, _PRIMARY, now)
