"""A home's directory: who has, or is writing, the segments that hash to this node.

An entry is a hint: its holder decides. A lost entry costs a miss, a stale one a question.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum
from typing import NamedTuple

from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId

__all__ = ["Directory", "Entry", "Standing"]


class Standing(IntEnum):
    """What a node says it does with a segment."""

    PENDING = 0
    """Writing it."""
    READY_AT = 1
    """Has it, not yet pushed to its holder."""
    HELD = 2
    """Keeps the home copy."""


class Entry(NamedTuple):
    """Who has a segment."""

    standing: Standing
    node: NodeId
    incarnation: Incarnation
    """Of the node when it said so: an entry of an earlier life is worth nothing."""
    deadline: float
    """Of PENDING: when it stops to count."""


class Directory:
    """At most `limit` entries; beyond, the oldest go."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[tuple[TenantId, SegmentKey], Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tenant: TenantId, key: SegmentKey, now: float) -> Entry | None:
        """The entry; a PENDING one past its deadline is dropped."""
        entry = self._entries.get((tenant, key))
        if entry is not None and entry.standing is Standing.PENDING and entry.deadline <= now:
            del self._entries[tenant, key]
            return None
        return entry

    def pending(
        self,
        tenant: TenantId,
        key: SegmentKey,
        node: NodeId,
        incarnation: Incarnation,
        deadline: float,
        now: float,
    ) -> None:
        """`node` is writing it. Changes nothing where somebody already has it or writes it."""
        if self.get(tenant, key, now) is None:
            self._put(tenant, key, Entry(Standing.PENDING, node, incarnation, deadline))

    def withdraw(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` gave up writing it."""
        entry = self._entries.get((tenant, key))
        if entry is not None and entry.standing is Standing.PENDING and entry.node == node:
            del self._entries[tenant, key]

    def ready(self, tenant: TenantId, key: SegmentKey, node: NodeId, incarnation: Incarnation) -> NodeId | None:
        """`node` committed it. The node whose commit came first, None when that is `node` itself."""
        entry = self._entries.get((tenant, key))
        if entry is not None and entry.standing is not Standing.PENDING and entry.node != node:
            return entry.node
        if entry is None or entry.standing is not Standing.HELD:
            self._put(tenant, key, Entry(Standing.READY_AT, node, incarnation, 0.0))
        return None

    def held(self, tenant: TenantId, key: SegmentKey, node: NodeId, incarnation: Incarnation) -> NodeId | None:
        """`node` keeps the home copy. Another node that said so before stays the holder and is returned."""
        entry = self._entries.get((tenant, key))
        if entry is not None and entry.standing is Standing.HELD and entry.node != node:
            return entry.node
        self._put(tenant, key, Entry(Standing.HELD, node, incarnation, 0.0))
        return None

    def gone(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` no longer has it."""
        entry = self._entries.get((tenant, key))
        if entry is not None and entry.node == node:
            del self._entries[tenant, key]

    def forget(self, node: NodeId, incarnation: Incarnation) -> None:
        """Drop what `node` said before its life `incarnation`."""
        stale = [at for at, e in self._entries.items() if e.node == node and e.incarnation < incarnation]
        for at in stale:
            del self._entries[at]

    def _put(self, tenant: TenantId, key: SegmentKey, entry: Entry) -> None:
        self._entries[tenant, key] = entry
        self._entries.move_to_end((tenant, key))
        if len(self._entries) > self.limit:
            self._entries.popitem(last=False)

    def check_integrity(self) -> None:
        """AssertionError when the bound does not hold."""
        assert len(self._entries) <= self.limit
