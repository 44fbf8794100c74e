"""Copies of hot segments that this node keeps for others' sake.

::

    Replicate -> here? yes: cached -> REPLICA;  no: one transfer -> REPLICA -> Replicated
    listed by its directory node: stays.  Not listed for UNLISTED_S, or the directory node's set is gone: CACHED, first
    to be evicted
    listed and not here: the directory node is told
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from tokenlake.core.context import Context
from tokenlake.core.fetch import Transfers, deadline_s
from tokenlake.core.peers import Peers
from tokenlake.hot import HotItem, KnownSets
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import Kind, Segment, State
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["GRACE_S", "HotCopies"]

COPIED = Metric("tokenlake_hot_copied_segments_total", "Copies of hot segments that were brought here")

GRACE_S = 1.0
"""Added to the give-up time of a copy: nobody waits for it."""
UNLISTED_S = 5.0
"""Between a copy and the set that names it lie a reply and a push of the set."""
SWEPT = 512
"""Replicas looked at at a time."""


class HotCopies:
    """The replicas of this node."""

    def __init__(self, context: Context, peers: Peers, transfers: Transfers, known: KnownSets) -> None:
        self._context = context
        self._peers = peers
        self._transfers = transfers
        self._known = known
        self._unlisted: dict[HotItem, float | None] = {}
        """The replicas, and since when no set names them."""

    def __len__(self) -> int:
        return len(self._unlisted)

    def asked(self, node: NodeId, message: wire.Replicate) -> None:
        """A directory node wants copies here: bring them, answer."""

        def done(codes: bytes) -> None:
            self._peers.tell(node, wire.ReplicateReply(message.call, codes))

        self.bring(message, done)

    def bring(self, message: wire.Replicate, done: Callable[[bytes], None]) -> None:
        """As `Replicate` says; `done` gets one code per key."""
        tenant, source, owner = TenantId(message.tenant), NodeId(message.source), NodeId(message.owner)
        keys = split_keys(message.keys)
        if self._context.config.hot != "on" or self._peers.get(source) is None:
            done(bytes([Code.REPLICA_BUDGET]) * len(keys))
            return
        codes = bytearray(len(keys))
        waiting = len(keys)

        def settle(index: int, code: Code) -> None:
            nonlocal waiting
            codes[index] = code
            waiting -= 1
            if not waiting:
                done(bytes(codes))

        def arrived(index: int, was_here: bool, segment: Segment | None, code: Code) -> None:
            if segment is not None:
                self._context.store.unpin(segment)
                code = self._keep(segment, owner)
                self._context.counters.add(COPIED, code is Code.COMMITTED and not was_here)
            settle(index, code)

        here = self._context.store.index(tenant)
        wanted = [
            (key, depth, partial(arrived, index, key in here))
            for index, (key, depth) in enumerate(zip(keys, message.depths, strict=True))
        ]
        predicted = self._peers.predict_s(source, message.slot_bytes * len(keys))
        self._transfers.bring(
            source,
            tenant,
            wanted,
            kind=Kind.REPLICA,
            slot_bytes=message.slot_bytes,
            shards=message.shards,
            wait_s=deadline_s(predicted) + GRACE_S / 2,
        )

    def _keep(self, segment: Segment, owner: NodeId) -> Code:
        """A segment that is here becomes a replica, unless it is more than that already."""
        if segment.state is not State.READY:
            return Code.LOST
        if segment.kind is Kind.CACHED:
            if not self._context.store.replica_room(segment.pool):
                return Code.REPLICA_BUDGET
            self._context.store.become(segment, Kind.REPLICA, self._context.now)
        if segment.kind is Kind.REPLICA:
            segment.source = owner
            self._unlisted.setdefault((segment.tenant, segment.key), self._context.now)
        return Code.COMMITTED

    def inherit(self, tenant: TenantId, key: SegmentKey) -> None:
        """This node is the directory node: its copy, if it is there, is the primary copy from now on."""
        segment = self._context.store.get(tenant, key)
        if segment is not None and segment.state is State.READY and segment.kind in (Kind.CACHED, Kind.REPLICA):
            segment.source = None
            self._context.store.become(segment, Kind.PRIMARY, self._context.now)
            self._context.directory.held(tenant, key, self._context.node, self._context.incarnation)

    def learned(self, directory_node: NodeId) -> None:
        """The set of `directory node` changed: what it names here stays, or is missed."""
        absent: dict[TenantId, list[SegmentKey]] = {}
        here = self._context.node
        for (tenant, key), nodes in self._known.of(directory_node).items():
            if here not in nodes:
                continue
            segment = self._context.store.get(tenant, key)
            if segment is None:
                absent.setdefault(tenant, []).append(key)
            elif nodes[0] != here:
                self._keep(segment, nodes[0])
        for tenant, keys in absent.items():
            self._peers.tell(directory_node, wire.Evicted(tenant, join_keys(keys), here))

    def sweep(self) -> None:
        """Of those that were looked at longest ago: replicas that no set names any more become cached copies."""
        now = self._context.now
        for item in list(islice(self._unlisted, SWEPT)):
            since = self._unlisted.pop(item)
            segment = self._context.store.get(*item)
            if segment is None or segment.kind is not Kind.REPLICA or segment.state is not State.READY:
                continue
            if self._context.node in self._known.nodes(item):
                self._unlisted[item] = None
            elif since is None or now < since + UNLISTED_S:
                self._unlisted[item] = now if since is None else since
            else:
                self._context.store.become(segment, Kind.CACHED, self._context.now)

    def check_integrity(self) -> None:
        """AssertionError when a replica is in nobody's care."""
        for segment in self._context.store.segments():
            if segment.kind is Kind.REPLICA and segment.state is State.READY:
                assert (segment.tenant, segment.key) in self._unlisted, f"{segment} stays for ever"
                assert segment.source is not None
