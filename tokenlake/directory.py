"""A directory node's directory: who has, or is writing, the segments that hash to this node.

An entry is a hint: its owner decides. A lost entry costs a miss, a stale one a question. When a node begins
another life, what it said before counts for nothing at once; the memory of it comes back entry by entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId

__all__ = ["Directory", "Entry", "Standing"]


PREVIOUS_OWNERS_SHARE = 4
"""One of so many entries at most is remembered after it went."""


class Standing(IntEnum):
    """What a node says it does with a segment."""

    PENDING = 0
    """Writing it."""
    READY_AT = 1
    """Has it, not yet pushed to its owner."""
    HELD = 2
    """Keeps the primary copy."""


class Entry(NamedTuple):
    """Who has a segment."""

    standing: Standing
    node: NodeId
    incarnation: Incarnation
    """Of the node when it said so."""
    deadline: float
    """Of PENDING: when it stops to count."""


class Directory:
    """At most `limit` entries; beyond, the oldest go. Of a part of what left, the candidate that had it last."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[tuple[TenantId, SegmentKey], Entry] = OrderedDict()
        self._previous_owners: OrderedDict[tuple[TenantId, SegmentKey], NodeId] = OrderedDict()
        self._lives: dict[NodeId, Incarnation] = {}
        """Of the nodes that were forgotten: an entry of another life is none."""
        self._unswept = 0
        """Entries from the oldest on that may be of such a life."""

    def __len__(self) -> int:
        """Entries in memory, those not swept yet included."""
        return len(self._entries)

    def _find(self, tenant: TenantId, key: SegmentKey) -> Entry | None:
        entry = self._entries.get((tenant, key))
        return entry if entry is not None and self._counts(entry) else None

    def _counts(self, entry: Entry) -> bool:
        return self._lives.get(entry.node, entry.incarnation) == entry.incarnation

    def get(self, tenant: TenantId, key: SegmentKey, now: float) -> Entry | None:
        """The entry; a PENDING one past its deadline is dropped."""
        entry = self._find(tenant, key)
        if entry is not None and entry.standing is Standing.PENDING and entry.deadline <= now:
            del self._entries[tenant, key]
            return None
        return entry

    def get_all(self, tenant: TenantId, keys: Sequence[SegmentKey], now: float) -> list[Entry | None]:
        """`get` of each."""
        find, life, pending = self._entries.get, self._lives.get, Standing.PENDING
        entries = [find((tenant, key)) for key in keys]
        return [
            entry
            if entry is None or (entry[0] is not pending and life(entry[1], entry[2]) == entry[2])
            else self.get(tenant, key, now)
            for key, entry in zip(keys, entries, strict=True)
        ]

    def pending(
        self,
        tenant: TenantId,
        key: SegmentKey,
        node: NodeId,
        incarnation: Incarnation,
        deadline: float,
        now: float,
    ) -> None:
        """`node` is writing it, from now on until `deadline`. Changes nothing where somebody already has it or another
        node writes it."""
        entry = self.get(tenant, key, now)
        if entry is None or (entry.standing is Standing.PENDING and entry.node == node):
            self._put(tenant, key, Entry(Standing.PENDING, node, incarnation, deadline))

    def withdraw(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` gave up writing it."""
        entry = self._find(tenant, key)
        if entry is not None and entry.standing is Standing.PENDING and entry.node == node:
            del self._entries[tenant, key]

    def ready(self, tenant: TenantId, key: SegmentKey, node: NodeId, incarnation: Incarnation) -> NodeId | None:
        """`node` committed it. The node whose commit came first, None when that is `node` itself."""
        entry = self._find(tenant, key)
        if entry is not None and entry.standing is not Standing.PENDING and entry.node != node:
            return entry.node
        if entry is None or entry.standing is not Standing.HELD:
            self._put(tenant, key, Entry(Standing.READY_AT, node, incarnation, 0.0))
        return None

    def held(self, tenant: TenantId, key: SegmentKey, node: NodeId, incarnation: Incarnation) -> NodeId | None:
        """`node` keeps the primary copy. Another node that said so before stays the owner and is returned."""
        entry = self._find(tenant, key)
        if entry is not None and entry.standing is Standing.HELD and entry.node != node:
            return entry.node
        self._put(tenant, key, Entry(Standing.HELD, node, incarnation, 0.0))
        return None

    def gone(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` no longer has it."""
        entry = self._find(tenant, key)
        if entry is not None and entry.node == node:
            del self._entries[tenant, key]

    def remember(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` had it, or refused it, and knows how it was used."""
        self._previous_owners[tenant, key] = node
        self._previous_owners.move_to_end((tenant, key))
        if len(self._previous_owners) > self.limit // PREVIOUS_OWNERS_SHARE:
            self._previous_owners.popitem(last=False)

    def previous_owner(self, tenant: TenantId, key: SegmentKey) -> NodeId | None:
        """Who remembers it."""
        return self._previous_owners.get((tenant, key))

    def forget(self, node: NodeId, incarnation: Incarnation) -> None:
        """From now on only what `node` says in its life `incarnation` counts. Call `sweep` until it returns False."""
        self._lives[node] = incarnation
        self._unswept = len(self._entries)

    def sweep(self, most: int) -> bool:
        """Drop what was forgotten among the next `most` entries; is there more to look at?

        The others go to the other end. After a whole turn they are in their order again, but for what was said
        during the sweep, which counts as older than what the sweep passed later.
        """
        for _ in range(min(most, self._unswept, len(self._entries))):
            at, entry = self._entries.popitem(last=False)
            if self._counts(entry):
                self._entries[at] = entry
        self._unswept = max(0, self._unswept - most)
        return bool(self._unswept)

    def _put(self, tenant: TenantId, key: SegmentKey, entry: Entry) -> None:
        self._entries[tenant, key] = entry
        self._entries.move_to_end((tenant, key))
        if len(self._entries) > self.limit:
            self._entries.popitem(last=False)

    def check_integrity(self) -> None:
        """AssertionError when the bound does not hold."""
        assert len(self._entries) <= self.limit
        assert len(self._previous_owners) <= max(1, self.limit // PREVIOUS_OWNERS_SHARE)
