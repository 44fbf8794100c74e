"""The owner of a new segment: from dirty copy to primary copy.

::

    commit -> DIRTY -> Ready to the directory node --- EXISTS: another node committed it first ----> CACHED here
                          | COMMITTED, or no answer
                          v
              the emptier candidate of the first segment of the sequence becomes the owner
                          | this node                            | another node
                          v                                      v
            PRIMARY here, Held to the directory node           Offer (bounded queue per owner)
                          ^                                      | the owner pulls, keeps, sends Held
                          |  refused, late, or down              v
                          +------------------------------- OfferReply: CACHED here

A push is an offer that the owner pulls, so that bytes between nodes have one path, one deadline and one checksum.

Where memory is full and the segments that would be evicted have a higher retention value, the segment gets no primary
copy: the copy here becomes CACHED without an owner. Its directory node names it until it is evicted. A read of it
raises its retention value, and it is placed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.fetch import Transfers, deadline_s
from tokenlake.core.peers import Peer, Peers, Reply
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.placement import Vacancy, choose_owner, lean_of, runs
from tokenlake.store import Cursor, Kind, Segment, State
from tokenlake.store.removals import NOT_ADMITTED_RULE
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["Ownership"]

PUSHED = Metric("tokenlake_pushed_segments_total", "Segments that another node pulled from this one to own")
KEPT = Metric("tokenlake_kept_segments_total", "Segments that became primary copies on the node that wrote them")
DUPLICATES = Metric("tokenlake_duplicate_commits_total", "Commits of segments that another node had committed before")

OFFERED_BYTES = 64 << 20
"""Bytes on offer to one owner at a time, or one parcel; further parcels wait in the owner's queue."""
OFFER_GRACE_S = 1.0
"""Added to the deadline of an offer: the owner may pull offers of other nodes first."""
ADOPT_SLOTS = 256
"""Slots examined per slice of work after a peer is lost."""

_CACHED, _DIRTY, _PRIMARY = Kind.CACHED, Kind.DIRTY, Kind.PRIMARY


@dataclass(frozen=True, eq=False)
class _Parcel:
    """Dirty copies of one write that are offered to one owner together, in prompt order."""

    segments: list[Segment]
    request: str

    @property
    def nbytes(self) -> int:
        return self.segments[0].slot_bytes * len(self.segments)

    def offer(self, call: int) -> wire.Offer:
        first = self.segments[0]
        return wire.Offer(
            call,
            first.tenant,
            join_keys(segment.key for segment in self.segments),
            tuple(segment.depth for segment in self.segments),
            first.slot_bytes,
            len(first.checksums) // CHECKSUM_BYTES,
            self.request,
            # The newest hints: some may have arrived since the commit.
            self.segments[-1].hints,
        )


class Ownership:
    """Places dirty copies, makes offers to owners, and takes offers of other nodes."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode, transfers: Transfers) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._transfers = transfers
        self._queues: dict[NodeId, deque[_Parcel]] = {}
        self._offered: dict[NodeId, int] = {}
        """Bytes on offer, by owner."""

    # -- commit

    def committed(self, tenant: TenantId, segments: list[Segment], request: str = "") -> None:
        """Place newly committed dirty copies of one write, in prompt order, once their directory nodes have answered
        or their deadline has passed. `request`: the request's name in logs."""
        if not segments:
            return
        here = self._context.node
        first_commits = {segment.key: segment for segment in segments}
        grouped = self._context.by_directory_node(first_commits)
        waiting = len(grouped)

        def answered(keys: list[SegmentKey], reply: Reply | None) -> None:
            nonlocal waiting
            waiting -= 1
            # Without an answer the commit counts as the first; the directory node learns of the segment from its owner.
            if isinstance(reply, wire.ReadyReply) and len(reply.codes) == len(keys):
                first_writers, previous_owners = iter(reply.first_writers), iter(reply.previous_owners)
                for key, code in zip(keys, reply.codes, strict=True):
                    if code == Code.EXISTS:
                        self._make_cached(first_commits.pop(key), NodeId(next(first_writers, "")) or None)
                        self._context.counters.add(DUPLICATES)
                    else:
                        first_commits[key].previous_owner = NodeId(next(previous_owners, "")) or None
            if not waiting:
                self._place(tenant, [segment for segment in segments if segment.key in first_commits], request)

        for directory_node, keys in grouped.items():
            if directory_node == here:
                answered(keys, self._directory_node.ready(here, tenant, keys))
            else:
                make = partial(wire.Ready, tenant=tenant, keys=join_keys(keys))
                self._peers.call(directory_node, make, self._context.config.suspect_s, partial(answered, keys))

    def place_again(self, segments: list[Segment]) -> None:
        """READY segments of one prompt, in its order, were read: cached copies among them without an owner become dirty
        and are placed again, as far as the budget of dirty copies allows."""
        store = self._context.store
        waiting = [segment for segment in segments if segment.kind is _CACHED and segment.source is None]
        if waiting:
            waiting = waiting[: store.dirty_room(waiting[0].pool)]
            for segment in waiting:
                store.become(segment, _DIRTY, self._context.now)
            self._place(segments[0].tenant, waiting, "")

    def _place(self, tenant: TenantId, segments: list[Segment], request: str) -> None:
        """Choose an owner for each sequence: this node where neither candidate can be reached."""
        here = self._context.node
        candidates = self._context.ring.candidates(join_keys(segment.key for segment in segments))
        vacancies = self._vacancies(node for pair in candidates for node in pair)
        kept: list[Segment] = []
        queued: dict[NodeId, list[Segment]] = {}
        for run in runs([segment.depth for segment in segments], self._context.ring.run_length):
            sequence = segments[run.start : run.stop]
            welcome = [(node, vacancies[node]) for node in candidates[run.start] if node in vacancies]
            first = sequence[0]
            owner = choose_owner(welcome, lean_of(first.key), first.previous_owner) if welcome else here
            if owner == here:
                kept += sequence
            else:
                queued.setdefault(owner, []).extend(sequence)
        self._keep(tenant, kept)
        for owner, offered in queued.items():
            self._queues.setdefault(owner, deque()).append(_Parcel(offered, request))
            self._offer_next(owner)

    def _vacancies(self, nodes: Iterable[NodeId]) -> dict[NodeId, Vacancy]:
        """The vacancy of each node that can be reached. Placing segments changes none, so each is computed once."""
        return {
            node: self._peers.vacancy(node)
            for node in dict.fromkeys(nodes)
            if node == self._context.node or self._peers.usable(node)
        }

    # -- offers made

    def _offer_next(self, owner: NodeId) -> None:
        queue = self._queues[owner]
        while queue:
            parcel = queue[0]
            offered = self._offered.get(owner, 0)
            if offered and offered + parcel.nbytes > OFFERED_BYTES:
                return
            queue.popleft()
            self._offered[owner] = offered + parcel.nbytes
            wait = OFFER_GRACE_S
            usable = self._peers.usable(owner)
            if usable:
                wait += deadline_s(self._peers.predict_s(owner, self._offered[owner]))
            self._peers.call(owner, parcel.offer, wait, partial(self._answered, owner, parcel), proves_life=False)
            if not usable:
                # The call has ended already and armed a timer for the next parcel: a long queue must not recurse.
                return

    def _answered(self, owner: NodeId, parcel: _Parcel, reply: Reply | None) -> None:
        self._offered[owner] -= parcel.nbytes
        taken = isinstance(reply, wire.OfferReply) and len(reply.codes) == len(parcel.segments)
        codes = reply.codes if isinstance(reply, wire.OfferReply) and taken else bytes(len(parcel.segments))
        kept: list[Segment] = []
        # Deepest first, so that parents are evicted last.
        for segment, code in reversed(list(zip(parcel.segments, codes, strict=True))):
            if code in (Code.COMMITTED, Code.EXISTS):
                self._make_cached(segment, owner)
                self._context.counters.add(PUSHED)
            elif code == Code.NOT_ADMITTED:
                self._make_cached(segment, None)
                segment.previous_owner = owner
            else:
                kept.insert(0, segment)
        self._keep(parcel.segments[0].tenant, kept)
        if self._queues[owner]:
            # In a timer: a call to an owner that is down ends at once, and a long queue must not recurse.
            self._context.after(0.0, lambda: self._offer_next(owner))

    def _make_cached(self, segment: Segment, owner: NodeId | None) -> None:
        if segment.state is State.READY and segment.kind is _DIRTY:
            segment.source = owner
            self._context.store.become(segment, _CACHED, self._context.now)

    def _keep(self, tenant: TenantId, segments: list[Segment]) -> None:
        """Dirty copies become primary copies here where the policy admits them, else cached copies without an owner."""
        store, now = self._context.store, self._context.now
        dirty = [s for s in segments if s.state is State.READY and s.kind is _DIRTY]
        kept = []
        # From the beginning of the prompt: where not all are admitted, the first ones are.
        for segment in dirty:
            if store.admits_primary(segment, now):
                kept.append(segment)
            else:
                self._make_cached(segment, None)
                segment.previous_owner = self._context.node
        for segment in reversed(kept):
            store.become(segment, _PRIMARY, now)
        self._context.counters.add(KEPT, len(kept))
        self._tell_held(tenant, [segment.key for segment in kept])

    # -- primary copies and their directory nodes

    def _tell_held(self, tenant: TenantId, keys: list[SegmentKey]) -> None:
        """Tell the directory nodes that this node has the primary copies. Where a directory node cannot be reached, the
        other candidate stands in for it, and this node advertises to the directory node when it is back."""
        for directory_node, its_keys in self._context.by_directory_node(keys).items():
            if directory_node == self._context.node or self._peers.reachable(directory_node):
                self._tell_one(directory_node, tenant, its_keys)
                continue
            stand_ins: dict[NodeId, list[SegmentKey]] = {}
            for key, (_, other) in zip(its_keys, self._context.ring.candidates(join_keys(its_keys)), strict=True):
                stand_ins.setdefault(other, []).append(key)
            for stand_in, stood_in in stand_ins.items():
                self._tell_one(stand_in, tenant, stood_in)

    def _tell_one(self, directory_node: NodeId, tenant: TenantId, keys: list[SegmentKey]) -> None:
        if directory_node == self._context.node:
            self.redundant(self._directory_node.held(directory_node, tenant, keys))
        else:
            self._peers.tell(directory_node, wire.PrimaryCopies(tenant, join_keys(keys)))

    def redundant(self, message: wire.Redundant) -> None:
        """Other nodes have the primary copies of these segments: those here become cached copies."""
        tenant = TenantId(message.tenant)
        for key, owner in zip(split_keys(message.keys), message.nodes, strict=False):
            segment = self._context.store.get(tenant, key)
            if segment is not None and segment.state is State.READY and segment.kind is _PRIMARY:
                segment.source = NodeId(owner)
                self._context.store.become(segment, _CACHED, self._context.now)

    def owner_lost(self, peer: Peer) -> None:
        """`peer` is down or SUSPECT. Unless it comes back with its incarnation, copies here of segments that it owns
        become primary copies. That waits until the directory nodes have noticed the loss: before, they would answer
        that the primary copy is at `peer`."""
        incarnation = peer.incarnation
        cursor: Cursor | None = Cursor()

        def work() -> bool:
            nonlocal cursor
            if cursor is None or (peer.reachable and peer.incarnation == incarnation):
                return False
            segments, cursor = self._context.store.walk(cursor, ADOPT_SLOTS)
            self.adopt([segment for segment in segments if segment.source == peer.node])
            return cursor is not None

        self._context.after(self._peers.notices_s, lambda: self._context.in_slices(work))

    def adopt(self, segments: Iterable[Segment | None]) -> None:
        """Cached copies and replicas among these become primary copies."""
        by_tenant: dict[TenantId, list[SegmentKey]] = {}
        # Deepest first, so that parents are evicted last.
        for segment in sorted(filter(None, segments), key=lambda segment: -segment.depth):
            if self._make_primary(segment):
                by_tenant.setdefault(segment.tenant, []).append(segment.key)
        for tenant, keys in by_tenant.items():
            self._tell_held(tenant, keys)

    def _make_primary(self, segment: Segment) -> bool:
        """A cached copy or replica becomes the primary copy; False for any other."""
        if segment.state is not State.READY or segment.kind not in (_CACHED, Kind.REPLICA):
            return False
        segment.source = None
        self._context.store.become(segment, _PRIMARY, self._context.now)
        return True

    # -- offers taken

    def offered(self, node: NodeId, message: wire.Offer) -> None:
        """`node` chose this node as the owner: pull the segments, keep them, tell the directory nodes, answer."""
        tenant = TenantId(message.tenant)
        keys = split_keys(message.keys)
        codes = bytearray(len(keys))
        waiting = len(keys)

        def arrived(index: int, segment: Segment | None, code: Code) -> None:
            nonlocal waiting
            waiting -= 1
            if segment is None:
                codes[index] = code if code.refused else Code.LOST
            else:
                self._context.store.unpin(segment)
                self._make_primary(segment)
                codes[index] = Code.COMMITTED if segment.kind is _PRIMARY else Code.LOST
            if not waiting:
                self._answer_offer(node, message.call, tenant, keys, bytes(codes))

        wanted = [
            (key, depth, partial(arrived, index))
            for index, (key, depth) in enumerate(zip(keys, message.depths, strict=True))
        ]
        # No engine waits for a push: half of the grace is left for the answer to travel before the offer expires.
        predicted = self._peers.predict_s(node, message.slot_bytes * len(keys))
        self._transfers.bring(
            node,
            tenant,
            wanted,
            kind=_PRIMARY,
            slot_bytes=message.slot_bytes,
            shards=message.shards,
            wait_s=deadline_s(predicted) + OFFER_GRACE_S / 2,
            request=message.request,
            hints=message.hints,
        )

    def _answer_offer(self, node: NodeId, call: int, tenant: TenantId, keys: list[SegmentKey], codes: bytes) -> None:
        by_code: dict[int, list[SegmentKey]] = {}
        for key, code in zip(keys, codes, strict=True):
            by_code.setdefault(code, []).append(key)
        self._tell_held(tenant, by_code.get(Code.COMMITTED, []))
        self._tell_refused(tenant, by_code.get(Code.NOT_ADMITTED, []))
        vacancy, load = self._context.vacancy(), self._context.load()
        self._peers.tell(node, wire.OfferReply(call, codes, vacancy, load))

    def _tell_refused(self, tenant: TenantId, keys: list[SegmentKey]) -> None:
        """Tell the directory nodes, so that a later commit is offered to this node again: it has the access record."""
        here = self._context.node
        own = self._directory_node.tell_evicted(tenant, keys, here, NOT_ADMITTED_RULE)
        self._directory_node.left(here, tenant, own)

    # -- checks

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        dirty = sum(pool.counts[_DIRTY] for pool in self._context.store.pools())
        return {"dirty copies": dirty, "queued offers": sum(map(len, self._queues.values()))}

    def check_integrity(self) -> None:
        """AssertionError when fewer than no bytes are on offer to an owner."""
        assert all(offered >= 0 for offered in self._offered.values())
