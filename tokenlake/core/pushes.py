"""From dirty copy to primary copy.

::

    commit -> DIRTY -> Ready to the directory node --- EXISTS: somebody's commit came first ----> CACHED
                          | COMMITTED, or no answer
                          v
                    the emptier candidate of the run's first segment
                          | this node                            | another node
                          v                                      v
                     PRIMARY, Held to the directory node               Offer (bounded queue per owner)
                          ^                                      | the owner pulls, keeps, says Held
                          |  refused, late, or down              v
                          +------------------------------- OfferReply: CACHED here

A push is an offer that the owner pulls, so bytes between nodes have one path, one deadline and one checksum.

Where memory is full and what would have to go is worth more, no primary copy is made: the copy here is CACHED without a
owner. Its directory node knows it until it is evicted; when it is read before, it is worth more, and is placed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.fetches import Fetches, deadline_s
from tokenlake.core.peers import Peer, Peers, Reply
from tokenlake.hints import Hints
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.placement import Vacancy, choose_owner, lean_of, runs
from tokenlake.store import Cursor, Kind, Segment, State
from tokenlake.store.history import NOT_ADMITTED_RULE
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["Pushes"]

PUSHED = Metric("tokenlake_pushed_segments_total", "Segments that another node pulled from here to keep")
KEPT = Metric("tokenlake_kept_segments_total", "Segments that became primary copies where they were written")
DUPLICATES = Metric("tokenlake_duplicate_commits_total", "Commits that came after another node's")

OFFERED_BYTES = 64 << 20
"""At most this much is on offer to one owner at a time (at least one parcel); the rest waits in its queue."""
OFFER_GRACE_S = 1.0
"""Added to the give-up time of a push: the owner may have other pushes to pull first."""

_CACHED = Kind.CACHED
ADOPT_SLOTS = 256
"""Slots looked at at a time when a peer is lost."""


class _Parcel:
    """What one store has for one owner."""

    def __init__(self, segments: list[Segment], request: str) -> None:
        self.request = request
        self.tenant = segments[0].tenant
        self.slot_bytes = segments[0].slot_bytes
        self.shards = len(segments[0].checksums) // CHECKSUM_BYTES
        self.segments = segments

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * len(self.segments)


class Pushes:
    """Dirty copies on their way, and offers from other nodes."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode, fetches: Fetches) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._fetches = fetches
        self._queues: dict[NodeId, deque[_Parcel]] = {}
        self._offered: dict[NodeId, int] = {}
        self._asking: dict[Segment, None] = {}

    # -- commit

    def add(self, tenant: TenantId, segments: list[Segment], request: str = "") -> None:
        """Newly committed dirty copies of one write, in prompt order. `request`: for the logs."""
        if not segments:
            return
        self._asking.update(dict.fromkeys(segments))
        by_key = {segment.key: segment for segment in segments}
        grouped = self._context.by_directory_node(by_key)
        waiting = len(grouped)

        def answered(
            keys: list[SegmentKey], codes: bytes, firsts: Sequence[str], previous_owners: Sequence[str]
        ) -> None:
            nonlocal waiting
            waiting -= 1
            named, remembering = iter(firsts), iter(previous_owners)
            for key, code in zip(keys, codes, strict=True):
                if code == Code.EXISTS:
                    self._make_cached(by_key.pop(key), NodeId(next(named, "")) or None)
                    self._context.counters.add(DUPLICATES)
                else:
                    by_key[key].previous_owner = NodeId(next(remembering, "")) or None
            if not waiting:
                self._place(tenant, [segment for segment in segments if segment.key in by_key], request)

        for directory_node, keys in grouped.items():
            if directory_node == self._context.node:
                answered(keys, *self._directory_node.ready(directory_node, tenant, keys))
            else:
                self._peers.call(
                    directory_node,
                    partial(_ready, tenant=tenant, keys=join_keys(keys)),
                    self._context.config.suspect_s,
                    partial(_ready_codes, partial(answered, keys), len(keys)),
                )

    def again(self, segments: list[Segment]) -> None:
        """READY segments of one prompt, in its order, were read: those that nobody wanted to keep are placed again."""
        store = self._context.store
        waiting = [segment for segment in segments if segment.kind is _CACHED and segment.source is None]
        if waiting:
            waiting = waiting[: store.dirty_room(waiting[0].pool)]
            for segment in waiting:
                store.become(segment, Kind.DIRTY, self._context.now)
            self._place(segments[0].tenant, waiting, "")

    def _place(self, tenant: TenantId, segments: list[Segment], request: str) -> None:
        """Choose a owner for each run: this node where neither candidate can be reached."""
        for segment in segments:
            self._asking.pop(segment, None)
        candidates = self._context.ring.candidates(join_keys(segment.key for segment in segments))
        # Nothing here changes while they are placed: asked once for each node.
        vacancies = self._vacancies(node for pair in candidates for node in pair)
        kept: list[Segment] = []
        queued: dict[NodeId, list[Segment]] = {}
        for run in runs([segment.depth for segment in segments], self._context.ring.run_length):
            chosen = segments[run.start : run.stop]
            welcome = [(node, vacancies[node]) for node in candidates[run.start] if node in vacancies]
            first = chosen[0]
            owner = choose_owner(welcome, lean_of(first.key), first.previous_owner) if welcome else self._context.node
            if owner == self._context.node:
                kept += chosen
            else:
                queued.setdefault(owner, []).extend(chosen)
        self._keep(tenant, kept)
        for owner, offered in queued.items():
            self._queues.setdefault(owner, deque()).append(_Parcel(offered, request))
            self._offer_next(owner)

    def _vacancies(self, nodes: Iterable[NodeId]) -> dict[NodeId, Vacancy]:
        """Of those that can be reached."""
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
            self._peers.call(
                owner,
                partial(
                    _offer,
                    tenant=parcel.tenant,
                    keys=join_keys(segment.key for segment in parcel.segments),
                    depths=tuple(segment.depth for segment in parcel.segments),
                    slot_bytes=parcel.slot_bytes,
                    shards=parcel.shards,
                    request=parcel.request,
                    # The newest word: one may have come since they were written.
                    hints=parcel.segments[-1].hints,
                ),
                wait,
                partial(self._answered, owner, parcel),
                proves_life=False,
            )
            if not usable:
                # Answered at once, and the next parcel's turn is armed: one at a time, since a queue may be long.
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
        self._keep(parcel.tenant, kept)
        if self._queues[owner]:
            # Not from within this reply: a owner that is down answers at once, and a long queue would recurse.
            self._context.after(0.0, lambda: self._offer_next(owner))

    def _make_cached(self, segment: Segment, owner: NodeId | None) -> None:
        self._asking.pop(segment, None)
        if segment.state is State.READY and segment.kind is Kind.DIRTY:
            segment.source = owner
            self._context.store.become(segment, Kind.CACHED, self._context.now)

    def _keep(self, tenant: TenantId, segments: list[Segment]) -> None:
        """They become primary copies where they are, if they are worth it."""
        store, now = self._context.store, self._context.now
        dirty = [s for s in segments if s.state is State.READY and s.kind is Kind.DIRTY]
        kept = []
        # From the prompt's beginning: if not all are worth it, it is what stays.
        for segment in dirty:
            if store.admits_primary(segment, now):
                kept.append(segment)
            else:
                self._make_cached(segment, None)
                segment.previous_owner = self._context.node
        for segment in reversed(kept):
            store.become(segment, Kind.PRIMARY, now)
        self._context.counters.add(KEPT, len(kept))
        self.tell_held(tenant, [segment.key for segment in kept])

    def tell_held(self, tenant: TenantId, keys: list[SegmentKey]) -> None:
        """This node keeps the primary copies of these: tell their directory nodes. Where a directory node cannot be
        told, the other
        candidate, which is asked too, stands in; the directory node is told by `Advertising` when it is back."""
        for directory_node, its_keys in self._context.by_directory_node(keys).items():
            if directory_node == self._context.node or self._peers.reachable(directory_node):
                self._tell_held(directory_node, tenant, its_keys)
                continue
            others: dict[NodeId, list[SegmentKey]] = {}
            for key, (_, other) in zip(its_keys, self._context.ring.candidates(join_keys(its_keys)), strict=True):
                others.setdefault(other, []).append(key)
            for other, stood_in in others.items():
                self._tell_held(other, tenant, stood_in)

    def _tell_held(self, directory_node: NodeId, tenant: TenantId, keys: list[SegmentKey]) -> None:
        if directory_node == self._context.node:
            self.redundant(self._directory_node.held(directory_node, tenant, keys))
        else:
            self._peers.tell(directory_node, wire.Held(tenant, join_keys(keys)))

    def lost(self, peer: Peer) -> None:
        """`peer` is gone or silent. Unless it comes back as it was, the copies here of what it keeps become directory
        node
        copies, so that they are found. Not before the directory nodes must have noticed as well: they would refuse."""
        life = peer.incarnation
        cursor: Cursor | None = Cursor()

        def work() -> bool:
            nonlocal cursor
            if cursor is None or (peer.reachable and peer.incarnation == life):
                return False
            segments, cursor = self._context.store.walk(cursor, ADOPT_SLOTS)
            self._adopt([segment for segment in segments if segment.source == peer.node])
            return cursor is not None

        self._context.after(self._peers.notices_s, lambda: self._context.in_slices(work))

    def _adopt(self, segments: list[Segment]) -> None:
        """Of these, cached copies and replicas become primary copies."""
        by_tenant: dict[TenantId, list[SegmentKey]] = {}
        # Deepest first, so that parents are evicted last.
        for segment in sorted(segments, key=lambda segment: -segment.depth):
            if segment.state is State.READY and segment.kind in (Kind.CACHED, Kind.REPLICA):
                segment.source = None
                self._context.store.become(segment, Kind.PRIMARY, self._context.now)
                by_tenant.setdefault(segment.tenant, []).append(segment.key)
        for tenant, keys in by_tenant.items():
            self.tell_held(tenant, keys)

    def redundant(self, message: wire.Redundant) -> None:
        """Another node keeps these: the copies here may go."""
        tenant = TenantId(message.tenant)
        for key, owner in zip(split_keys(message.keys), message.nodes, strict=False):
            segment = self._context.store.get(tenant, key)
            if segment is not None and segment.state is State.READY and segment.kind is Kind.PRIMARY:
                segment.source = NodeId(owner)
                self._context.store.become(segment, Kind.CACHED, self._context.now)

    def dropped(self, segment: Segment) -> None:
        """It leaves the index, perhaps before it was placed."""
        self._asking.pop(segment, None)

    # -- offers taken

    def offered(self, node: NodeId, message: wire.Offer) -> None:
        """Another node chose this one as the owner: pull, keep, tell the directory nodes, answer."""
        tenant = TenantId(message.tenant)
        keys = split_keys(message.keys)
        codes = bytearray(len(keys))
        waiting = len(keys)

        def settle(index: int, code: Code) -> None:
            nonlocal waiting
            codes[index] = code
            waiting -= 1
            if not waiting:
                held = [keys[i] for i, c in enumerate(codes) if c in (Code.COMMITTED, Code.EXISTS)]
                self.tell_held(tenant, held)
                self._tell_refused(tenant, [keys[i] for i, c in enumerate(codes) if c == Code.NOT_ADMITTED])
                vacancy, load = self._context.vacancy(), self._context.load()
                self._peers.tell(node, wire.OfferReply(message.call, bytes(codes), vacancy, load))

        def arrived(index: int, segment: Segment | None, code: Code) -> None:
            if segment is None:
                settle(index, code if code.refused else Code.LOST)
                return
            self._context.store.unpin(segment)
            if segment.kind in (Kind.CACHED, Kind.REPLICA):
                segment.source = None
                self._context.store.become(segment, Kind.PRIMARY, self._context.now)
            settle(index, Code.COMMITTED if segment.kind is Kind.PRIMARY else Code.LOST)

        wanted = [
            (key, depth, partial(arrived, index))
            for index, (key, depth) in enumerate(zip(keys, message.depths, strict=True))
        ]
        # Nobody waits for a push: it may take its time, while its offerer still waits for the answer.
        predicted = self._peers.predict_s(node, message.slot_bytes * len(keys))
        self._fetches.bring(
            node,
            tenant,
            wanted,
            kind=Kind.PRIMARY,
            slot_bytes=message.slot_bytes,
            shards=message.shards,
            wait_s=deadline_s(predicted) + OFFER_GRACE_S / 2,
            request=message.request,
            hints=message.hints,
        )

    def _tell_refused(self, tenant: TenantId, keys: list[SegmentKey]) -> None:
        """The directory nodes are told, so that these come here again, where it is remembered that they were wanted."""
        for directory_node, its_keys in self._context.by_directory_node(keys).items():
            if directory_node == self._context.node:
                self._directory_node.left(directory_node, tenant, its_keys)
            else:
                self._peers.tell(
                    directory_node, wire.Evicted(tenant, join_keys(its_keys), self._context.node, NOT_ADMITTED_RULE)
                )

    @property
    def dirty(self) -> int:
        """Segments on their way out: being asked about, queued or on offer."""
        queued = sum(len(parcel.segments) for queue in self._queues.values() for parcel in queue)
        return len(self._asking) + queued

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"asked about": len(self._asking), "queued parcels": sum(map(len, self._queues.values()))}

    def check_integrity(self) -> None:
        """AssertionError when what is asked about is not a dirty copy."""
        assert all(s.state is State.READY and s.kind is Kind.DIRTY for s in self._asking)


def _ready(call: int, *, tenant: TenantId, keys: bytes) -> wire.Ready:
    return wire.Ready(call, tenant, keys)


def _offer(
    call: int,
    *,
    tenant: TenantId,
    keys: bytes,
    depths: tuple[int, ...],
    slot_bytes: int,
    shards: int,
    request: str,
    hints: Hints,
) -> wire.Offer:
    return wire.Offer(call, tenant, keys, depths, slot_bytes, shards, request, hints)


def _ready_codes(
    answered: Callable[[bytes, Sequence[str], Sequence[str]], None], count: int, reply: Reply | None
) -> None:
    """No answer counts as COMMITTED: the segment is kept, and the directory node learns of it from the owner."""
    if isinstance(reply, wire.ReadyReply) and len(reply.codes) == count:
        answered(reply.codes, reply.firsts, reply.previous_owners)
    else:
        answered(bytes([Code.COMMITTED]) * count, (), ())
