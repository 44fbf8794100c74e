"""The hot sets that this node knows, the copy that a match reads, and the replicas that this node keeps.

::

    Replicate from a directory node -> here already?  yes: cached copy -> REPLICA;  no: one transfer -> REPLICA
                                                               | Replicated to the directory node
    each hot set received: a replica that it lists here stays; one that it lists and that is not here is reported
    no hot set lists the replica for UNLISTED_S, or the directory node lost its set: CACHED, evicted first
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

from tokenlake.core.context import Context
from tokenlake.core.fetch import Transfers, deadline_s
from tokenlake.core.peers import Peers
from tokenlake.hot import HotItem, KnownSets, less_loaded_of_two, splitmix64
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import Kind, Segment, State
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["GRACE_S", "Replicas"]

COPIED = Metric("tokenlake_hot_copied_segments_total", "Hot segments that this node received to keep a replica")
CHOSEN = Metric("tokenlake_hot_reads_total", "Hot segments asked of a node chosen from the hot set")

GRACE_S = 1.0
"""Added to the deadline of a replica's transfer: no engine waits for it."""
UNLISTED_S = 5.0
"""Seconds for which a replica stays that no hot set lists: its directory node lists it after it has the answer."""
SWEPT_REPLICAS = 512
"""Replicas examined per sweep."""
SILENT_S = 60.0
"""Seconds for which the hot set of a directory node that cannot be reached is kept: its replicas can be read."""


class Replicas:
    """This node's view of all hot sets, and its replicas."""

    def __init__(self, context: Context, peers: Peers, transfers: Transfers) -> None:
        self._context = context
        self._peers = peers
        self._transfers = transfers
        self._known = KnownSets()
        self._silent: dict[NodeId, float] = {}
        """Directory nodes with a known hot set that cannot be reached, and since when."""
        self._unlisted: dict[HotItem, float | None] = {}
        """Each replica here, and since when no hot set lists it; None: one does. Examined longest ago first."""
        self._on = context.config.hot == "on"
        seed = hashlib.blake2b(f"{context.node}#{context.incarnation}".encode(), digest_size=8).digest()
        self._draws = splitmix64(int.from_bytes(seed, "big"))

    def __len__(self) -> int:
        """Replicas here."""
        return len(self._unlisted)

    # -- hot sets

    def hot_set(self, directory_node: NodeId, message: wire.HotSet) -> None:
        """The whole hot set of `directory_node`. Entries that hash to other directory nodes are ignored."""
        members = self._context.ring.members
        peer = self._peers.get(directory_node)
        if peer is None or not self._on:
            return
        keys = (SegmentKey(entry.key) for entry in message.entries)
        its_keys = dict.fromkeys(self._context.by_directory_node(keys).get(directory_node, ()))
        nodes: dict[HotItem, tuple[NodeId, ...]] = {
            (TenantId(entry.tenant), SegmentKey(entry.key)): tuple(members[index] for index in entry.nodes)
            for entry in message.entries
            if entry.key in its_keys and entry.nodes
        }
        if self._known.learn(directory_node, peer.incarnation, message.version, nodes):
            self._compare(directory_node)

    def published(self, version: int, nodes: Mapping[HotItem, tuple[NodeId, ...]]) -> None:
        """This node, as a directory node, publishes a new version of its own hot set."""
        here = self._context.node
        self._known.learn(here, self._context.incarnation, version, nodes)
        self._compare(here)

    def heard_version(self, directory_node: NodeId, version: int) -> None:
        """`directory_node` has this version of its hot set: request it if it is newer than the known one, and drop the
        known one if it is from an earlier incarnation."""
        peer = self._peers.get(directory_node)
        if peer is None or not self._on:
            return
        known = self._known.version(directory_node, peer.incarnation)
        if version > known:
            self._peers.tell(directory_node, wire.RequestHotSet())
        elif not version and not known:
            self._known.drop(directory_node)

    def _compare(self, directory_node: NodeId) -> None:
        """Compare a new hot set with the copies here: mark listed copies as replicas, report listed ones that are
        absent."""
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

    # -- the copy to read

    def copies_of(self, tenant: TenantId, key: SegmentKey) -> Sequence[NodeId]:
        """The nodes with a copy of a hot segment, the owner first; empty where it is not hot."""
        return self._known.nodes((tenant, key))

    def choose(
        self, tenant: TenantId, keys: Sequence[SegmentKey], indices: Sequence[int], slot_bytes: int, *, planned: bool
    ) -> dict[int, NodeId]:
        """The node to ask for each hot segment among `keys` at the ascending `indices`. Consecutive segments are asked
        of one node that has them all, up to the ring's run length.

        The node is the less loaded of two random ones: if all readers chose the node with the least reported load, they
        would choose the same one. For a batch that is `planned` it is the least loaded: one planner chooses for all its
        requests, and each choice counts for the next.
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
        """One of `nodes` that is usable, None where none is."""
        usable, load = self._peers.usable, self._peers.load
        draw = next(self._draws)
        if planned:
            return min(filter(usable, nodes), key=load, default=None)
        node = less_loaded_of_two(nodes, draw, lambda node: load(node) if usable(node) else math.inf)
        if usable(node):
            return node
        # Rare. All nodes may have a copy, so they are not checked one by one for each segment.
        others = list(filter(usable, nodes))
        return less_loaded_of_two(others, draw, load) if others else None

    # -- replicas here

    def requested(self, node: NodeId, message: wire.Replicate) -> None:
        """The directory node `node` wants replicas here: fetch them, then answer."""

        def done(codes: bytes) -> None:
            self._peers.tell(node, wire.ReplicateReply(message.call, codes))

        self.replicate(message, done)

    def replicate(self, message: wire.Replicate, done: Callable[[bytes], None]) -> None:
        """Fetch and keep replicas. `done` gets one code per key: COMMITTED, or the reason why there is no copy here."""
        tenant, source, owner = TenantId(message.tenant), NodeId(message.source), NodeId(message.owner)
        keys = split_keys(message.keys)
        if not self._on or self._peers.get(source) is None:
            done(bytes([Code.REPLICA_BUDGET]) * len(keys))
            return
        here = self._context.store.index(tenant)
        codes = bytearray(len(keys))
        waiting = len(keys)

        def arrived(index: int, was_here: bool, segment: Segment | None, code: Code) -> None:
            nonlocal waiting
            waiting -= 1
            if segment is not None:
                self._context.store.unpin(segment)
                code = self._keep(segment, owner)
                self._context.counters.add(COPIED, code is Code.COMMITTED and not was_here)
            codes[index] = code
            if not waiting:
                done(bytes(codes))

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
        """A cached copy becomes a replica of the primary copy at `owner`; a dirty or primary copy stays as it is."""
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

    def sweep(self) -> None:
        """Turn replicas that no hot set lists any more into cached copies, and drop the hot sets of directory nodes
        that could not be reached for long. Called once per gossip interval."""
        now = self._context.now
        for item in list(islice(self._unlisted, SWEPT_REPLICAS)):
            since = self._unlisted.pop(item)
            segment = self._context.store.get(*item)
            if segment is None or segment.kind is not Kind.REPLICA or segment.state is not State.READY:
                continue
            if self._context.node in self._known.nodes(item):
                self._unlisted[item] = None
            elif since is None or now < since + UNLISTED_S:
                self._unlisted[item] = now if since is None else since
            else:
                self._context.store.become(segment, Kind.CACHED, now)
        known = (node for node in self._known.directory_nodes() if node != self._context.node)
        silent = [node for node in known if not self._peers.reachable(node)]
        self._silent = {node: self._silent.get(node, now) for node in silent}
        for node, since_s in self._silent.items():
            if now >= since_s + SILENT_S:
                self._known.drop(node)

    # -- checks

    @property
    def hot_segments(self) -> int:
        """Segments in all known hot sets."""
        return len(self._known)

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"hot directory nodes silent": len(self._silent)}

    def check_integrity(self) -> None:
        """AssertionError when the hot sets do not add up, or a replica here is swept by nothing."""
        self._known.check_integrity()
        for segment in self._context.store.segments():
            if segment.kind is Kind.REPLICA and segment.state is State.READY:
                assert (segment.tenant, segment.key) in self._unlisted, f"{segment} would stay forever"
                assert segment.source is not None
