"""This node as the directory node of the keys that hash to it, and the messages that it sends to the directory nodes of
other keys.

The directory records, per key, the node that owns or computes the segment. It is in memory only: after a restart it is
empty, and each peer advertises the segments that it owns again. Until all peers have done so it is incomplete, and the
directory node answers UNKNOWN for a key without an entry instead of MISSING.

While the directory node of a key cannot be reached, the other candidate of the key stands in for it::

    a peer is down or SUSPECT --> each owner tells the stand-ins the segments that hash to the peer (one walk)
    it can be reached again   --> each owner advertises to it the segments that hash to it (one walk)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tokenlake.core.context import Context, KnownAccess
from tokenlake.core.peers import Peer, Peers
from tokenlake.directory import Directory, Entry
from tokenlake.hints import AccessRecord
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId
from tokenlake.store import Cursor, Segment
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["DirectoryNode"]

SWEPT_ENTRIES = 1024
"""Directory entries that are examined at once, before other events are handled, after a peer came back with a new
incarnation."""
WALKED_SLOTS = 512
"""Slots that are examined at once, before other events are handled, while this node tells other nodes which segments it
owns."""


class DirectoryNode:
    """Owns this node's directory: answers from it, changes it by messages of other nodes, and tells other directory
    nodes which segments this node owns."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._directory = Directory(context.config.directory_limit)
        self._known: dict[NodeId, Incarnation] = {}
        """Per peer, the incarnation whose directory entries are valid; entries of earlier incarnations are ignored."""
        self._advertised: dict[NodeId, Incarnation] = {}
        """The incarnation of each peer that has told this node all segments that it owns and that hash to this node."""
        self._complete = False
        self._walks: dict[NodeId, int] = {}
        """For each peer that was lost or restored, the id of the walk over this node's segments that is under way
        because of it."""

    # -- answers

    @property
    def complete(self) -> bool:
        """True once every peer that is up has advertised, or `sync_grace_s` has passed since the start."""
        if not self._complete:
            waited = self._context.now >= self._context.started + self._context.config.sync_grace_s
            self._complete = waited or all(
                peer.up and self._advertised.get(peer.node) == peer.incarnation for peer in self._peers
            )
        return self._complete

    def ask(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> list[tuple[Code, NodeId | None]]:
        """Returns the directory's answer for each key: ELSEWHERE with the usable node that owns the segment, or
        PENDING, MISSING or UNKNOWN without a node."""
        entries = self._directory.get_all(tenant, keys, self._context.now)
        absent = (Code.MISSING if self.complete else Code.UNKNOWN), None
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

    def _answer(self, entry: Entry) -> tuple[Code, NodeId | None]:
        mine = entry.node == self._context.node
        if not mine and not self._peers.usable(entry.node):
            return Code.UNKNOWN, None
        if entry.deadline:
            return Code.PENDING, None
        return (Code.MISSING, None) if mine else (Code.ELSEWHERE, entry.node)

    def recorded_owner(self, tenant: TenantId, key: SegmentKey) -> NodeId | None:
        """The owner of the segment according to the directory, whether or not it can be reached; None where no node
        owns it."""
        entry = self._directory.get(tenant, key, self._context.now)
        return None if entry is None or entry.deadline else entry.node

    # -- in-flight markers

    def announce(self, tenant: TenantId, keys: Sequence[SegmentKey], seconds: float) -> None:
        """Tell the directory nodes of `keys` that an engine of this node computes them, for at most `seconds`."""
        for key in self._tell(keys, lambda packed: wire.MarkInFlight(tenant, packed, seconds)):
            self.claim(self._context.node, tenant, key, seconds)

    def announced(self, node: NodeId, message: wire.MarkInFlight) -> None:
        """Set the in-flight markers that `node` announces: its engines compute these segments."""
        for key in split_keys(message.keys):
            self.claim(node, TenantId(message.tenant), key, message.deadline_s)

    def claim(self, node: NodeId, tenant: TenantId, key: SegmentKey, seconds: float) -> None:
        """Set an in-flight marker: an engine of `node` computes the segment, for at most `seconds`. It has no effect
        where the segment exists or another node's marker stands."""
        # `min` in this order: a deadline that is not a number is replaced by `reservation_s`.
        deadline = self._context.now + min(self._context.config.reservation_s, seconds)
        if deadline > self._context.now:
            self._directory.mark(tenant, key, node, self._incarnation(node), deadline, self._context.now)

    def withdraw(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> None:
        """Tell the directory nodes of `keys` that no engine of this node computes them any more."""
        for key in self._tell(keys, lambda packed: wire.ClearInFlight(tenant, packed)):
            self._directory.clear(tenant, key, self._context.node)

    def withdrawn(self, node: NodeId, message: wire.ClearInFlight) -> None:
        """Remove in-flight markers that `node` takes back."""
        for key in split_keys(message.keys):
            self._directory.clear(TenantId(message.tenant), key, node)

    def _tell(self, keys: Iterable[SegmentKey], make: Callable[[bytes], wire.PeerMessage]) -> Sequence[SegmentKey]:
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

    def tell_owned(self, tenant: TenantId, keys: Sequence[SegmentKey], previous: str = "") -> wire.Redundant:
        """Tell the directory nodes of `keys` that this node owns these segments. `previous`: the node that handed the
        segments over, whose entries in the directory are replaced; empty if there is none. Returns the answer of
        this node (see `owned`) for the keys of which it is the directory node; another directory node answers with a
        `Redundant` message, and only if it knows another owner of some of its keys."""
        own = self._tell(keys, lambda packed: wire.Owned(tenant, packed, previous))
        return self.owned(self._context.node, tenant, own, NodeId(previous))

    def owned(
        self, node: NodeId, tenant: TenantId, keys: Sequence[SegmentKey], previous: NodeId | None = None
    ) -> wire.Redundant:
        """Record in the directory that `node` owns these segments. Returns the answer for `node`: the keys of which
        the directory names another owner that can be reached, and these owners. The entries of `previous`, and of a
        node that cannot be reached, are replaced; so is each entry where this node stands in for the directory node: it
        may be of an earlier outage, and its owner has told later changes to the directory node."""
        redundant: list[SegmentKey] = []
        owners: list[str] = []
        incarnation, here = self._incarnation(node), self._context.node
        for key, (first, _) in zip(keys, self._context.ring.candidates(join_keys(keys)), strict=True):
            owner = self._directory.own(tenant, key, node, incarnation, previous)
            if owner is not None and (first != here or (owner != here and not self._peers.reachable(owner))):
                self._directory.gone(tenant, key, owner)
                owner = self._directory.own(tenant, key, node, incarnation, previous)
            if owner is not None:
                redundant.append(key)
                owners.append(owner)
        return wire.Redundant(tenant, join_keys(redundant), tuple(owners))

    def _incarnation(self, node: NodeId) -> Incarnation:
        peer = self._peers.get(node)
        return self._context.incarnation if peer is None else peer.incarnation

    def gone(self, tenant: TenantId, keys: Sequence[SegmentKey], node: NodeId) -> None:
        """Drop the directory entries of these segments that name `node`, which does not have them."""
        for key in keys:
            self._directory.gone(tenant, key, node)

    def tell_evicted(
        self, tenant: TenantId, keys: Iterable[SegmentKey], rule: str, access: AccessRecord, age_s: float
    ) -> None:
        """Tell the directory nodes that this node does not have these segments any more, by which rule they left it,
        and their last access, which was `age_s` ago."""
        node = self._context.node
        own = self._tell(keys, lambda packed: wire.Evicted(tenant, packed, node, rule, access, age_s))
        self.gone(tenant, own, node)
        self.remember(tenant, own, access, age_s)

    # -- last accesses

    def remember(self, tenant: TenantId, keys: Iterable[SegmentKey], access: AccessRecord, age_s: float) -> None:
        """Remember the last access, `age_s` seconds ago, of segments that left their owner. If they come back on any
        node, the eviction policy values them with the help of it."""
        if access.segments:
            for key in keys:
                self._directory.remember(tenant, key, access, self._context.now - age_s)

    def last_access(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> KnownAccess | None:
        """Returns (index, last access, seconds since then) of the last of `keys` whose last access the directory
        remembers; None without one."""
        known = self._directory.last_access(tenant, keys)
        return None if known is None else (known[0], known[1], self._context.since(known[2]))

    # -- directory nodes that come and go

    def lost(self, peer: Peer) -> None:
        """`peer` is down or SUSPECT: tell the stand-ins the segments of this node that hash to it."""
        self._walk(peer.node, lambda: not self._peers.reachable(peer.node))

    def restored(self, peer: Peer) -> None:
        """`peer` can be reached again and may have missed messages: advertise to it. Entries of an earlier incarnation
        of it stop to count."""
        if self._known.get(peer.node, Incarnation(0)) != peer.incarnation:
            self._known[peer.node] = peer.incarnation
            self._directory.forget(peer.node, peer.incarnation)
            self._context.in_slices(lambda: self._directory.sweep(SWEPT_ENTRIES))
        self._walk(
            peer.node,
            lambda: self._peers.reachable(peer.node),
            lambda: self._peers.tell(peer.node, wire.AdvertisingDone()),
        )

    def advertised(self, node: NodeId) -> None:
        """Record that `node` has told this node all segments that it owns."""
        peer = self._peers.get(node)
        if peer is not None:
            self._advertised[node] = peer.incarnation

    def _walk(self, node: NodeId, needed: Callable[[], bool], done: Callable[[], None] = lambda: None) -> None:
        """Tell the segments of this node that hash to `node`, and those that `node` stands in for, to the nodes that
        keep their entries now, in slices, for as long as `needed`; then call `done`. A walk for the same node that is
        under way is replaced. Segments that this node comes to own meanwhile are told at once."""
        number = self._context.next_id()
        self._walks[node] = number
        cursor: Cursor | None = Cursor()

        def work() -> bool:
            nonlocal cursor
            if self._walks.get(node) != number or cursor is None:
                return False
            if needed():
                segments, cursor = self._context.store.walk(cursor, WALKED_SLOTS)
                self._tell_segments(node, segments)
                if cursor is not None:
                    return True
                done()
            del self._walks[node]
            return False

        self._context.in_slices(work)

    def _tell_segments(self, node: NodeId, segments: Iterable[Segment]) -> None:
        by_tenant: dict[TenantId, list[SegmentKey]] = {}
        for segment in segments:
            if segment.owned:
                by_tenant.setdefault(segment.tenant, []).append(segment.key)
        for tenant, keys in by_tenant.items():
            pairs = self._context.ring.candidates(join_keys(keys))
            by_keeper: dict[NodeId, list[SegmentKey]] = {}
            for key, (first, _), keeper in zip(keys, pairs, self._peers.keepers(pairs), strict=True):
                if node in (first, keeper):
                    by_keeper.setdefault(keeper, []).append(key)
            self.owned(self._context.node, tenant, by_keeper.pop(self._context.node, []))
            for keeper, its_keys in by_keeper.items():
                self._peers.tell(keeper, wire.Owned(tenant, join_keys(its_keys)))

    # -- checks

    def census(self) -> dict[str, int]:
        """How many objects this part of the rules keeps, by kind: for gauges, and for tests that look for leaks."""
        return {"directory": len(self._directory), "walks": len(self._walks)}

    def check_integrity(self) -> None:
        """Raises AssertionError when the directory exceeds its bounds."""
        self._directory.check_integrity()
