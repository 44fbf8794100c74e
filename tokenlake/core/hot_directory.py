"""This node as a directory node of hot segments: who gets copies, and what everybody is told.

::

    Reads -> counts -> decide (every gossip interval) -> Replicate to nodes that a further hash names
                                                              | Replicated
                                                              v
                                              HotSet, a new version, to every node

Copies are taken from the owner and from those that have one already, so that many come quickly and no node sends all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tokenlake.core.context import Context
from tokenlake.core.fetch import deadline_s
from tokenlake.core.hot_copies import GRACE_S, HotCopies
from tokenlake.core.instructions import Note
from tokenlake.core.peers import Peers, Reply
from tokenlake.directory import Standing
from tokenlake.hot import Change, HotItem, HotRule, KnownSets, Shape, by_a_further_hash
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import split_keys

__all__ = ["HotDirectory"]

PROMOTED = Metric("tokenlake_hot_promotions_total", "Segments of this directory node that became hot")
DEMOTED = Metric("tokenlake_hot_demotions_total", "Segments of this directory node that are not hot any more")

CROWD_READS = 8
"""Of one segment since the last report: reported at once, and decided about at once."""
PUBLISH_S = 0.05
"""Copies that come within this time are told of together."""
FAN_OUT = 4
"""Copies under way per node that has the segment."""
REFUSED_S = 10.0
"""A node that took no copy is not asked again for so long."""


class _Copies:
    """Of one hot segment."""

    def __init__(self, order: list[NodeId], target: int) -> None:
        self.order = order
        """In which the nodes get copies."""
        self.target = target
        """Nodes in all, the owner included."""
        self.nodes: dict[NodeId, None] = {}
        """That have one, beside the owner."""
        self.asked: dict[NodeId, None] = {}
        self.refused: dict[NodeId, float] = {}
        """Until when they are not asked again."""
        self.heir: NodeId | None = None
        """Asked to keep the primary copy from now on, and has not answered."""


class HotDirectory:
    """Decides for the segments whose directory node this node is."""

    def __init__(self, context: Context, peers: Peers, known: KnownSets, copies: HotCopies) -> None:
        self._context = context
        self._peers = peers
        self._known = known
        self._copies = copies
        self._rule = HotRule()
        self._hot: dict[HotItem, _Copies] = {}
        self._told: dict[HotItem, tuple[NodeId, ...]] = {}
        """The set as everybody was told it last."""
        self._publishing = False

    def __len__(self) -> int:
        return len(self._hot)

    # -- what is heard

    def reads(self, message: wire.ReadCounts) -> None:
        """Somebody read these, here or elsewhere."""
        keys = split_keys(message.keys)
        if self._context.config.hot == "off":
            return
        tenant, here = TenantId(message.tenant), self._context.node
        mine = self._context.by_directory_node(keys).get(here, [])
        told = {key: (depth, times) for key, depth, times in zip(keys, message.depths, message.counts, strict=True)}
        for key in mine:
            depth, times = told[key]
            if times:
                shape = Shape(depth, message.slot_bytes, message.shards)
                self._rule.read((tenant, key), shape, times, self._context.now)
        if any(times >= CROWD_READS for times in message.counts):
            self.decide()

    def gone(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` has no copy. It is not asked for one again at once: it may have no room, or lie."""
        hot = self._hot.get((tenant, key))
        if hot is not None and node in hot.nodes:
            del hot.nodes[node]
            hot.refused[node] = self._context.now + REFUSED_S

    def wanted(self, node: NodeId) -> None:
        """`node` missed the set."""
        if self._context.hot_version:
            self._peers.tell(node, self._message())

    # -- what is decided

    def decide(self) -> None:
        """Once per gossip interval, and when a crowd comes."""
        now = self._context.now
        if self._rule.busy(now):
            for change in self._rule.decide(now, self._peers.loads(), self._nodes):
                self._change(change)
        if self._context.config.hot != "on":
            return
        for item, hot in list(self._hot.items()):
            self._look_after(item, hot)
        self._publish()

    def _change(self, change: Change) -> None:
        item = change.item
        hot = self._hot.get(item)
        if change.copies == 1:
            del self._hot[item]
            self._context.counters.add(DEMOTED)
            self._say(item, "is not hot any more")
        elif hot is None:
            others = [node for node in self._context.ring.members if node != self._owner(item)]
            self._hot[item] = _Copies(by_a_further_hash(item[1], others), change.copies)
            self._context.counters.add(PROMOTED)
            self._say(item, f"is hot: {change.copies} copies")
        else:
            hot.target = change.copies
            self._say(item, f"is to have {change.copies} copies")

    def _say(self, item: HotItem, what: str) -> None:
        observed = "" if self._context.config.hot == "on" else ", if this were not only observed"
        depth = self._rule.shape(item).depth
        self._context.emit(Note(f"segment {depth} of a prompt of tenant {item[0]!r} {what}{observed}"))

    def _owner(self, item: HotItem) -> NodeId | None:
        entry = self._context.directory.get(*item, self._context.now)
        return entry.node if entry is not None and entry.standing is not Standing.PENDING else None

    def _nodes(self, item: HotItem) -> list[NodeId]:
        """Owner first; empty when nobody is known to have it."""
        owner = self._owner(item)
        if owner is None:
            return []
        hot = self._hot.get(item)
        return [owner, *(node for node in hot.nodes if node != owner)] if hot is not None else [owner]

    def _look_after(self, item: HotItem, hot: _Copies) -> None:
        """One that has copies: are they there, and are they enough?"""
        owner = self._owner(item)
        if owner is None:
            self._without_owner(item, hot)
            return
        # A node that is gone reads nothing for anybody; should it come back as it was, its copy is only named again.
        for node in [node for node in hot.nodes if node == owner or not self._reachable(node)]:
            del hot.nodes[node]
        while len(hot.nodes) > hot.target - 1:
            hot.nodes.popitem()
        sources = [node for node in (owner, *hot.nodes) if self._present(node)]
        room = min(hot.target - 1 - len(hot.nodes), FAN_OUT * len(sources)) - len(hot.asked)
        now = self._context.now
        able = (node for node in hot.order if node != owner and self._able(node, hot, now))
        for count, (node, _) in enumerate(zip(able, range(room), strict=False)):
            self._ask(item, hot, node, sources[count % len(sources)], owner)

    def _without_owner(self, item: HotItem, hot: _Copies) -> None:
        """The primary copy was evicted: a copy takes its place, or there is nothing left to copy."""
        if hot.heir is not None:
            return
        heir = next((node for node in hot.nodes if self._present(node)), None)
        if heir is None:
            del self._hot[item]
            self._rule.forget(item)
            return
        del hot.nodes[heir]
        (tenant, key), shape = item, self._rule.shape(item)
        if heir == self._context.node:
            self._copies.inherit(tenant, key)
            return

        def answered(reply: Reply | None) -> None:
            hot.heir = None

        hot.heir = heir
        self._peers.call(
            heir,
            lambda call: wire.Offer(call, tenant, key, (shape.depth,), shape.slot_bytes, shape.shards),
            GRACE_S,
            answered,
            proves_life=False,
        )

    def _reachable(self, node: NodeId) -> bool:
        return node == self._context.node or self._peers.reachable(node)

    def _present(self, node: NodeId) -> bool:
        return node == self._context.node or self._peers.usable(node)

    def _able(self, node: NodeId, hot: _Copies, now: float) -> bool:
        """May `node` be asked to take a copy? Not one that joined a moment ago: it has enough to do."""
        if node in hot.nodes or node in hot.asked or hot.refused.get(node, 0.0) > now:
            return False
        return node == self._context.node or self._peers.settled(node)

    def _ask(self, item: HotItem, hot: _Copies, node: NodeId, source: NodeId, owner: NodeId) -> None:
        (tenant, key), shape = item, self._rule.shape(item)
        hot.asked[node] = None
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
            hot.asked.pop(node, None)
            if codes == bytes([Code.COMMITTED]):
                hot.nodes[node] = None
            else:
                hot.refused[node] = self._context.now + REFUSED_S
            if self._hot.get(item) is hot:
                # Whoever has it now is a source for more.
                self._context.after(0.0, lambda: self._go_on(item, hot))

        if node == self._context.node:
            self._copies.bring(make(0), done)
            return
        predicted = self._peers.predict_s(node, shape.slot_bytes)
        self._peers.call(node, make, deadline_s(predicted) + GRACE_S, partial(_codes, done), proves_life=False)

    def _go_on(self, item: HotItem, hot: _Copies) -> None:
        if self._hot.get(item) is hot:
            self._look_after(item, hot)
            if not self._publishing:
                self._publishing = True
                self._context.after(min(PUBLISH_S, self._context.config.gossip_s), self._publish)

    # -- what is told

    def _publish(self) -> None:
        """Tell everybody when the set is another than they were told."""
        self._publishing = False
        nodes = {item: tuple(self._nodes(item)) for item, hot in self._hot.items() if hot.nodes}
        now = {item: nodes for item, nodes in nodes.items() if len(nodes) > 1}
        if now == self._told:
            return
        self._told = now
        self._context.hot_version += 1
        self._known.learn(self._context.node, self._context.incarnation, self._context.hot_version, now)
        self._copies.learned(self._context.node)
        message = self._message()
        for peer in self._peers:
            self._peers.tell(peer.node, message)

    def _message(self) -> wire.HotSet:
        position = {node: index for index, node in enumerate(self._context.ring.members)}
        entries = [
            wire.HotEntry(tenant, key, tuple(position[node] for node in nodes))
            for (tenant, key), nodes in self._told.items()
        ]
        return wire.HotSet(self._context.hot_version, tuple(entries))

    def check_integrity(self) -> None:
        """AssertionError when the rule and what is looked after differ, or somebody is told of what is not there."""
        self._rule.check_integrity()
        for item, hot in self._hot.items():
            assert item in self._rule
            assert not hot.nodes.keys() & hot.asked.keys()
        assert self._told.keys() <= self._known.of(self._context.node).keys()


def _codes(done: Callable[[bytes], None], reply: Reply | None) -> None:
    done(reply.codes if isinstance(reply, wire.ReplicateReply) else b"")
