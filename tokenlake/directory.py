"""A directory node's directory: the nodes that have, or are computing, the segments that hash to this node.

An entry may be out of date; the node that it names decides. A lost entry costs a miss, a stale one a lookup. After a
restart of a node its earlier entries do not count; their memory is freed bit by bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId

__all__ = ["Directory", "Entry", "Standing"]


PREVIOUS_OWNERS_SHARE = 4
"""Previous owners are remembered for at most one in so many of the limit's entries."""


class Standing(IntEnum):
    """Statement of a node about a segment."""

    PENDING = 0
    """An engine of the node is computing or writing it."""
    DIRTY = 1
    """The node has it as a dirty copy."""
    PRIMARY = 2
    """The node has the primary copy."""


class Entry(NamedTuple):
    """The newest statement about a segment."""

    standing: Standing
    node: NodeId
    incarnation: Incarnation
    """Of the node at that time."""
    deadline: float
    """End of a PENDING entry; 0 for the others."""


class Directory:
    """At most `limit` entries; the oldest are removed beyond that. For a part of the removed segments it remembers the
    previous owner."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[tuple[TenantId, SegmentKey], Entry] = OrderedDict()
        self._previous_owners: OrderedDict[tuple[TenantId, SegmentKey], NodeId] = OrderedDict()
        self._lives: dict[NodeId, Incarnation] = {}
        """Newest incarnation of each restarted node; its entries of other incarnations do not count."""
        self._unswept = 0
        """Number of entries, from the oldest on, that may be of an earlier incarnation."""

    def __len__(self) -> int:
        """Entries in memory, including those that `sweep` has not removed yet."""
        return len(self._entries)

    def _find(self, tenant: TenantId, key: SegmentKey) -> Entry | None:
        entry = self._entries.get((tenant, key))
        return entry if entry is not None and self._counts(entry) else None

    def _counts(self, entry: Entry) -> bool:
        return self._lives.get(entry.node, entry.incarnation) == entry.incarnation

    def get(self, tenant: TenantId, key: SegmentKey, now: float) -> Entry | None:
        """The entry. A PENDING one past its deadline is removed."""
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
        """An engine of `node` computes it until `deadline`. Changes nothing where a node has it or another node
        computes it."""
        entry = self.get(tenant, key, now)
        if entry is None or (entry.standing is Standing.PENDING and entry.node == node):
            self._put(tenant, key, Entry(Standing.PENDING, node, incarnation, deadline))

    def withdraw(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` takes its PENDING entry back."""
        entry = self._find(tenant, key)
        if entry is not None and entry.standing is Standing.PENDING and entry.node == node:
            del self._entries[tenant, key]

    def ready(self, tenant: TenantId, key: SegmentKey, node: NodeId, incarnation: Incarnation) -> NodeId | None:
        """`node` committed it. Returns the other node whose commit came first, None when there is none."""
        entry = self._find(tenant, key)
        if entry is not None and entry.standing is not Standing.PENDING and entry.node != node:
            return entry.node
        if entry is None or entry.standing is not Standing.PRIMARY:
            self._put(tenant, key, Entry(Standing.DIRTY, node, incarnation, 0.0))
        return None

    def held(self, tenant: TenantId, key: SegmentKey, node: NodeId, incarnation: Incarnation) -> NodeId | None:
        """`node` has the primary copy. Returns the other node that has stated so before and remains the owner, None
        when there is none."""
        entry = self._find(tenant, key)
        if entry is not None and entry.standing is Standing.PRIMARY and entry.node != node:
            return entry.node
        self._put(tenant, key, Entry(Standing.PRIMARY, node, incarnation, 0.0))
        return None

    def gone(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` does not have it any more."""
        entry = self._find(tenant, key)
        if entry is not None and entry.node == node:
            del self._entries[tenant, key]

    def remember(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` had it, or refused it, and has its access record."""
        self._previous_owners[tenant, key] = node
        self._previous_owners.move_to_end((tenant, key))
        if len(self._previous_owners) > self.limit // PREVIOUS_OWNERS_SHARE:
            self._previous_owners.popitem(last=False)

    def previous_owner(self, tenant: TenantId, key: SegmentKey) -> NodeId | None:
        """The candidate that had it last and has its access record."""
        return self._previous_owners.get((tenant, key))

    def forget(self, node: NodeId, incarnation: Incarnation) -> None:
        """From now on only the entries of this incarnation of `node` count. Call `sweep` until it returns False."""
        self._lives[node] = incarnation
        self._unswept = len(self._entries)

    def sweep(self, most: int) -> bool:
        """Remove the forgotten ones of the next `most` entries. Is there more to examine?

        The others move to the newest end. After a whole sweep they are in their order again, except that entries made
        during the sweep count as older than entries examined after that.
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
