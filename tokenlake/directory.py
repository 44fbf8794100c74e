"""A directory node's directory: the nodes that own, or are computing, the segments that hash to this node.

An entry may be out of date; the node that it names decides. A lost entry costs a miss, a stale one a lookup. After a
restart of a node its earlier entries do not count; their memory is freed bit by bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tokenlake.hints import AccessRecord
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId

__all__ = ["Directory", "Entry"]

HISTORY_SHARE = 4
"""The last accesses of evicted segments are remembered for at most one in so many of the limit's entries."""


class Entry(NamedTuple):
    """The newest statement about a segment."""

    node: NodeId
    incarnation: Incarnation
    """Of the node at that time."""
    deadline: float = 0.0
    """0: the node owns the segment. Else the entry is an in-flight marker: an engine of the node computes the segment,
    until this time at most."""


class Directory:
    """At most `limit` entries; the oldest are removed beyond that. For a part of the segments without an entry it
    remembers the last access."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[tuple[TenantId, SegmentKey], Entry] = OrderedDict()
        self._history: OrderedDict[tuple[TenantId, SegmentKey], tuple[AccessRecord, float]] = OrderedDict()
        """(last access, its time), the one recorded longest ago first."""
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
        """The entry. An in-flight marker past its deadline is removed."""
        entry = self._find(tenant, key)
        if entry is not None and 0 < entry.deadline <= now:
            del self._entries[tenant, key]
            return None
        return entry

    def get_all(self, tenant: TenantId, keys: Sequence[SegmentKey], now: float) -> list[Entry | None]:
        """`get` of each."""
        find, life = self._entries.get, self._lives.get
        entries = [find((tenant, key)) for key in keys]
        return [
            entry
            if entry is None or (not entry[2] and life(entry[0], entry[1]) == entry[1])
            else self.get(tenant, key, now)
            for key, entry in zip(keys, entries, strict=True)
        ]

    def mark(
        self,
        tenant: TenantId,
        key: SegmentKey,
        node: NodeId,
        incarnation: Incarnation,
        deadline: float,
        now: float,
    ) -> None:
        """An engine of `node` computes the segment until `deadline`, which is above 0. Changes nothing where a node
        owns it or another node's marker stands."""
        entry = self.get(tenant, key, now)
        if entry is None or (entry.deadline and entry.node == node):
            self._put(tenant, key, Entry(node, incarnation, deadline))

    def clear(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` takes its in-flight marker back."""
        entry = self._find(tenant, key)
        if entry is not None and entry.deadline and entry.node == node:
            del self._entries[tenant, key]

    def own(
        self, tenant: TenantId, key: SegmentKey, node: NodeId, incarnation: Incarnation, previous: NodeId | None = None
    ) -> NodeId | None:
        """`node` owns the segment, unless another node than `previous` does. Returns that node, None when there is
        none."""
        entry = self._find(tenant, key)
        if entry is not None and not entry.deadline and entry.node not in (node, previous):
            return entry.node
        self._put(tenant, key, Entry(node, incarnation))
        return None

    def gone(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """`node` does not have it any more."""
        entry = self._find(tenant, key)
        if entry is not None and entry.node == node:
            del self._entries[tenant, key]

    def remember(self, tenant: TenantId, key: SegmentKey, access: AccessRecord, at: float) -> None:
        """The segment left its owner; its last access was at that time."""
        self._history[tenant, key] = access, at
        self._history.move_to_end((tenant, key))
        if len(self._history) > self.limit // HISTORY_SHARE:
            self._history.popitem(last=False)

    def last_access(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> tuple[int, AccessRecord, float] | None:
        """Of the last of `keys` whose last access is remembered: its index, that access and its time."""
        for index in range(len(keys) - 1, -1, -1) if self._history else ():
            known = self._history.get((tenant, keys[index]))
            if known is not None:
                return index, *known
        return None

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
        assert len(self._history) <= max(1, self.limit // HISTORY_SHARE)
