"""A directory node's directory: the nodes that own, or are computing, the segments that hash to this node.

An entry may be out of date; the node that it names decides. A lost entry costs a miss, a stale one a lookup. After a
restart of a node its earlier entries do not count; their memory is freed bit by bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
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
    """At most `limit` owners of segments, of which the oldest are removed beyond that, and the in-flight markers of
    segments without an owner. It also remembers the last access of some segments that were evicted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._owners: OrderedDict[tuple[TenantId, SegmentKey], Entry] = OrderedDict()
        self._markers: dict[TenantId, OrderedDict[SegmentKey, Entry]] = {}
        """The in-flight markers of each tenant, the oldest first. One may lie beside an owner that does not count."""
        self._history: OrderedDict[tuple[TenantId, SegmentKey], tuple[AccessRecord, float]] = OrderedDict()
        """(access record of the last access, its time) of evicted segments, the one recorded longest ago first."""
        self._lives: dict[NodeId, Incarnation] = {}
        """Newest incarnation of each node that was restarted; entries of its other incarnations do not count."""
        self._unswept = 0
        """Number of owners, from the oldest on, that may be of an earlier incarnation of a node and are still to be
        examined."""

    def __len__(self) -> int:
        """Number of entries in memory, including those of earlier incarnations that are not removed yet."""
        return len(self._owners) + sum(map(len, self._markers.values()))

    def _counts(self, entry: Entry) -> bool:
        return self._lives.get(entry.node, entry.incarnation) == entry.incarnation

    def get(self, tenant: TenantId, key: SegmentKey, now: float) -> Entry | None:
        """Returns the valid entry of the segment, None without one. An in-flight marker that does not count any more is
        removed."""
        owner = self._owners.get((tenant, key))
        if owner is not None and self._counts(owner):
            return owner
        markers = self._markers.get(tenant)
        marker = markers.get(key) if markers else None
        if marker is None or (marker.deadline > now and self._counts(marker)):
            return marker
        self._markers[tenant].pop(key)
        return None

    def get_all(self, tenant: TenantId, keys: Sequence[SegmentKey], now: float) -> list[Entry | None]:
        """Returns the valid entry of each segment, None without one."""
        find, life = self._owners.get, self._lives.get
        owners = [find((tenant, key)) for key in keys]
        return [
            owner if owner is not None and life(owner[0], owner[1]) == owner[1] else self.get(tenant, key, now)
            for key, owner in zip(keys, owners, strict=True)
        ]

    def mark(
        self,
        tenant: TenantId,
        keys: Iterable[SegmentKey],
        node: NodeId,
        incarnation: Incarnation,
        deadline: float,
        now: float,
    ) -> None:
        """Record that engines of `node` compute these segments until the time `deadline`. Changes nothing for a segment
        that a node owns, or that has another node's marker."""
        made = Entry(node, incarnation, deadline)
        markers = self._markers.setdefault(tenant, OrderedDict())
        for key in keys:
            entry = self.get(tenant, key, now)
            if entry is None or (entry.deadline and entry.node == node):
                markers[key] = made
                markers.move_to_end(key)
                if len(markers) > MAX_MARKERS:
                    markers.popitem(last=False)

    def clear(self, tenant: TenantId, keys: Iterable[SegmentKey], node: NodeId) -> None:
        """Remove the in-flight markers of `node`, which takes them back."""
        markers = self._markers.get(tenant)
        if not markers:
            return
        for key in keys:
            marker = markers.get(key)
            if marker is not None and marker.node == node and self._counts(marker):
                del markers[key]
        if not markers:
            del self._markers[tenant]

    def own(
        self,
        tenant: TenantId,
        keys: Sequence[SegmentKey],
        node: NodeId,
        incarnation: Incarnation,
        previous: NodeId | None = None,
    ) -> dict[SegmentKey, NodeId]:
        """Record `node` as the owner of these segments, except where another node than `previous` is recorded. Returns
        those other owners by key."""
        made, owners, others = Entry(node, incarnation), self._owners, {}
        markers = self._markers.get(tenant)
        for key in keys:
            at = tenant, key
            entry = owners.get(at)
            if entry is not None:
                if entry.node not in (node, previous) and self._counts(entry):
                    others[key] = entry.node
                    continue
                owners.move_to_end(at)
            owners[at] = made
            if markers:
                markers.pop(key, None)
        for _ in range(len(owners) - self.limit):
            owners.popitem(last=False)
        if markers is not None and not markers:
            del self._markers[tenant]
        return others

    def gone(self, tenant: TenantId, keys: Iterable[SegmentKey], node: NodeId) -> None:
        """Remove the owners of these segments that are `node`, which does not have them any more."""
        for key in keys:
            entry = self._owners.get((tenant, key))
            if entry is not None and entry.node == node and self._counts(entry):
                del self._owners[tenant, key]

    def remember(self, tenant: TenantId, keys: Iterable[SegmentKey], access: AccessRecord, at: float) -> None:
        """Remember the last access, at the time `at`, of segments that left their owner."""
        history, most = self._history, min(self.limit // HISTORY_SHARE, max(LEAST_HISTORY, len(self)))
        known = access, at
        for key in keys:
            history[tenant, key] = known
            history.move_to_end((tenant, key))
            # Two at a time, because the number of entries, and the bound with it, may have become smaller.
            for _ in range(min(2, len(history) - most)):
                history.popitem(last=False)

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
        self._unswept = len(self._owners)

    def forget_life(self, node: NodeId) -> None:
        """Forget the incarnation of a node that has no entries."""
        self._lives.pop(node, None)

    def sweep(self, most: int, mine: Callable[[Sequence[SegmentKey]], Sequence[bool]] | None = None) -> bool:
        """Examine the next `most` owners and remove those of earlier incarnations, and those of keys for which `mine`
        returns False. Returns True if there are more to examine. Markers end by their deadlines.

        Valid owners move to the newest end. After all calls they are in their order again, except that those recorded
        between the calls count as older than those examined later.
        """
        examined = list(islice(self._owners.items(), min(most, self._unswept)))
        kept = mine([key for (_, key), _ in examined]) if mine is not None and examined else [True] * len(examined)
        for (at, owner), keep in zip(examined, kept, strict=True):
            if keep and self._counts(owner):
                # Moved and not put in again: that would now and then make the table of all entries anew.
                self._owners.move_to_end(at)
            else:
                del self._owners[at]
        self._unswept = max(0, self._unswept - most)
        return bool(self._unswept)

    def check_integrity(self) -> None:
        """Raises AssertionError when a bound does not hold."""
        assert len(self._owners) <= self.limit
        assert not any(owner.deadline for owner in self._owners.values())
        for tenant, markers in self._markers.items():
            assert len(markers) <= MAX_MARKERS
            assert all(marker.deadline > 0 for marker in markers.values())
            owners = (self._owners.get((tenant, key)) for key in markers)
            assert not any(owner is not None and self._counts(owner) for owner in owners)
        assert len(self._history) <= max(1, self.limit // HISTORY_SHARE)
