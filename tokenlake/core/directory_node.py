"""This node as the directory node of the keys that hash to it.

The directory records, per key, the node that owns, has or writes the segment. It is in memory only: after a restart it
is empty, and each peer advertises its primary copies to it again. Until all peers have done so it is incomplete, and
the directory node answers UNKNOWN for a key without an entry instead of MISSING.

Methods that take a `node` record a statement of that node; `announce`, `withdraw` and `advertise` tell the directory
nodes of other keys about this node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tokenlake.core.context import Context
from tokenlake.core.peers import Peer, Peers
from tokenlake.directory import Directory, Entry, Standing
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId
from tokenlake.store import Cursor, Kind, State
from tokenlake.store.removals import CORRUPT_RULE
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["DirectoryNode"]

SWEPT_ENTRIES = 1024
"""Directory entries examined per slice of work after a peer came back with a new incarnation."""
ADVERTISED_SLOTS = 512
"""Slots examined per slice of work while this node advertises its primary copies."""

_PENDING = Standing.PENDING
_Record = Callable[[TenantId, SegmentKey, NodeId, Incarnation], NodeId | None]


class DirectoryNode:
    """Owns the directory, and knows whether it is complete."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._directory = Directory(context.config.directory_limit)
        self._known: dict[NodeId, Incarnation] = {}
        """Per peer, the incarnation whose directory entries are valid; entries of earlier incarnations are ignored."""
        self._advertised: dict[NodeId, Incarnation] = {}
        """The incarnation of each peer that has advertised all its primary copies to this node."""
        self._complete = False
        self._advertising: dict[NodeId, int] = {}
        """Per peer, the id of the walk over this node's primary copies that is under way for it."""

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
        """The directory's answer for each key: ELSEWHERE with a usable node other than this one, PENDING, MISSING or
        UNKNOWN."""
        entries = self._directory.get_all(tenant, keys, self._context.now)
        absent = (Code.MISSING if self.complete else Code.UNKNOWN), None
        # A node that has one of the keys usually has many of them: its answer is made once.
        by_node: dict[NodeId, tuple[Code, NodeId | None]] = {}
        answers: list[tuple[Code, NodeId | None]] = []
        for entry in entries:
            if entry is None:
                answers.append(absent)
            elif entry.standing is _PENDING:
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
        if entry.standing is _PENDING:
            return Code.PENDING, None
        return (Code.MISSING, None) if mine else (Code.ELSEWHERE, entry.node)

    def recorded_node(self, tenant: TenantId, key: SegmentKey) -> NodeId | None:
        """The node that has the segment according to the directory, whether or not it can be reached; None where no
        node has it."""
        entry = self._directory.get(tenant, key, self._context.now)
        return None if entry is None or entry.standing is _PENDING else entry.node

    # -- in-flight markers

    def announce(self, tenant: TenantId, keys: Sequence[SegmentKey], seconds: float) -> None:
        """Tell the directory nodes of `keys` that an engine of this node computes them, for at most `seconds`."""
        for key in self._tell(keys, lambda packed: wire.MarkInFlight(tenant, packed, seconds)):
            self.claim(self._context.node, tenant, key, seconds)

    def announced(self, node: NodeId, message: wire.MarkInFlight) -> None:
        """Engines of `node` compute these segments."""
        for key in split_keys(message.keys):
            self.claim(node, TenantId(message.tenant), key, message.deadline_s)

    def claim(self, node: NodeId, tenant: TenantId, key: SegmentKey, seconds: float) -> None:
        """Set an in-flight marker: an engine of `node` computes the segment, for at most `seconds`. It has no effect
        where the segment exists or another node's marker stands."""
        # `min` in this order: a deadline that is not a number is replaced by `reservation_s`.
        deadline = self._context.now + min(self._context.config.reservation_s, seconds)
        self._directory.pending(tenant, key, node, self._incarnation(node), deadline, self._context.now)

    def withdraw(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> None:
        """Tell the directory nodes of `keys` that no engine of this node computes them any more."""
        for key in self._tell(keys, lambda packed: wire.ClearInFlight(tenant, packed)):
            self._directory.withdraw(tenant, key, self._context.node)

    def withdrawn(self, node: NodeId, message: wire.ClearInFlight) -> None:
        """`node` takes back its in-flight markers."""
        for key in split_keys(message.keys):
            self._directory.withdraw(TenantId(message.tenant), key, node)

    def _tell(self, keys: Iterable[SegmentKey], make: Callable[[bytes], wire.PeerMessage]) -> Sequence[SegmentKey]:
        """Send `make(concatenated keys)` to each directory node of `keys` other than this one. Returns the keys whose
        directory node this node is."""
        own: Sequence[SegmentKey] = ()
        for directory_node, its_keys in self._context.by_directory_node(keys).items():
            if directory_node == self._context.node:
                own = its_keys
            else:
                self._peers.tell(directory_node, make(join_keys(its_keys)))
        return own

    # -- copies

    def ready(self, node: NodeId, tenant: TenantId, keys: Sequence[SegmentKey], call: int = 0) -> wire.ReadyReply:
        """`node` committed these segments. Returns the answer to it, for its `call`.

        EXISTS, with the node of the first commit: another node that can be reached committed the segment before.
        COMMITTED, with the previous owner if there is one: `node` is the first.
        """
        codes = bytearray()
        first_writers: list[NodeId] = []
        previous_owners: list[NodeId] = []
        for key in keys:
            first = self._record(self._directory.ready, tenant, key, node)
            if first is not None:
                codes.append(Code.EXISTS)
                first_writers.append(first)
            else:
                codes.append(Code.COMMITTED)
                previous_owners.append(self._directory.previous_owner(tenant, key) or NodeId(""))
        known = tuple(previous_owners) if any(previous_owners) else ()
        return wire.ReadyReply(call, bytes(codes), tuple(first_writers), known)

    def held(self, node: NodeId, tenant: TenantId, keys: Sequence[SegmentKey]) -> wire.Redundant:
        """`node` has the primary copies of these. Returns the message for it: the keys whose primary copy is at another
        node that can be reached, and those nodes."""
        redundant: list[SegmentKey] = []
        owners: list[str] = []
        for key in keys:
            owner = self._record(self._directory.held, tenant, key, node)
            if owner is not None:
                redundant.append(key)
                owners.append(owner)
        return wire.Redundant(tenant, join_keys(redundant), tuple(owners))

    def _record(self, record: _Record, tenant: TenantId, key: SegmentKey, node: NodeId) -> NodeId | None:
        """Record a statement of `node`. Returns the other node whose earlier statement stays in force. The statement of
        a node that cannot be reached is replaced."""
        incarnation = self._incarnation(node)
        other = record(tenant, key, node, incarnation)
        if other is not None and other != self._context.node and not self._peers.reachable(other):
            self._directory.gone(tenant, key, other)
            other = record(tenant, key, node, incarnation)
        return other

    def _incarnation(self, node: NodeId) -> Incarnation:
        peer = self._peers.get(node)
        return self._context.incarnation if peer is None else peer.incarnation

    def gone(self, tenant: TenantId, keys: Sequence[SegmentKey], node: NodeId) -> None:
        """`node` does not have these segments: entries that name it are dropped."""
        for key in keys:
            self._directory.gone(tenant, key, node)

    def tell_evicted(
        self, tenant: TenantId, keys: Iterable[SegmentKey], node: NodeId, rule: str = ""
    ) -> Sequence[SegmentKey]:
        """Tell the directory nodes other than this one that `node` does not have these, and by which rule they left it.
        Returns the keys whose directory node this node is."""
        return self._tell(keys, lambda packed: wire.Evicted(tenant, packed, node, rule))

    def left(self, node: NodeId, tenant: TenantId, keys: Sequence[SegmentKey], rule: str = "") -> None:
        """`node` evicted these segments, or refused them. A candidate of a key becomes its previous owner, unless the
        copy was dropped for wrong bytes."""
        for key, pair in zip(keys, self._context.ring.candidates(join_keys(keys)), strict=True):
            self._directory.gone(tenant, key, node)
            if node in pair and rule != CORRUPT_RULE:
                self._directory.remember(tenant, key, node)

    # -- after a break

    def restored(self, peer: Peer) -> None:
        """`peer` can be reached again and may have missed messages: advertise to it. Entries of an earlier incarnation
        of it stop to count."""
        if self._known.get(peer.node, Incarnation(0)) != peer.incarnation:
            self._known[peer.node] = peer.incarnation
            self._directory.forget(peer.node, peer.incarnation)
            self._context.in_slices(lambda: self._directory.sweep(SWEPT_ENTRIES))
        self.advertise(peer.node)

    def advertised(self, node: NodeId) -> None:
        """`node` has told this node all its primary copies."""
        peer = self._peers.get(node)
        if peer is not None:
            self._advertised[node] = peer.incarnation

    def advertise(self, node: NodeId) -> None:
        """Tell the directory node `node` all primary copies here that hash to it, in slices, then `Advertised`. A walk
        for the same node that is under way is replaced. Primary copies made meanwhile are told as they are made."""
        number = self._context.next_id()
        self._advertising[node] = number
        cursor: Cursor | None = Cursor()

        def work() -> bool:
            nonlocal cursor
            if self._advertising.get(node) != number or cursor is None:
                return False
            reachable = self._peers.reachable(node)
            cursor = self._advertise_from(node, cursor) if reachable else None
            if cursor is not None:
                return True
            del self._advertising[node]
            if reachable:
                self._peers.tell(node, wire.AdvertisingDone())
            return False

        self._context.in_slices(work)

    def _advertise_from(self, node: NodeId, start: Cursor) -> Cursor | None:
        segments, following = self._context.store.walk(start, ADVERTISED_SLOTS)
        by_tenant: dict[TenantId, list[SegmentKey]] = {}
        for segment in segments:
            if segment.state is State.READY and segment.kind is Kind.PRIMARY:
                by_tenant.setdefault(segment.tenant, []).append(segment.key)
        for tenant, keys in by_tenant.items():
            its_keys = self._context.by_directory_node(keys).get(node)
            if its_keys:
                self._peers.tell(node, wire.PrimaryCopies(tenant, join_keys(its_keys)))
        return following

    # -- checks

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"directory": len(self._directory), "advertisings": len(self._advertising)}

    def check_integrity(self) -> None:
        """AssertionError when the directory exceeds its bounds."""
        self._directory.check_integrity()
