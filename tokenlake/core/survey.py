"""Where segments are, for a scheduler: one round of lookups at directory nodes, without a lease.

::

    LocateRequested -> copies of this node, and the owners of those that are cached copies
                       own directory
                       a lookup to each directory node of the other keys, in parallel
                           | all have answered, or the deadline has passed
                           v
                       Located: the nodes that have each segment

A segment may have moved or been evicted when the answer arrives. Requests of schedulers change no counter of reads and
no order of eviction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tokenlake.core.context import Context
from tokenlake.core.instructions import Located
from tokenlake.core.ownership.directory_node import DirectoryNode
from tokenlake.core.peers import Peers, Reply
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["MAX_LOCATED", "Survey"]

MAX_LOCATED = 512
"""Limit of the segments in one `LocateRequested`: half a millisecond of the control loop."""


@dataclass(eq=False, slots=True)
class _Question:
    """One request that waits for directory nodes."""

    request: int
    keys: list[SegmentKey]
    owners: dict[SegmentKey, tuple[NodeId, ...]]
    """By key: the nodes that have the segment, in the order in which they became known."""
    awaited: int = 0

    def has(self, key: SegmentKey, node: NodeId) -> None:
        """Note that a node has a segment."""
        known = self.owners.get(key, ())
        if node not in known:
            self.owners[key] = (*known, node)


class Survey:
    """Answers where segments are."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._waiting = 0

    def locate(self, request: int, tenant: TenantId, packed: bytes, deadline_s: float) -> None:
        """Find the nodes that have the segments of the keys `packed`, and answer with `Located`."""
        keys = split_keys(packed)
        here, limit_s = self._context.node, self._context.config.match_deadline_s
        if 0 < deadline_s < limit_s:
            limit_s = deadline_s
        question = _Question(request, keys, {})
        missing: list[SegmentKey] = []
        alone = (here,)
        for key, segment in zip(keys, self._context.ready(tenant, keys), strict=True):
            if segment is None:
                if self._context.disk.find(tenant, key) >= 0:
                    question.owners[key] = alone
                else:
                    missing.append(key)
                continue
            question.owners[key] = alone if segment.source in (None, here) else (here, segment.source)
        asked = dict(self._peers.by_directory_node(missing, previous=True))
        own = asked.pop(here, [])
        for key, (_, owner) in zip(own, self._directory_node.ask(tenant, own), strict=True):
            if owner is not None:
                question.has(key, owner)
        question.awaited = len(asked)
        self._waiting += 1
        for node, its_keys in asked.items():
            ring = self._context.ring_version
            make = partial(wire.Lookup, tenant=tenant, keys=join_keys(its_keys), ring=ring, lease=False)
            self._peers.call(node, make, limit_s, partial(self._heard, question, node, its_keys))
        if not asked:
            self._answer(question)

    def _heard(self, question: _Question, node: NodeId, keys: Sequence[SegmentKey], reply: Reply | None) -> None:
        if isinstance(reply, wire.LookupReply):
            if reply.lease:
                # A node of an earlier version leases although it was not asked to.
                self._peers.tell(node, wire.ReleaseLease((reply.lease,)))
            owners = iter(reply.nodes)
            for key, code in zip(keys, reply.codes, strict=True):
                if code == Code.LOCAL:
                    question.has(key, node)
                elif code == Code.ELSEWHERE and (owner := NodeId(next(owners))) != self._context.node:
                    question.has(key, owner)
        question.awaited -= 1
        if not question.awaited:
            self._answer(question)

    def _answer(self, question: _Question) -> None:
        self._waiting -= 1
        numbers: dict[NodeId, int] = {}
        # Most segments of a prompt have the same owners.
        made: dict[tuple[NodeId, ...], tuple[int, ...]] = {(): ()}
        found = [question.owners.get(key, ()) for key in question.keys]
        for each in found:
            if each not in made:
                made[each] = tuple(numbers.setdefault(node, len(numbers)) for node in each)
        owners = tuple(made[each] for each in found)
        self._context.emit(Located(question.request, tuple(numbers), owners))

    def census(self) -> dict[str, int]:
        """How many objects this part of the rules keeps, by kind: for gauges, and for tests that look for leaks."""
        return {"surveys": self._waiting}
