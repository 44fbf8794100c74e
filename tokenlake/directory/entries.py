"""A directory node's directory: the nodes that own, or are computing, the segments that hash to this node.

An entry may be out of date; the node that it names decides. A lost entry costs a miss, a stale one a lookup. After a
restart of a node its earlier entries do not count; their memory is freed bit by bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from tokenlake.hints import AccessRecord
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId

HISTORY_SHARE = 4
"""The directory remembers the last accesses of at most a fourth as many evicted segments as it may have entries."""
LEAST_HISTORY = 1 << 16
"""Within that bound it remembers as many as it has entries, and at least this number: 20 MiB."""


MAX_MARKERS = 1 << 14
"""Maximum number of in-flight markers of one tenant, of which the oldest is removed beyond that: a tenant that sets
many for segments that it never stores must not push out the entries of other tenants."""


class Entry(NamedTuple):
    """The newest statement about a segment: which node owns it or is computing it."""

    node: NodeId
    incarnation: Incarnation
    """Incarnation of the node's daemon at the time of the statement."""
    deadline: float = 0.0
    """0: the node owns the segment. Else the entry is an in-flight marker: an engine of the node computes the segment,
    until this time at most."""


class Directory:
    """A directory of at most `limit` entries, of which the oldest are removed beyond that. It also remembers the last
    access of some segments that were evicted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[tuple[TenantId, SegmentKey], Entry] = OrderedDict()
        self._markers: dict[TenantId, OrderedDict[SegmentKey, None]] = {}
        """The segments of each tenant whose entries are in-flight markers, the oldest first; no tenant without one."""
        self._history: OrderedDict[tuple[TenantId, SegmentKey], tuple[AccessRecord, float]] = OrderedDict()
        """(access record of the last access, its time) of evicted segments, the one recorded longest ago first."""
        self._lives: dict[NodeId, Incarnation] = {}
        """Newest incarnation of each node that was restarted; entries of its other incarnations do not count."""
        self._unswept = 0
        """Number of entries, from the oldest on, that may be of an earlier incarnation of a node and are still to be
        examined."""

    def __len__(self) -> int:
        """Number of entries in memory, including those of earlier incarnations that are not removed yet."""
        return len(self._entries)

    def _find(self, tenant: TenantId, key: SegmentKey) -> Entry | None:
        entry = self._entries.get((tenant, key))
        return entry if entry is not None and self._counts(entry) else None

    def _counts(self, entry: Entry) -> bool:
        return self._lives.get(entry.node, entry.incarnation) == entry.incarnation

    def get(self, tenant: TenantId, key: SegmentKey, now: float) -> Entry | None:
        """Returns the valid entry of the segment, None without one. An in-flight marker past its deadline is
        removed."""
        entry = self._find(tenant, key)
        if entry is not None and 0 < entry.deadline <= now:
            self._remove(tenant, key)
            return None
        return entry

    def get_all(self, tenant: TenantId, keys: Sequence[SegmentKey], now: float) -> list[Entry | None]:
        """Returns the valid entry of each segment, None without one."""
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
        """Record that an engine of `node` computes the segment until the time `deadline`, which is above 0. Changes
        nothing if a node owns the segment or has another in-flight marker."""
        entry = self.get(tenant, key, now)
        if entry is None or (entry.deadline and entry.node == node):
            self._put(tenant, key, Entry(node, incarnation, deadline))

    def clear(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """Remove the in-flight marker of `node`, which takes it back."""
        entry = self._find(tenant, key)
        if entry is not None and entry.deadline and entry.node == node:
            self._remove(tenant, key)

    def own(
        self, tenant: TenantId, key: SegmentKey, node: NodeId, incarnation: Incarnation, previous: NodeId | None = None
    ) -> NodeId | None:
        """Record `node` as the owner of the segment, unless another node than `previous` is recorded. Returns that
        other owner, None when there is none."""
        entry = self._find(tenant, key)
        if entry is not None and not entry.deadline and entry.node not in (node, previous):
            return entry.node
        self._put(tenant, key, Entry(node, incarnation))
        return None

    def gone(self, tenant: TenantId, key: SegmentKey, node: NodeId) -> None:
        """Remove the entry of the segment if it names `node`, which does not have the segment any more."""
        entry = self._find(tenant, key)
        if entry is not None and entry.node == node:
            self._remove(tenant, key)

    def remember(self, tenant: TenantId, key: SegmentKey, access: AccessRecord, at: float) -> None:
        """Remember the last access, at the time `at`, of a segment that left its owner."""
        self._history[tenant, key] = access, at
        self._history.move_to_end((tenant, key))
        most = min(self.limit // HISTORY_SHARE, max(LEAST_HISTORY, len(self._entries)))
        # Two at a time, because the number of entries, and the bound with it, may have become smaller.
        for _ in range(min(2, len(self._history) - most)):
            self._history.popitem(last=False)

    def last_access(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> tuple[int, AccessRecord, float] | None:
        """Returns (index, access record, time) of the last of `keys` whose last access is remembered; None without
        one."""
        for index in range(len(keys) - 1, -1, -1) if self._history else ():
            known = self._history.get((tenant, keys[index]))
            if known is not None:
                return index, *known
        return None

    def forget(self, node: NodeId, incarnation: Incarnation) -> None:
        """From now on only the entries of this incarnation of `node` count. Call `sweep` until it returns False."""
        self._lives[node] = incarnation
        self.look_again()

    def look_again(self) -> None:
        """Let `sweep` begin with all entries."""
        self._unswept = len(self._entries)

    def forget_life(self, node: NodeId) -> None:
        """Forget the incarnation of a node that has no entries."""
        self._lives.pop(node, None)

    def sweep(self, most: int, mine: Callable[[Sequence[SegmentKey]], Sequence[bool]] | None = None) -> bool:
        """Examine the next `most` entries and remove those of earlier incarnations, and those of keys for which `mine`
        returns False. Returns True if there are more to examine.

        Valid entries move to the newest end. After all calls they are in their order again, except that entries made
        between the calls count as older than entries examined later.
        """
        examined = list(islice(self._entries.items(), min(most, self._unswept)))
        kept = mine([key for (_, key), _ in examined]) if mine is not None and examined else [True] * len(examined)
        for (at, entry), keep in zip(examined, kept, strict=True):
            if keep and self._counts(entry):
                # Moved and not put in again: that would now and then make the table of all entries anew.
                self._entries.move_to_end(at)
            else:
                self._remove(*at)
        self._unswept = max(0, self._unswept - most)
        return bool(self._unswept)

    def _put(self, tenant: TenantId, key: SegmentKey, entry: Entry) -> None:
        self._entries[tenant, key] = entry
        self._entries.move_to_end((tenant, key))
        self._unmark(tenant, key)
        if entry.deadline:
            markers = self._markers.setdefault(tenant, OrderedDict())
            markers[key] = None
            if len(markers) > MAX_MARKERS:
                self._remove(tenant, next(iter(markers)))
        if len(self._entries) > self.limit:
            oldest, _ = self._entries.popitem(last=False)
            self._unmark(*oldest)

    def _remove(self, tenant: TenantId, key: SegmentKey) -> None:
        del self._entries[tenant, key]
        self._unmark(tenant, key)

    def _unmark(self, tenant: TenantId, key: SegmentKey) -> None:
        """Remove the segment from the tenant's markers, if it is there: its entry is no in-flight marker any more, or
        is gone."""
        markers = self._markers.get(tenant)
        if markers is not None and key in markers:
            del markers[key]
            if not markers:
                del self._markers[tenant]

    def check_integrity(self) -> None:
        """Raises AssertionError when the bound does not hold."""
        assert len(self._entries) <= self.limit
        marked = [at for at, entry in self._entries.items() if entry.deadline]
        assert sorted(marked) == sorted((tenant, key) for tenant, keys in self._markers.items() for key in keys)
        assert all(0 < len(keys) <= MAX_MARKERS for keys in self._markers.values())
        assert len(self._history) <= max(1, self.limit // HISTORY_SHARE)
