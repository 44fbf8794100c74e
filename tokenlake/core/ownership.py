"""The owner of a segment: the node that computed it.

::

    commit --> the policy admits it?  yes: PRIMARY here   no: CACHED here, evicted first
           --> Owned to the directory node
                   |  another node owns it already
                   v
               Redundant: CACHED here, evicted first

The bytes stay where they were computed. A read at another node fetches a cached copy. Where memory is full and the
segments that would be evicted have a higher retention value, a new segment becomes a cached copy without another
owner: its directory node names this node until it is evicted. A read raises its retention value, and the policy is
asked again.

A node whose cached copy outlives the owner of the segment, or the owner's copy, owns the segment from then on. It
learns of an eviction by the answer to its report of a read (`access`).
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.peers import Peer, Peers
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import Cursor, Kind, Segment, State
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import split_keys

__all__ = ["Ownership"]

DUPLICATES = Metric("tokenlake_duplicate_commits_total", "Segments of this node that another node owned before")

ADOPT_SLOTS = 512
"""Slots examined per slice of work after a peer is lost."""
_CACHED, _PRIMARY = Kind.CACHED, Kind.PRIMARY


class Ownership:
    """The kind of the READY segments of this node."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node

    def committed(self, tenant: TenantId, segments: list[Segment]) -> None:
        """This node owns these READY segments from now on, in the order of their depth: those of one write, in prompt
        order, or those of a lost owner."""
        if not segments:
            return
        store, now = self._context.store, self._context.now
        # From the beginning of the prompt: where not all are admitted, the first ones are.
        kinds = [_PRIMARY if store.admits_primary(segment, now) else _CACHED for segment in segments]
        # Deepest first, so that parents are evicted last.
        for segment, kind in reversed(list(zip(segments, kinds, strict=True))):
            store.become(segment, kind, now)
        self.redundant(self._directory_node.tell_owned(tenant, [segment.key for segment in segments]))

    def redundant(self, message: wire.Redundant) -> None:
        """Other nodes own these segments: the copies here become cached copies of theirs."""
        tenant = TenantId(message.tenant)
        for key, owner in zip(split_keys(message.keys), message.nodes, strict=False):
            segment = self._context.store.get(tenant, key)
            if segment is not None and segment.owned:
                segment.source = NodeId(owner)
                self._context.store.become(segment, _CACHED, self._context.now)
                self._context.counters.add(DUPLICATES)

    def owner_lost(self, peer: Peer) -> None:
        """`peer` is down or SUSPECT. Unless it comes back with its incarnation, this node owns the segments that `peer`
        owned and of which it has cached copies. That waits until the directory nodes have noticed the loss: before,
        they would answer that `peer` owns the segments."""
        incarnation = peer.incarnation
        cursor: Cursor | None = Cursor()

        def work() -> bool:
            nonlocal cursor
            if cursor is None or (peer.reachable and peer.incarnation == incarnation):
                return False
            segments, cursor = self._context.store.walk(cursor, ADOPT_SLOTS)
            self._adopt([segment for segment in segments if segment.source == peer.node])
            return cursor is not None

        self._context.after(self._peers.notices_s, lambda: self._context.in_slices(work))

    def owner_evicted(self, owner: NodeId, tenant: TenantId, keys: Iterable[SegmentKey]) -> None:
        """`owner` does not have these any more: this node owns those of which it has cached copies from there."""
        found = (segment for segment in self._context.ready(tenant, keys) if segment is not None)
        self._adopt(segment for segment in found if segment.source == owner)

    def _adopt(self, segments: Iterable[Segment]) -> None:
        by_tenant: dict[TenantId, list[Segment]] = {}
        for segment in segments:
            if segment.kind is _CACHED and segment.state is State.READY:
                segment.source = None
                by_tenant.setdefault(segment.tenant, []).append(segment)
        for tenant, its_segments in by_tenant.items():
            self.committed(tenant, sorted(its_segments, key=lambda segment: segment.depth))

    def read(self, segments: Iterable[Segment]) -> None:
        """READY segments were read: those that the policy did not admit before become primary copies if it does now."""
        store, now = self._context.store, self._context.now
        for segment in segments:
            if segment.kind is _CACHED and segment.source is None and segment.state is State.READY:
                if not store.admits_primary(segment, now):
                    return
                store.become(segment, _PRIMARY, now)
