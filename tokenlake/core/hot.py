"""Hot segments at this node: reads counted and reported, everybody's sets, and which copy a match asks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from tokenlake.core.context import Context
from tokenlake.core.fetches import Fetches
from tokenlake.core.hot_copies import HotCopies
from tokenlake.core.hot_directory import CROWD_READS, HotDirectory
from tokenlake.core.peers import Peers
from tokenlake.core.turns import Turns
from tokenlake.hot import COUNTERS, HotItem, KnownSets, draws, less_loaded_of_two
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import Kind, Segment
from tokenlake.wire import peer as wire
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import join_keys

__all__ = ["MAX_COUNTED", "Hot"]

CHOSEN = Metric("tokenlake_hot_reads_total", "Segments asked of a copy because they are hot")
MISSED = Metric("tokenlake_hot_misses_total", "Segments that such a copy did not have, or did not say so in time")

MAX_COUNTED = 4096
"""Segments whose reads are counted between two reports, and of one hot set."""
KEPT_S = 60.0
"""A directory node that cannot be reached keeps its set for so long: its copies are read meanwhile."""


class Hot:
    """One of each node."""

    def __init__(self, context: Context, peers: Peers, fetches: Fetches) -> None:
        self._context = context
        self._peers = peers
        self._known = KnownSets()
        self.copies = HotCopies(context, peers, fetches, self._known)
        self.directory_node = HotDirectory(context, peers, self._known, self.copies)
        self.turns = Turns(context, peers)
        self._counted: dict[Segment, int] = {}
        """Reads since the last report."""
        self._silent: dict[NodeId, float] = {}
        """Homes that cannot be reached, and since when."""
        self._on = context.config.hot == "on"
        self._counts = context.config.hot != "off"
        seed = hashlib.blake2b(f"{context.node}#{context.incarnation}".encode(), digest_size=8).digest()
        self._draws = draws(int.from_bytes(seed, "big"))

    def start(self) -> None:
        """Begin to report and decide."""
        if self._counts and len(self._context.ring.members) > 1:
            self._context.after(self._context.config.gossip_s, self._turn)

    def _turn(self) -> None:
        self._report()
        self.directory_node.decide()
        self.copies.sweep()
        self.turns.sweep()
        self._forget_silent()
        self._context.after(self._context.config.gossip_s, self._turn)

    # -- reads

    def sent(self, segments: Sequence[Segment], node: NodeId) -> None:
        """An engine of `node` reads these here: they could have been read elsewhere."""
        if self._on:
            self.turns.begin(node, segments)
        self._count(segments)

    def _count(self, segments: Sequence[Segment]) -> None:
        counted, crowd = self._counted, False
        for segment in segments if self._counts else ():
            if segment in counted or len(counted) < MAX_COUNTED:
                times = counted[segment] = counted.get(segment, 0) + 1
                crowd = crowd or times >= CROWD_READS
        if crowd:
            self._report()

    def read(self, segments: Sequence[Segment | None]) -> None:
        """Engines of this node read these here: only what is a replica would else have been read elsewhere."""
        if len(self.copies):
            self._count([segment for segment in segments if segment is not None and segment.kind is Kind.REPLICA])

    def _report(self) -> None:
        """Tell the directory nodes what was read most."""
        counted, self._counted = self._counted, {}
        by_shape: dict[tuple[TenantId, int, int], list[Segment]] = {}
        for segment in counted:
            shards = len(segment.checksums) // CHECKSUM_BYTES
            by_shape.setdefault((segment.tenant, segment.slot_bytes, shards), []).append(segment)
        for (tenant, slot_bytes, shards), segments in by_shape.items():
            by_key = {segment.key: segment for segment in segments}
            for directory_node, keys in self._context.by_directory_node(by_key).items():
                # More than a directory node counts need not be told.
                most = sorted(keys, key=lambda key: -counted[by_key[key]])[:COUNTERS]
                depths = tuple(by_key[key].depth for key in most)
                times = tuple(counted[by_key[key]] for key in most)
                message = wire.Reads(tenant, join_keys(most), depths, times, slot_bytes, shards)
                if directory_node == self._context.node:
                    self.directory_node.reads(message)
                else:
                    self._peers.tell(directory_node, message)

    # -- sets

    def told(self, directory_node: NodeId, message: wire.HotSet) -> None:
        """The set of `directory node`."""
        members = self._context.ring.members
        peer = self._peers.get(directory_node)
        if peer is None or not self._on:
            return
        mine = dict.fromkeys(
            self._context.by_directory_node(SegmentKey(e.key) for e in message.entries).get(directory_node, ())
        )
        nodes: dict[HotItem, tuple[NodeId, ...]] = {
            (TenantId(entry.tenant), SegmentKey(entry.key)): tuple(members[index] for index in entry.nodes)
            for entry in message.entries
            if entry.key in mine and entry.nodes
        }
        if self._known.learn(directory_node, peer.incarnation, message.version, nodes):
            self.copies.learned(directory_node)

    def heard_version(self, directory_node: NodeId, version: int) -> None:
        """`directory node` says which set it has: ask for one that was missed, forget one of an earlier life."""
        peer = self._peers.get(directory_node)
        if peer is None or not self._on:
            return
        known = self._known.version(directory_node, peer.incarnation)
        if version > known:
            self._peers.tell(directory_node, wire.HotWanted())
        elif not version and not known:
            self._known.drop(directory_node)

    def _forget_silent(self) -> None:
        now, here = self._context.now, self._context.node
        silent = [
            directory_node
            for directory_node in self._known.directory_nodes()
            if directory_node != here and not self._peers.reachable(directory_node)
        ]
        self._silent = {directory_node: self._silent.get(directory_node, now) for directory_node in silent}
        for directory_node, since in self._silent.items():
            if now >= since + KEPT_S:
                self._known.drop(directory_node)

    def gone(self, tenant: TenantId, keys: Sequence[SegmentKey], node: NodeId) -> None:
        """`node` does not have these, whose directory node this node may be."""
        for key in keys:
            self.directory_node.gone(tenant, key, node)

    def copies_of(self, tenant: TenantId, key: SegmentKey) -> Sequence[NodeId]:
        """Nodes that have a copy as some directory node's hot set says, the owner first; none where it is not hot."""
        return self._known.nodes((tenant, key))

    # -- choosing

    def choose(
        self, tenant: TenantId, keys: Sequence[SegmentKey], indices: Sequence[int], slot_bytes: int, *, planned: bool
    ) -> dict[int, NodeId]:
        """Which copy to ask, by index of the hot ones among `keys` at `indices`, ascending. Consecutive ones that a run
        would keep together are asked of one node, as long as it has them.

        The less loaded of two: of all, the one that is least loaded as far as is known would be everybody's choice at
        once. Not for a batch that is `planned`: whoever plans it decides alone, and each choice counts for the next.
        """
        chosen: dict[int, NodeId] = {}
        if not len(self._known):
            return chosen
        length, run = 0, self._context.ring.run_length
        node: NodeId | None = None
        for index in indices:
            nodes = self._known.nodes((tenant, keys[index]))
            if not nodes:
                continue
            length += 1
            if node is None or length >= run or node not in nodes or chosen.get(index - 1) != node:
                node, length = self._draw(nodes, planned=planned), 0
            if node is not None:
                chosen[index] = node
                self._peers.will_read(node, slot_bytes)
        self._context.counters.add(CHOSEN, len(chosen))
        return chosen

    def _draw(self, nodes: Sequence[NodeId], *, planned: bool) -> NodeId | None:
        """One of `nodes` that is worth asking now, if there is any."""
        usable, load = self._peers.usable, self._peers.load
        draw = next(self._draws)
        if planned:
            return min(filter(usable, nodes), key=load, default=None)
        node = less_loaded_of_two(nodes, draw, lambda node: load(node) if usable(node) else math.inf)
        if usable(node):
            return node
        # Rare: there may be as many copies as nodes, and they are not looked at one by one for each segment.
        others = list(filter(usable, nodes))
        return less_loaded_of_two(others, draw, load) if others else None

    def missed(self, tenant: TenantId, missed: int, denied: Sequence[SegmentKey], node: NodeId) -> None:
        """So many that `node` was asked for are asked elsewhere. `denied`: it said that it does not have these; their
        directory nodes are told."""
        self._context.counters.add(MISSED, missed)
        for directory_node, its_keys in self._context.by_directory_node(denied).items():
            if directory_node == self._context.node:
                self.gone(tenant, its_keys, node)
            else:
                self._peers.tell(directory_node, wire.Evicted(tenant, join_keys(its_keys), node))

    # -- checks

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {
            "reads to count": len(self._counted),
            "segments with readers": len(self.turns),
            "hot directory nodes silent": len(self._silent),
        }

    def gauges(self) -> dict[str, int]:
        """Hot segments: known of all directory nodes, of this directory node, and copies of them here."""
        return {
            "known": len(self._known),
            "of this directory node": len(self.directory_node),
            "copies": len(self.copies),
        }

    def check_integrity(self) -> None:
        """AssertionError when sets, copies and what is looked after do not add up."""
        self._known.check_integrity()
        self.copies.check_integrity()
        self.directory_node.check_integrity()
        self.turns.check_integrity()
