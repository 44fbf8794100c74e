"""Where segments are, for a scheduler: lookups at directory nodes, without a lease.

::

    LocateRequested -> copies of this node, and the owners of those that are cached copies
                       own directory
                       a lookup to each directory node of the other keys, in parallel
                           | all have answered, or the deadline has passed
                           v
                       if it asks for the time on disks: a lookup, in parallel, to each node that alone has some of the
                       segments, because directory nodes do not know which segments are on disk
                           | all have answered, or the deadline of both rounds has passed
                           v
                       Located: the nodes that have each segment, and the time on disks

A segment may have moved or been evicted when the answer arrives; one whose owner did not answer counts as in memory.
Requests of schedulers change no counter of reads and no order of eviction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cluster.transfers import Transfers
from tokenlake.core.context import Context, Part
from tokenlake.core.instructions import Located
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.match_deadline import match_deadline_s
from tokenlake.wire.slots import split_keys

MAX_LOCATED = 256
"""Limit of the segments in one `LocateRequested`: a quarter of a millisecond of the control loop."""


@dataclass(eq=False, slots=True)
class _Question:
    """One request that waits for other nodes."""

    tenant: TenantId
    keys: list[SegmentKey]
    disks: bool
    deadline: float
    then: Callable[[_Question], None]
    """Called with the question once the owners are known."""
    owners: dict[SegmentKey, tuple[NodeId, ...]] = field(default_factory=dict)
    """By key: the nodes that have the segment, in the order in which they became known."""
    disk_s: dict[SegmentKey, float] = field(default_factory=dict)
    """For each segment on disk, by key: the seconds until its owner has read all segments of the request that are on
    its disk, divided by their number."""
    awaited: int = 0

    def has(self, key: SegmentKey, node: NodeId) -> None:
        """Record that a node has the segment of a key."""
        known = self.owners.get(key, ())
        if node not in known:
            self.owners[key] = (*known, node)

    def reads(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        """Record that a node takes `seconds` to read the segments of these keys from its disk."""
        self.disk_s |= dict.fromkeys(keys, seconds / max(1, len(keys)))


class Survey(Part):
    """Finds the nodes that have segments, for `LocateRequested` and for prefetches."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode, transfers: Transfers) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._transfers = transfers
        self._waiting = 0

    def locate(self, request: int, tenant: TenantId, packed: bytes, deadline_s: float, disks: bool) -> None:
        """Find the nodes that have the segments of the keys `packed`, and answer with `Located`. `disks`: with the time
        that reads from disks take."""
        self._begin(tenant, split_keys(packed), deadline_s, disks, partial(self._answer, request))

    def find(
        self, tenant: TenantId, keys: list[SegmentKey], then: Callable[[dict[SegmentKey, tuple[NodeId, ...]]], None]
    ) -> None:
        """Find the nodes that have segments, and call `then` with those of each key that some node has."""
        self._begin(tenant, keys, 0.0, False, lambda question: then(question.owners))

    def _begin(
        self,
        tenant: TenantId,
        keys: list[SegmentKey],
        deadline_s: float,
        disks: bool,
        then: Callable[[_Question], None],
    ) -> None:
        here = self._context.node
        limit_s = match_deadline_s(self._context.config.match_deadline_s, len(keys))
        if 0 < deadline_s < limit_s:
            limit_s = deadline_s
        question = _Question(tenant, keys, disks, self._context.now + limit_s, then)
        found = self._context.ready(tenant, keys)
        on_disk = self._context.on_disk(tenant, keys, found)
        missing: list[SegmentKey] = []
        alone = (here,)
        for index, (key, segment) in enumerate(zip(keys, found, strict=True)):
            if segment is not None:
                question.owners[key] = alone if segment.source in (None, here) else (here, segment.source)
            elif index in on_disk:
                question.owners[key] = alone
            else:
                missing.append(key)
        if disks and on_disk:
            nbytes = sum(self._context.disk.slab(entry).slot_bytes for entry in on_disk.values())
            question.reads([keys[index] for index in on_disk], self._transfers.disk_s(nbytes))
        asked = dict(self._peers.by_directory_node(missing))
        own = asked.pop(here, [])
        for key, (_, owner) in zip(own, self._directory_node.answers(tenant, own), strict=True):
            if owner is not None:
                question.has(key, owner)
        self._waiting += 1
        self._ask(question, asked, self._heard_where, self._ask_owners)

    def _ask(
        self,
        question: _Question,
        asked: Mapping[NodeId, list[SegmentKey]],
        heard: Callable[[_Question, NodeId, list[SegmentKey], wire.LookupReply], None],
        then: Callable[[_Question], None],
    ) -> None:
        """Send lookups of the keys by node, call `heard` with each reply, and `then` after the last one."""
        question.awaited = len(asked)
        limit_s = question.deadline - self._context.now

        def took(node: NodeId, keys: list[SegmentKey], reply: wire.LookupReply | None) -> None:
            if reply is not None:
                heard(question, node, keys, reply)
            question.awaited -= 1
            if not question.awaited:
                then(question)

        for node, keys in asked.items():
            self._peers.look_up(node, question.tenant, keys, limit_s, partial(took, node, keys), lease=False)
        if not asked:
            then(question)

    def _heard_where(self, question: _Question, node: NodeId, keys: list[SegmentKey], reply: wire.LookupReply) -> None:
        owners = iter(reply.nodes)
        for key, code in zip(keys, reply.codes, strict=True):
            if code == Code.LOCAL:
                question.has(key, node)
            elif code == Code.ELSEWHERE and (owner := NodeId(next(owners))) != self._context.node:
                question.has(key, owner)

    def _ask_owners(self, question: _Question) -> None:
        """Ask other nodes which of the segments that they alone have are on their disks."""
        asked: dict[NodeId, list[SegmentKey]] = {}
        if question.disks and self._context.now < question.deadline:
            for key, owners in question.owners.items():
                if len(owners) == 1 and owners[0] != self._context.node:
                    asked.setdefault(owners[0], []).append(key)
        self._ask(question, asked, self._heard_disk, self._end)

    def _heard_disk(self, question: _Question, node: NodeId, keys: list[SegmentKey], reply: wire.LookupReply) -> None:
        question.reads(list(itertools.compress(keys, reply.on_disk)), reply.disk_s)

    def _end(self, question: _Question) -> None:
        self._waiting -= 1
        question.then(question)

    def _answer(self, request: int, question: _Question) -> None:
        numbers: dict[NodeId, int] = {}
        # Most segments of a prompt have the same owners.
        made: dict[tuple[NodeId, ...], tuple[int, ...]] = {(): ()}
        found = [question.owners.get(key, ()) for key in question.keys]
        for each in found:
            if each not in made:
                made[each] = tuple(numbers.setdefault(node, len(numbers)) for node in each)
        owners = tuple(made[each] for each in found)
        disk_s = tuple(question.disk_s.get(key, 0.0) for key in question.keys) if question.disk_s else ()
        self._context.emit(Located(request, tuple(numbers), owners, disk_s))

    def census(self) -> dict[str, int]:
        return {"surveys": self._waiting}
