"""Which segments are hot, and which nodes replicate them: decided by the directory node from reported reads.

::

    reads, reported by the nodes that served them
      -> counted by the directory node -> decide (every gossip interval) -> Replicate to nodes in rendezvous order
                                                                                | Replicated
                                                                                v
                                                                HotSet, a new version, to every node

Replicas are fetched from the owner and from nodes that have one already, so that many are made quickly and no node
sends them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.fetch import deadline_s
from tokenlake.core.instructions import Note
from tokenlake.core.ownership import Ownership
from tokenlake.core.peers import Peers, Reply
from tokenlake.core.replicas import GRACE_S, Replicas
from tokenlake.hot import COUNTERS, Change, HotItem, HotRule, Shape, rendezvous_order
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import Kind, Segment
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["MAX_COUNTED", "Replication"]

PROMOTED = Metric("tokenlake_hot_promotions_total", "Segments that became hot, counted by their directory node")
DEMOTED = Metric("tokenlake_hot_demotions_total", "Segments that are no longer hot, counted by their directory node")
MISSED = Metric("tokenlake_hot_misses_total", "Hot segments that the chosen node did not have, or did not name in time")

MAX_COUNTED = 4096
"""Segments whose reads are counted between two reports, and entries of one hot set."""
CROWD_READS = 8
"""Reads of one segment since the last report: it is reported at once, and its directory node decides at once."""
PUBLISH_S = 0.05
"""Replicas made within this time are published together."""
TRANSFERS_PER_COPY = 4
"""Replicas of a segment requested at a time, per copy that they can be fetched from."""
REFUSED_S = 10.0
"""Seconds for which a node that has no replica, though it was asked to keep one, is not asked again."""


class _Copies:
    """The copies of one hot segment."""

    def __init__(self, order: list[NodeId], target: int) -> None:
        self.order = order
        """Nodes in the order in which they get replicas."""
        self.target = target
        """Number of nodes that should have a copy, the owner included."""
        self.nodes: dict[NodeId, None] = {}
        """Nodes that have a replica."""
        self.requested: dict[NodeId, None] = {}
        """Nodes asked to keep a replica that have not answered."""
        self.refused: dict[NodeId, float] = {}
        """Per node, the time until which it is not asked again."""
        self.successor: NodeId | None = None
        """The node asked to become the owner, until it has answered."""


class Replication:
    """Counts and reports the reads of this node, and decides about the segments that hash to it."""

    def __init__(
        self,
        context: Context,
        peers: Peers,
        directory_node: DirectoryNode,
        ownership: Ownership,
        replicas: Replicas,
    ) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._ownership = ownership
        self._replicas = replicas
        self._reads: dict[Segment, int] = {}
        """Reads of this node since the last report."""
        self._rule = HotRule()
        self._copies: dict[HotItem, _Copies] = {}
        self._version = 0
        self._published: dict[HotItem, tuple[NodeId, ...]] = {}
        """This node's hot set in that version."""
        self._publishing = False
        self._counting = context.config.hot != "off"
        self.on = context.config.hot == "on"
        """False: reads are counted at most, and nothing is replicated."""

    def start(self) -> None:
        """Begin to report and decide once per gossip interval."""
        if self._counting and len(self._context.ring.members) > 1:
            self._context.after(self._context.config.gossip_s, self._work)

    def _work(self) -> None:
        self._report()
        self._decide()
        self._replicas.sweep()
        self._context.after(self._context.config.gossip_s, self._work)

    # -- reads of this node

    def count(self, segments: Sequence[Segment]) -> None:
        """Count reads here that a replica on another node could have served."""
        counted, crowd = self._reads, False
        for segment in segments if self._counting else ():
            if segment in counted or len(counted) < MAX_COUNTED:
                times = counted[segment] = counted.get(segment, 0) + 1
                crowd = crowd or times >= CROWD_READS
        if crowd:
            self._report()

    def read_here(self, segments: Sequence[Segment | None]) -> None:
        """Engines of this node read these here. Replicas count: another node would have served those reads."""
        if len(self._replicas):
            self.count([segment for segment in segments if segment is not None and segment.kind is Kind.REPLICA])

    def _report(self) -> None:
        """Report the most frequent reads to the directory nodes: no more than a directory node counts."""
        counted, self._reads = self._reads, {}
        by_shape: dict[tuple[TenantId, int, int], list[Segment]] = {}
        for segment in counted:
            shards = len(segment.checksums) // CHECKSUM_BYTES
            by_shape.setdefault((segment.tenant, segment.slot_bytes, shards), []).append(segment)
        for (tenant, slot_bytes, shards), segments in by_shape.items():
            by_key = {segment.key: segment for segment in segments}
            for directory_node, keys in self._context.by_directory_node(by_key).items():
                most = sorted(keys, key=lambda key: -counted[by_key[key]])[:COUNTERS]
                depths = tuple(by_key[key].depth for key in most)
                times = tuple(counted[by_key[key]] for key in most)
                message = wire.ReadCounts(tenant, join_keys(most), depths, times, slot_bytes, shards)
                if directory_node == self._context.node:
                    self.reported(message)
                else:
                    self._peers.tell(directory_node, message)

    # -- reports to this directory node

    def reported(self, message: wire.ReadCounts) -> None:
        """A node served these reads. Keys that hash to another directory node are ignored."""
        if not self._counting:
            return
        tenant, here = TenantId(message.tenant), self._context.node
        keys = split_keys(message.keys)
        reads = {key: (depth, times) for key, depth, times in zip(keys, message.depths, message.counts, strict=True)}
        for key in self._context.by_directory_node(keys).get(here, []):
            depth, times = reads[key]
            if times:
                shape = Shape(depth, message.slot_bytes, message.shards)
                self._rule.read((tenant, key), shape, times, self._context.now)
        if any(times >= CROWD_READS for times in message.counts):
            self._decide()

    def gone(self, tenant: TenantId, keys: Sequence[SegmentKey], node: NodeId) -> None:
        """`node` has no copies of these. It is not asked for replicas again at once: it may have no room, or lie."""
        for key in keys:
            copies = self._copies.get((tenant, key))
            if copies is not None and node in copies.nodes:
                del copies.nodes[node]
                copies.refused[node] = self._context.now + REFUSED_S

    def missed(self, tenant: TenantId, count: int, denied: Sequence[SegmentKey], node: NodeId) -> None:
        """`node` was chosen for `count` hot segments that are now asked of other nodes. `denied`: the keys of which it
        answered that it has no copy; their directory nodes are told."""
        self._context.counters.add(MISSED, count)
        self.gone(tenant, self._directory_node.tell_evicted(tenant, denied, node), node)

    def set_wanted(self, node: NodeId) -> None:
        """`node` missed a version of the hot set: send the newest."""
        if self._version:
            self._peers.tell(node, self._message())

    # -- decisions

    def _decide(self) -> None:
        now = self._context.now
        if self._rule.busy(now):
            for change in self._rule.decide(now, self._peers.loads(), self._nodes):
                self._change(change)
        if not self.on:
            return
        for item, copies in list(self._copies.items()):
            self._maintain(item, copies)
        self._publish()

    def _change(self, change: Change) -> None:
        item = change.item
        copies = self._copies.get(item)
        if change.copies == 1:
            del self._copies[item]
            self._context.counters.add(DEMOTED)
            self._note(item, "is no longer hot")
        elif copies is None:
            owner = self._directory_node.recorded_node(*item)
            others = [node for node in self._context.ring.members if node != owner]
            self._copies[item] = _Copies(rendezvous_order(item[1], others), change.copies)
            self._context.counters.add(PROMOTED)
            self._note(item, f"is hot: {change.copies} copies")
        else:
            copies.target = change.copies
            self._note(item, f"is hot: now {change.copies} copies")

    def _note(self, item: HotItem, text: str) -> None:
        observed = "" if self.on else " (observed only)"
        depth = self._rule.shape(item).depth
        self._context.emit(Note(f"segment {depth} of a prompt of tenant {item[0]!r} {text}{observed}"))

    def _nodes(self, item: HotItem) -> list[NodeId]:
        """The nodes with a copy, owner first; empty where the directory names no owner."""
        owner = self._directory_node.recorded_node(*item)
        if owner is None:
            return []
        copies = self._copies.get(item)
        return [owner, *(node for node in copies.nodes if node != owner)] if copies is not None else [owner]

    def _maintain(self, item: HotItem, copies: _Copies) -> None:
        """Request missing replicas, and drop those of nodes that are down and those beyond the target."""
        owner = self._directory_node.recorded_node(*item)
        if owner is None:
            self._replace_owner(item, copies)
            return
        # A node that comes back with its incarnation lists its replica again by a report or a new request.
        for node in [node for node in copies.nodes if node == owner or not self._here_or(self._peers.reachable, node)]:
            del copies.nodes[node]
        while len(copies.nodes) > copies.target - 1:
            copies.nodes.popitem()
        sources = [node for node in (owner, *copies.nodes) if self._here_or(self._peers.usable, node)]
        room = min(copies.target - 1 - len(copies.nodes), TRANSFERS_PER_COPY * len(sources)) - len(copies.requested)
        now = self._context.now
        able = (node for node in copies.order if node != owner and self._able(node, copies, now))
        for count, (node, _) in enumerate(zip(able, range(room), strict=False)):
            self._request(item, copies, node, sources[count % len(sources)], owner)

    def _replace_owner(self, item: HotItem, copies: _Copies) -> None:
        """The primary copy was evicted: a node with a replica becomes the owner. Without one the segment is gone."""
        if copies.successor is not None:
            return
        successor = next((node for node in copies.nodes if self._here_or(self._peers.usable, node)), None)
        if successor is None:
            del self._copies[item]
            self._rule.forget(item)
            return
        del copies.nodes[successor]
        (tenant, key), shape = item, self._rule.shape(item)
        if successor == self._context.node:
            self._ownership.adopt(self._context.ready(tenant, [key]))
            return

        def answered(reply: Reply | None) -> None:
            copies.successor = None

        copies.successor = successor
        self._peers.call(
            successor,
            lambda call: wire.Offer(call, tenant, key, (shape.depth,), shape.slot_bytes, shape.shards),
            GRACE_S,
            answered,
            proves_life=False,
        )

    def _here_or(self, test: Callable[[NodeId], bool], node: NodeId) -> bool:
        """Is `node` this node, or a peer that passes the test?"""
        return node == self._context.node or test(node)

    def _able(self, node: NodeId, copies: _Copies, now: float) -> bool:
        """Can `node` be asked to keep a replica? A node that joined recently cannot: others advertise to it."""
        if node in copies.nodes or node in copies.requested or copies.refused.get(node, 0.0) > now:
            return False
        return self._here_or(self._peers.settled, node)

    def _request(self, item: HotItem, copies: _Copies, node: NodeId, source: NodeId, owner: NodeId) -> None:
        (tenant, key), shape = item, self._rule.shape(item)
        copies.requested[node] = None
        make = partial(
            wire.Replicate,
            tenant=tenant,
            keys=key,
            depths=(shape.depth,),
            slot_bytes=shape.slot_bytes,
            shards=shape.shards,
            source=source,
            owner=owner,
        )

        def done(codes: bytes) -> None:
            copies.requested.pop(node, None)
            if codes == bytes([Code.COMMITTED]):
                copies.nodes[node] = None
            else:
                copies.refused[node] = self._context.now + REFUSED_S
            if self._copies.get(item) is copies:
                # The node is a source for further replicas.
                self._context.after(0.0, lambda: self._continue(item, copies))

        if node == self._context.node:
            self._replicas.replicate(make(0), done)
            return

        def answered(reply: Reply | None) -> None:
            done(reply.codes if isinstance(reply, wire.ReplicateReply) else b"")

        wait_s = deadline_s(self._peers.predict_s(node, shape.slot_bytes)) + GRACE_S
        self._peers.call(node, make, wait_s, answered, proves_life=False)

    def _continue(self, item: HotItem, copies: _Copies) -> None:
        if self._copies.get(item) is copies:
            self._maintain(item, copies)
            if not self._publishing:
                self._publishing = True
                self._context.after(min(PUBLISH_S, self._context.config.gossip_s), self._publish)

    # -- the hot set

    def _publish(self) -> None:
        """Send the hot set to every node if it changed."""
        self._publishing = False
        nodes = {item: tuple(self._nodes(item)) for item, copies in self._copies.items() if copies.nodes}
        hot_set = {item: nodes for item, nodes in nodes.items() if len(nodes) > 1}
        if hot_set == self._published:
            return
        self._published = hot_set
        self._version += 1
        self._peers.tell_hot_version(self._version)
        self._replicas.published(self._version, hot_set)
        message = self._message()
        for peer in self._peers:
            self._peers.tell(peer.node, message)

    def _message(self) -> wire.HotSet:
        position = {node: index for index, node in enumerate(self._context.ring.members)}
        entries = [
            wire.HotEntry(tenant, key, tuple(position[node] for node in nodes))
            for (tenant, key), nodes in self._published.items()
        ]
        return wire.HotSet(self._version, tuple(entries))

    # -- checks

    def gauges(self) -> dict[str, int]:
        """Hot segments: of all known hot sets, of this directory node, and replicas here."""
        return {
            "known": self._replicas.hot_segments,
            "of this directory node": len(self._copies),
            "copies": len(self._replicas),
        }

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"reads to count": len(self._reads)}

    def check_integrity(self) -> None:
        """AssertionError when the rule and the copies do not add up."""
        self._rule.check_integrity()
        for item, copies in self._copies.items():
            assert item in self._rule
            assert not copies.nodes.keys() & copies.requested.keys()
