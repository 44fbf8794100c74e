"""This node as the directory node of the keys that hash to it, and the messages that it sends to the directory nodes of
other keys.

The directory records, per key, the node that owns or computes the segment. It is in memory only: after a restart it is
empty, and each peer advertises the segments that it owns again. Until all peers have done so it is incomplete, and the
directory node answers UNKNOWN for a key without an entry instead of MISSING.

While the directory node of a key cannot be reached, the other candidate of the key stands in for it::

    a peer is down or SUSPECT --> each owner tells the stand-ins the segments that hash to the peer (one walk)
    it can be reached again   --> each owner advertises to it the segments that hash to it (one walk)
    the ring changes          --> each owner advertises to all new directory nodes what moved to them (one walk)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import compress

from tokenlake.core.cluster.peers import Peer, Peers
from tokenlake.core.context import Context, KnownAccess, Part
from tokenlake.directory.entries import Directory, Entry
from tokenlake.directory.ring import Ring
from tokenlake.hints import AccessRecord
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId
from tokenlake.memory import Cursor
from tokenlake.metrics import Metric
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys, split_keys

SWEPT_ENTRIES = 512
"""Directory entries that are examined at once, before other events are handled, after a peer came back with a new
incarnation."""
WALKED_SLOTS = 512
"""Slots that are examined at once, before other events are handled, by a walk over all segments of this node."""
TOLD_AT_ONCE = 64
"""Nodes that are told at once that this node has advertised after a change of the ring."""

REFUSED_REPORTS = Metric(
    "tokenlake_refused_reports_total",
    "Segments of which a node reported that others own them, without being one of their directory nodes",
    "node",
)

_Chooses = Callable[[bytes, Sequence[tuple[NodeId, NodeId]], Sequence[NodeId]], Sequence[bool]]
"""Function that decides which segments a walk tells: called with (concatenated keys, their candidates, the nodes that
keep their directory entries)."""
_CHANGE = NodeId("")
"""Name of the walk of a change of the ring, which is for all nodes."""


class DirectoryNode(Part):
    """Owns this node's directory: answers from it, changes it by messages of other nodes, and tells other directory
    nodes which segments this node owns."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self.on_redundant: Callable[[wire.Redundant], None] = lambda message: None
        """Called when this node told its own directory that it owns segments, and the directory names other owners of
        some of them."""
        self._context = context
        self._peers = peers
        self._directory = Directory(context.config.directory_limit)
        self._known: dict[NodeId, Incarnation] = {}
        """Per peer, the incarnation whose directory entries are valid; entries of earlier incarnations are ignored."""
        self._advertised: dict[NodeId, tuple[Incarnation, int]] = {}
        """For each peer that has told this node all segments that it owns and that hash to this node: its incarnation,
        and the epoch of the ring on which they hash to this node."""
        self._complete = False
        self._kept: Ring | None = None
        """The ring before the last change, if this node was complete on it and is not complete on the present one; else
        None."""
        self._changed_at = -math.inf
        """Time in seconds of the last change of the ring."""
        self._left: dict[NodeId, float] = {}
        """Nodes that left the ring record, until their entries are swept and their markers have ended, and the time in
        seconds at which they left."""
        self._moved = False
        """True while the directory may have entries of keys of which this node is no candidate any more."""
        self._walks: dict[NodeId, int] = {}
        """For each peer that was lost or restored, and for a change of the ring (`_CHANGE`), the id of the walk over
        this node's segments that is under way because of it."""

    # -- answers

    @property
    def complete(self) -> bool:
        """True once every peer has advertised, or `sync_grace_s` has passed since the start or since the last change of
        the ring. After a change of the ring on which this node was complete, it does not wait for peers that it cannot
        reach."""
        if not self._complete:
            since = max(self._context.started, self._changed_at)
            waited = self._context.now >= since + self._context.config.sync_grace_s
            self._complete = waited or all(map(self._has_advertised, self._peers))
            if self._complete:
                self._kept = None
        return self._complete

    def _has_advertised(self, peer: Peer) -> bool:
        incarnation, epoch = self._advertised.get(peer.node, (None, 0))
        told = peer.up and incarnation == peer.incarnation and epoch >= self._context.record.epoch
        return told or (self._kept is not None and not peer.reachable)

    def answers(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> list[tuple[Code, NodeId | None]]:
        """Returns the directory's answer for each key: ELSEWHERE with the usable node that owns the segment, or
        PENDING, MISSING or UNKNOWN without a node."""
        entries = self._directory.get_all(tenant, keys, self._context.now)
        absent = (Code.MISSING if self.complete else Code.UNKNOWN), None
        if self._kept is not None and None in entries:
            return self._ask_kept(keys, entries)
        # A node that has one of the keys usually has many of them: its answer is made once.
        by_node: dict[NodeId, tuple[Code, NodeId | None]] = {}
        answers: list[tuple[Code, NodeId | None]] = []
        for entry in entries:
            if entry is None:
                answers.append(absent)
            elif entry.deadline:
                answers.append(self._answer(entry))
            else:
                if entry.node not in by_node:
                    by_node[entry.node] = self._answer(entry)
                answers.append(by_node[entry.node])
        return answers

    def _ask_kept(self, keys: Sequence[SegmentKey], entries: list[Entry | None]) -> list[tuple[Code, NodeId | None]]:
        """Returns the answers (see `answers`) while `_kept` is set: for a key without an entry, MISSING if this node
        was its directory node on the previous ring too, otherwise UNKNOWN."""
        here, ring, kept = self._context.node, self._context.ring, self._kept
        assert kept is not None
        absent = [key for key, entry in zip(keys, entries, strict=True) if entry is None]
        packed = join_keys(absent)
        pairs = zip(ring.candidates(packed), kept.candidates(packed), strict=True)
        known = iter([now[0] == before[0] == here for now, before in pairs])
        return [
            self._answer(entry) if entry is not None else ((Code.MISSING if next(known) else Code.UNKNOWN), None)
            for entry in entries
        ]

    def _answer(self, entry: Entry) -> tuple[Code, NodeId | None]:
        mine = entry.node == self._context.node
        if not mine and not self._peers.usable(entry.node):
            return Code.UNKNOWN, None
        if entry.deadline:
            return Code.PENDING, None
        return (Code.MISSING, None) if mine else (Code.ELSEWHERE, entry.node)

    def copies_of(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> list[list[NodeId]]:
        """Returns, for each segment, the other nodes that may have a copy of it and deliver segments, the most likely
        first: the owner according to this node's directory, then the two candidates of the key."""
        delivering = {peer.node for peer in self._peers if peer.delivers}
        pairs = zip(self.answers(tenant, keys), self._context.ring.candidates(join_keys(keys)), strict=True)
        return [
            [node for node in dict.fromkeys((named, *pair)) if node is not None and node in delivering]
            for (_, named), pair in pairs
        ]

    def recorded_owner(self, tenant: TenantId, key: SegmentKey) -> NodeId | None:
        """The owner of the segment according to the directory, whether or not it can be reached; None where no node
        owns it."""
        entry = self._directory.get(tenant, key, self._context.now)
        return None if entry is None or entry.deadline else entry.node

    # -- in-flight markers

    def announce(self, tenant: TenantId, keys: Sequence[SegmentKey], seconds: float) -> None:
        """Tell the directory nodes of `keys` that an engine of this node computes them, for at most `seconds`."""
        own = self._tell(keys, lambda packed: wire.MarkInFlight(tenant, packed, seconds))
        self.set_markers(self._context.node, tenant, own, seconds)

    def announced(self, node: NodeId, message: wire.MarkInFlight) -> None:
        """Set the in-flight markers that `node` announces: its engines compute these segments."""
        self.set_markers(node, TenantId(message.tenant), split_keys(message.keys), message.deadline_s)

    def set_markers(self, node: NodeId, tenant: TenantId, keys: Iterable[SegmentKey], seconds: float) -> None:
        """Set in-flight markers: engines of `node` compute the segments, for at most `seconds`. They have no effect
        where the segment exists or another node's marker stands."""
        deadline = self._context.now + min(self._context.config.reservation_s, seconds)
        if deadline > self._context.now:
            self._directory.mark(tenant, keys, node, self._incarnation(node), deadline, self._context.now)

    def withdraw(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> None:
        """Tell the directory nodes of `keys` that no engine of this node computes them any more."""
        own = self._tell(keys, lambda packed: wire.ClearInFlight(tenant, packed))
        self._directory.clear(tenant, own, self._context.node)

    def withdrawn(self, node: NodeId, message: wire.ClearInFlight) -> None:
        """Remove in-flight markers that `node` takes back."""
        self._directory.clear(TenantId(message.tenant), split_keys(message.keys), node)

    def _tell(self, keys: Sequence[SegmentKey], make: Callable[[bytes], wire.PeerMessage]) -> Sequence[SegmentKey]:
        """Send `make(concatenated keys)` to each node other than this one that keeps the entries of some `keys`.
        Returns the keys whose entries this node keeps."""
        own: Sequence[SegmentKey] = ()
        for node, its_keys in self._peers.by_directory_node(keys).items():
            if node == self._context.node:
                own = its_keys
            else:
                for start in range(0, len(its_keys), wire.MAX_KEYS):
                    self._peers.tell(node, make(join_keys(its_keys[start : start + wire.MAX_KEYS])))
        return own

    # -- owners

    def tell_owned(self, tenant: TenantId, keys: Sequence[SegmentKey], previous: str = "") -> None:
        """Tell the directory nodes of `keys` that this node owns these segments. `previous`: the node that handed the
        segments over, whose entries in the directory are replaced; empty if there is none. A directory node that knows
        another owner of some of its keys answers with a `Redundant` message; this node calls `on_redundant` for the
        keys of which it is the directory node."""
        own = self._tell(keys, lambda packed: wire.Owned(tenant, packed, previous))
        self._own(tenant, own, NodeId(previous))

    def _own(self, tenant: TenantId, keys: Sequence[SegmentKey], previous: NodeId | None = None) -> None:
        """Record in the directory of this node that this node owns these segments."""
        redundant = self.owned(self._context.node, tenant, keys, previous)
        if redundant.keys:
            self.on_redundant(redundant)

    def owned(
        self, node: NodeId, tenant: TenantId, keys: Sequence[SegmentKey], previous: NodeId | None
    ) -> wire.Redundant:
        """Record in the directory that `node` owns these segments. Returns the answer for `node`: the keys of which the
        directory names another owner that can be reached, and these owners. Entries of `previous`, and of nodes that
        cannot be reached, are replaced. Where this node stands in for the directory node of a key, each entry is
        replaced: it may come from an earlier outage of the directory node, and its owner has told only the directory
        node of later changes."""
        incarnation, here = self._incarnation(node), self._context.node
        others = self._directory.own(tenant, keys, node, incarnation, previous)
        if others:
            known = list(others)
            pairs = zip(known, self._context.ring.candidates(join_keys(known)), strict=True)
            firsts = {key: first for key, (first, _) in pairs}
            for key, owner in list(others.items()):
                if firsts[key] != here or (owner != here and not self._peers.reachable(owner)):
                    self._directory.gone(tenant, (key,), owner)
                    self._directory.own(tenant, (key,), node, incarnation, previous)
                    del others[key]
        return wire.Redundant(tenant, join_keys(list(others)), tuple(others.values()))

    def _incarnation(self, node: NodeId) -> Incarnation:
        peer = self._peers.get(node)
        return self._context.incarnation if peer is None else peer.incarnation

    def gone(self, tenant: TenantId, keys: Sequence[SegmentKey], node: NodeId) -> None:
        """Drop the directory entries of these segments that name `node`, which does not have them."""
        self._directory.gone(tenant, keys, node)

    def tell_evicted(
        self, tenant: TenantId, keys: Sequence[SegmentKey], rule: str, access: AccessRecord, age_s: float
    ) -> None:
        """Tell the directory nodes that this node does not have these segments any more, by which rule they left it,
        and their last access, which was `age_s` ago."""
        own = self._tell(keys, lambda packed: wire.Evicted(tenant, packed, rule, access, age_s))
        self.gone(tenant, own, self._context.node)
        self.remember(tenant, own, access, age_s)

    def unfound(self, node: NodeId, message: wire.Unfound) -> None:
        """Handle a report that segments are not at their owner, `message.node`. `node`: the reader that looked for
        them, or a directory node that asks. As that owner, this node tells `node` which of them it does not have; as
        their directory node, it asks the owner, because entries are removed on the owner's word only."""
        tenant, keys, owner = TenantId(message.tenant), split_keys(message.keys), NodeId(message.node)
        if owner == self._context.node:
            found = self._context.ready(tenant, keys)
            disk, pairs = self._context.disk, zip(keys, found, strict=True)
            absent = [key for key, segment in pairs if segment is None and disk.find(tenant, key) < 0]
            if absent:
                self._peers.tell(node, wire.Evicted(tenant, join_keys(absent)))
            return
        self.ask_owner(tenant, [key for key in keys if self.recorded_owner(tenant, key) == owner], owner)

    def ask_owner(self, tenant: TenantId, keys: Sequence[SegmentKey], owner: NodeId) -> None:
        """Ask the owner that this node's directory names whether it still has these segments."""
        if keys:
            self._peers.tell(owner, wire.Unfound(tenant, join_keys(keys), owner))

    def believed(self, node: NodeId, message: wire.Redundant) -> wire.Redundant:
        """Returns the part of the message about keys of which `node` is a candidate on the ring of now or the previous
        one, or names itself the owner. Its reports about other keys are counted."""
        keys = split_keys(message.keys)
        candidate = self._candidate(node, message.keys)
        knows = [known or owner == node for known, owner in zip(candidate, message.nodes, strict=True)]
        if all(knows):
            return message
        self._context.counters.add_for(REFUSED_REPORTS, knows.count(False), node)
        some = list(compress(keys, knows))
        return wire.Redundant(message.tenant, join_keys(some), tuple(compress(message.nodes, knows)))

    # -- last accesses

    def remember(self, tenant: TenantId, keys: Iterable[SegmentKey], access: AccessRecord, age_s: float) -> None:
        """Remember the last access, `age_s` seconds ago, of segments that left their owner. If they come back on any
        node, the eviction policy values them with the help of it."""
        if access.segments:
            self._directory.remember(tenant, keys, access, self._context.now - age_s)

    def last_access(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> KnownAccess | None:
        """Returns (index, last access, seconds since then) of the last of `keys` whose last access the directory
        remembers; None without one."""
        known = self._directory.last_access(tenant, keys)
        return None if known is None else (known[0], known[1], self._context.since(known[2]))

    # -- directory nodes that come and go

    def lost(self, peer: Peer) -> None:
        """`peer` is down or SUSPECT: tell its stand-ins the segments of this node whose directory node is `peer`."""
        self._walk(peer.node, lambda: not self._peers.reachable(peer.node), _about(peer.node))

    def restored(self, peer: Peer) -> None:
        """`peer` can be reached again and may have missed messages: advertise to it. Entries of its earlier
        incarnations do not count any more."""
        if self._known.get(peer.node, Incarnation(0)) != peer.incarnation:
            self._known[peer.node] = peer.incarnation
            self._directory.forget(peer.node, peer.incarnation)
            self._context.in_slices(self._sweep)
        self._advertise(peer.node)

    def _advertise(self, node: NodeId, *, later: bool = False) -> None:
        """Tell `node` the segments of this node that hash to it, and then, by `AdvertisingDone`, that it was told all
        of them."""

        def done() -> None:
            self._peers.tell(node, wire.AdvertisingDone(self._context.ring_version))

        self._walk(node, lambda: self._peers.reachable(node), _about(node), done, later=later)

    def advertised(self, node: NodeId, message: wire.AdvertisingDone) -> None:
        """Record that `node` has told this node all segments that it owns."""
        peer = self._peers.get(node)
        if peer is not None:
            self._peers.names_ring(node, message.ring)
            self._advertised[node] = peer.incarnation, message.ring[0]

    def _sweep(self) -> bool:
        more = self._directory.sweep(SWEPT_ENTRIES, self._mine if self._moved else None)
        if not more:
            self._moved = False
            ended = self._context.now - self._context.config.reservation_s
            for node, left_at in list(self._left.items()):
                if self._peers.get(node) is not None:
                    del self._left[node]
                elif left_at <= ended:
                    self._directory.forget_life(node)
                    del self._left[node]
        return more

    def _mine(self, keys: Sequence[SegmentKey]) -> list[bool]:
        return self._candidate(self._context.node, join_keys(keys))

    def _candidate(self, node: NodeId, keys: bytes) -> list[bool]:
        """Returns, for each of the concatenated `keys`, True if `node` is a candidate of the key on the present ring
        or, while the previous ring counts, on that one."""
        now = [node in pair for pair in self._context.ring.candidates(keys)]
        if self._context.previous_ring is None or all(now):
            return now
        before = self._context.previous_ring.candidates(keys)
        return [each or node in pair for each, pair in zip(now, before, strict=True)]

    # -- changes of the ring

    @property
    def telling(self) -> bool:
        """True while this node tells the new directory nodes which of its segments moved to them."""
        return _CHANGE in self._walks

    def before_ring_change(self) -> None:
        """Called before the ring changes: from then on this node answers UNKNOWN for keys that it gains, until all
        peers that can be reached have advertised on the new ring."""
        members = self._context.record.members
        # Without peers before, this node was told nothing: it served alone, perhaps because it had not joined yet.
        told = self._context.node in members and len(members) > 1
        self._kept = self._context.ring if told and self.complete else None
        self._complete = False
        self._changed_at = self._context.now

    def after_ring_change(self, left: Iterable[Peer]) -> None:
        """The ring has changed from `Context.previous_ring`, on which all segments were told, and these members left,
        whose entries `forget_moved` sweeps: tell the new directory nodes the segments of this node that moved to them.
        Walks that are under way begin again."""
        for peer in left:
            self._known.pop(peer.node, None)
            self._advertised.pop(peer.node, None)
            self._directory.forget(peer.node, Incarnation(-1))
            self._left[peer.node] = self._context.now
        previous, under_way = self._context.previous_ring, [node for node in self._walks if node != _CHANGE]
        self._walks.clear()

        def chosen(keys: bytes, pairs: Sequence[tuple[NodeId, NodeId]], keepers: Sequence[NodeId]) -> list[bool]:
            moved = self._context.ring.moved(previous, keys) if previous is not None else [False] * len(keepers)
            stood_in = (keeper != first for (first, _), keeper in zip(pairs, keepers, strict=True))
            return [each or other for each, other in zip(moved, stood_in, strict=True)]

        def done() -> None:
            # The walk for a peer that came back ends with a message of its own.
            told = [peer.node for peer in self._peers if peer.node not in self._walks]
            version = self._context.ring_version

            def tell_some() -> bool:
                some, told[:TOLD_AT_ONCE] = told[:TOLD_AT_ONCE], []
                for node in some if version == self._context.ring_version else ():
                    self._peers.tell(node, wire.AdvertisingDone(version))
                return bool(told)

            self._context.in_slices(tell_some)

        self._walk(_CHANGE, lambda: True, chosen, done, later=True)
        for node in under_way:
            # The walk for a peer that is lost is covered by that of the change.
            if self._peers.reachable(node):
                self._advertise(node, later=True)

    def forget_moved(self) -> None:
        """The previous ring does not count any more: forget the entries of keys that moved away from this node."""
        self._moved = True
        self._directory.look_again()
        self._context.in_slices(self._sweep)

    def _walk(
        self,
        name: NodeId,
        needed: Callable[[], bool],
        chosen: _Chooses,
        done: Callable[[], None] = lambda: None,
        *,
        later: bool = False,
    ) -> None:
        """Send the directory nodes, in slices, the keys of those segments of this node for which `chosen` returns True.

        Each key goes to the one of its two candidates that keeps its entry now. The walk ends without a call of `done`
        when `needed` returns False, or when another walk of the same `name` begins; `done` is called after the last
        slice. Segments that this node comes to own meanwhile are sent when it does. `later`: begin after this event.
        """
        number = self._context.next_id()
        self._walks[name] = number
        cursor: Cursor | None = Cursor()
        on_disk: int | None = 0

        def work() -> bool:
            nonlocal cursor, on_disk
            if self._walks.get(name) != number or on_disk is None:
                return False
            if needed():
                if cursor is not None:
                    segments, cursor = self._context.store.walk(cursor, WALKED_SLOTS)
                    self._tell_keys(((each.tenant, each.key) for each in segments if each.owned), chosen)
                    if cursor is not None or self._context.disk:
                        return True
                entries, on_disk = self._context.disk.walk(on_disk, WALKED_SLOTS)
                disk = self._context.disk
                self._tell_keys(((disk.slab(entry).tenant, disk.key(entry)) for entry in entries), chosen)
                if on_disk is not None:
                    return True
                done()
            del self._walks[name]
            return False

        self._context.in_slices(work, later=later)

    def _tell_keys(self, owned: Iterable[tuple[TenantId, SegmentKey]], chosen: _Chooses) -> None:
        by_tenant: dict[TenantId, list[SegmentKey]] = {}
        for tenant, key in owned:
            by_tenant.setdefault(tenant, []).append(key)
        for tenant, keys in by_tenant.items():
            packed = join_keys(keys)
            pairs = self._context.ring.candidates(packed)
            keepers = self._peers.keepers(pairs)
            by_keeper: dict[NodeId, list[SegmentKey]] = {}
            for key, keeper, told in zip(keys, keepers, chosen(packed, pairs, keepers), strict=True):
                if told:
                    by_keeper.setdefault(keeper, []).append(key)
            self._own(tenant, by_keeper.pop(self._context.node, []))
            for keeper, its_keys in by_keeper.items():
                self._peers.tell(keeper, wire.Owned(tenant, join_keys(its_keys)))

    # -- checks

    def census(self) -> dict[str, int]:
        return {"directory": len(self._directory), "walks": len(self._walks)}

    def check_integrity(self) -> None:
        self._directory.check_integrity()
        assert all(self._peers.get(node) is not None for node in (*self._known, *self._advertised))
        assert self._kept is None or not self._complete


def _about(node: NodeId) -> _Chooses:
    """Chooses the segments that hash to `node`, and those that `node` stands in for."""

    def chosen(keys: bytes, pairs: Sequence[tuple[NodeId, NodeId]], keepers: Sequence[NodeId]) -> list[bool]:
        return [node in (first, keeper) for (first, _), keeper in zip(pairs, keepers, strict=True)]

    return chosen
