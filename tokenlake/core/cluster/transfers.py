"""Transfers: segments of other nodes, or of a device of this node, come into slots of this node.

::

    one transfer per (segment, node), joined by every fetch that waits for the segment
        |   a receiving thread of the daemon writes into the reserved slots
        v
    published with its checksum, pinned for each waiting lease
        |   or given up at its deadline; late bytes never reach a slot that has another segment
        v
    the callback of each wanted segment is called once

Transfers that no engine waits for (hand-overs) are cut into pieces, which come one after the other.

Segments on a device of this node, or in the cold tier, are brought in the same way, from this node itself: at most
`READS` reads of a device at a time, and the others wait in a queue.

A node from which no bytes came gets no further transfer until bytes have come to a probe, a transfer of no segments
(`Peers.delivers`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cluster.probes import Probes
from tokenlake.core.cluster.transfer import ABORTED, OnArrival, Transfer
from tokenlake.core.cold_reads import COLD, ColdReads
from tokenlake.core.cold_tier import ColdTier
from tokenlake.core.context import Context, Part
from tokenlake.core.disk_reads import DiskReads
from tokenlake.core.instructions import AbortFetch, Note, StartFetch
from tokenlake.disk import NO_ENTRY
from tokenlake.hints import NO_HINTS, Hints
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, State
from tokenlake.metrics import Metric
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import join_keys

ARRIVED = Metric("tokenlake_received_segments_total", "Segments received whole from other nodes")
ARRIVED_BYTES = Metric("tokenlake_received_bytes_total", "Bytes of segments received whole from another node", "peer")
CORRUPT = Metric("tokenlake_corrupt_segments_total", "Segments whose checksum was wrong on arrival")

SETTLED = 256
"""Maximum number of segments of ended transfers that one event reports to the fetches that wait for them. Each takes up
to 5 us."""
PIECE_S, MAX_PIECE_BYTES = 0.05, 16 << 20
"""Limits of a background piece, which has at least one segment: its expected seconds, so that a read that starts
meanwhile is delayed by little more than this, and its bytes."""
LEAST_ANSWER_S = 0.025
"""Minimum seconds that a node has to answer a transfer: half of the minimum of `deadline_s`. A transfer with a shorter
deadline does not show that a node is slow."""


class Transfers(Part):
    """All transfers of segments to this node, under way or queued."""

    def __init__(
        self, context: Context, peers: Peers, tier: ColdTier, own: Callable[[TenantId, list[Segment]], None]
    ) -> None:
        """`own`: makes this node the owner of segments that came from the cold tier."""
        self._context = context
        self._peers = peers
        self._under_way: dict[int, Transfer] = {}
        """Started transfers by id."""
        self._waiters: dict[Segment, list[OnArrival]] = {}
        self._held: dict[int, list[Segment]] = {}
        """Segments that did not come, by transfer, into whose slots bytes may still come: pinned until then."""
        self._settling: dict[int, deque[tuple[Segment, Code, deque[OnArrival]]]] = {}
        """Transfers that have ended, by id: the segments whose outcome some fetches do not know yet, and the callbacks
        of these fetches. The segments that arrived stay pinned until then."""
        self._pieces = 0
        """Number of background pieces under way: one, and those that an engine has begun to wait for."""
        self._queue: dict[Transfer, None] = {}
        """Background pieces that wait for it to end, oldest first."""
        self._reads = DiskReads(context, self._begin, self._lose)
        self.cold = ColdReads(context, tier, self._begin, self._lose, own)
        self._queued: dict[Segment, Transfer] = {}
        """The queued piece of a background transfer to which each segment belongs."""
        self._probes = Probes(context, peers, self._probe)

    def delivers(self, node: NodeId) -> bool:
        """Returns True if segments can be brought from `node` now: another node that delivers, or this one, from disk
        or from the cold tier."""
        return node == self._context.node or self._peers.delivers(node)

    def predict_s(self, node: NodeId, tenant: TenantId, keys: Sequence[SegmentKey], slot_bytes: int) -> float:
        """Returns the expected seconds until these segments have come from `node`."""
        if node == self._context.node:
            return self.read_s(tenant, keys, slot_bytes)
        return self._peers.path(node).predict_s(slot_bytes * len(keys))

    def read_s(self, tenant: TenantId, keys: Sequence[SegmentKey], slot_bytes: int) -> float:
        """Returns the expected seconds until these segments are read by this node itself: those on its disk from there,
        the others from the cold tier."""
        find = self._context.disk.find
        on_disk = sum(find(tenant, key) >= 0 for key in keys)
        cold_s = self.cold.predict_s(slot_bytes * (len(keys) - on_disk))
        return max(self.disk_s(slot_bytes * on_disk) if on_disk else 0.0, cold_s)

    def disk_s(self, nbytes: int) -> float:
        """Returns the expected seconds until `nbytes` are read from this node's disk, at most `MAX_SECONDS`."""
        return self._reads.predict_s(nbytes)

    def bring(
        self,
        node: NodeId,
        tenant: TenantId,
        wanted: Sequence[tuple[SegmentKey, int, OnArrival]],
        *,
        kind: Kind,
        slot_bytes: int,
        shards: int,
        wait_s: float,
        request: str = "",
        hints: Hints | None = None,
        disk_s: float = 0.0,
        for_peer: bool = False,
        cold: bool = False,
    ) -> None:
        """Transfer segments from `node`, which may be this one (from disk), as copies of `kind`. `wanted`: (key, index
        in the prompt, callback) of each. `cold`: those that are not on disk may be read from the cold tier.

        A segment that is stored here or under way is not transferred again. The callback of a segment that gets no slot
        is called at once with the reason, that of a segment of a node that does not deliver with LOST, and that of a
        segment that a local engine is writing with PENDING. `wait_s`: seconds after which the transfer is aborted.
        CACHED copies are for an engine that waits; copies of other kinds come by background transfers. `disk_s`:
        seconds that `node` needs to read the segments from its disk. `for_peer`: see `Transfer`.
        """
        transfer = Transfer(node, tenant, kind, slot_bytes, shards, wait_s, request, for_peer=for_peer)
        transfer.asked_at, transfer.disk_s = self._context.now, disk_s
        from_disk = node == self._context.node
        cold_transfer = replace(transfer, segments=[], places=[])
        cold = cold and self.cold.tier.readable
        refused: list[tuple[OnArrival, Code]] = []
        for key, depth, on_arrival in wanted:
            known = self._context.store.get(tenant, key)
            if known is not None:
                self._join(known, on_arrival, refused)
                if known in self._queued and not transfer.background:
                    # The segment waits in the queue of background transfers, and now an engine waits for it: the
                    # queued transfer that contains it starts at once.
                    self._start_queued(self._queued[known])
                continue
            entry = self._reads.find(tenant, key, slot_bytes, shards) if from_disk else NO_ENTRY
            if entry < 0 and not cold if from_disk else not self._peers.delivers(node):
                refused.append((on_arrival, Code.LOST))
                continue
            segment = self._context.store.reserve(
                tenant,
                slot_bytes,
                key,
                kind,
                depth,
                self._context.now,
                hints or NO_HINTS,
                source=None if from_disk or kind is not Kind.CACHED else node,
                for_peer=for_peer,
            )
            if isinstance(segment, Code):
                refused.append((on_arrival, segment))
                continue
            self._waiters[segment] = [on_arrival]
            if from_disk and entry < 0:
                cold_transfer.segments.append(segment)
                continue
            if from_disk:
                note = self._context.disk.note(entry)
                self._context.store.recall(segment, note.accesses, note.hints, self._context.now)
                transfer.places.append(self._context.disk.begin_read(entry))
            transfer.segments.append(segment)
        if cold_transfer.segments:
            self.cold.add(cold_transfer)
        if transfer.segments and from_disk:
            self._reads.add(transfer)
        elif transfer.segments and transfer.background:
            self._enqueue(transfer)
        elif transfer.segments:
            self._start(transfer)
        for on_arrival, code in refused:
            on_arrival(None, code)

    def _join(self, known: Segment, on_arrival: OnArrival, refused: list[tuple[OnArrival, Code]]) -> None:
        if known in self._waiters:
            self._waiters[known].append(on_arrival)
        elif known.state is State.READY:
            self._context.store.pin(known)
            on_arrival(known, Code.LOCAL)
        else:
            # A local engine is writing the segment. It may never commit, so this fetch does not wait for it.
            refused.append((on_arrival, Code.PENDING))

    def _start(self, transfer: Transfer) -> None:
        self._pieces += transfer.background
        self._order(transfer)

    def _begin(self, transfer: Transfer, left_s: float) -> int:
        """Count a transfer as under way, to be aborted after `left_s` seconds. Returns its id."""
        fetch = self._context.next_id()
        self._under_way[fetch] = transfer
        transfer.started_at = self._context.now
        transfer.timer = self._context.after(left_s, partial(self._abort, fetch))
        return fetch

    def _order(self, transfer: Transfer) -> None:
        # Half of the time is left for another copy. A node in good health answers as soon as a ping.
        transfer.answer_s = max(LEAST_ANSWER_S, min(transfer.wait_s / 2, self._context.config.suspect_s))
        if transfer.disk_s:
            transfer.answer_s = min(transfer.wait_s, transfer.answer_s + 3 * transfer.disk_s)
        fetch = self._begin(transfer, transfer.wait_s)
        self._context.emit(
            StartFetch(
                fetch,
                transfer.node,
                transfer.tenant,
                join_keys(segment.key for segment in transfer.segments),
                b"".join(segment.packed for segment in transfer.segments),
                transfer.slot_bytes,
                transfer.shards,
                transfer.answer_s,
                transfer.request,
                background=transfer.background,
            )
        )

    def _probe(self, node: NodeId) -> None:
        self._order(Transfer(node, TenantId(""), Kind.CACHED, 0, 1, 2 * self._context.config.suspect_s, ""))

    # -- background transfers

    def _enqueue(self, transfer: Transfer) -> None:
        """Queue a background transfer in pieces, so that a fetch that starts next waits for one piece at most."""
        slot_s = self._peers.path(transfer.node).predict_s(transfer.slot_bytes)
        size = max(1, min(MAX_PIECE_BYTES // transfer.slot_bytes, int(PIECE_S / slot_s)))
        for start in range(0, len(transfer.segments), size):
            piece = replace(transfer, segments=transfer.segments[start : start + size])
            piece.timer = self._context.after(transfer.wait_s, partial(self._drop_queued, piece))
            self._queue[piece] = None
            self._queued.update(dict.fromkeys(piece.segments, piece))
        self._start_allowed()

    def _start_allowed(self) -> None:
        while self._queue and not self._pieces:
            self._start_queued(next(iter(self._queue)))

    def _start_queued(self, piece: Transfer) -> None:
        self._unqueue(piece)
        if piece.timer is not None:
            piece.timer.cancel()
        self._start(piece)

    def _unqueue(self, piece: Transfer) -> None:
        del self._queue[piece]
        for segment in piece.segments:
            del self._queued[segment]

    def _drop_queued(self, piece: Transfer) -> None:
        """Drop a queued piece of a background transfer that waited too long: the node that offered its segments has
        given up."""
        self._unqueue(piece)
        self._lose(piece)

    def _lose(self, transfer: Transfer) -> None:
        """Give up a transfer that has not started."""
        for segment in transfer.segments:
            self._context.store.unpin(segment)
            self._context.store.discard(segment, self._context.now)
        for segment in transfer.segments:
            for on_arrival in self._waiters.pop(segment):
                on_arrival(None, Code.LOST)

    # -- ends

    def _abort(self, fetch: int) -> None:
        transfer = self._under_way[fetch]
        self._context.emit(AbortFetch(fetch))
        if not transfer.segments:
            return
        self._context.counters.add(ABORTED)
        transfer.aborted = True
        if transfer.device is None:
            self._peers.missed_deadline(transfer.node, transfer.nbytes, transfer.started_at)
        self._note(transfer, "missed its deadline")

    def _note(self, transfer: Transfer, event: str) -> None:
        request = f" for request {transfer.request!r}" if transfer.request else ""
        device = "the cold tier" if transfer.device == COLD else f"disk {transfer.device}"
        source = transfer.node if transfer.device is None else device
        text = f"a fetch of {len(transfer.segments)} segments from {source}{request}: {event}"
        self._context.emit(Note(text, "fetch"))

    def settled(self, fetch: int) -> None:
        """Free the slots of a transfer into which bytes could still come when it was done."""
        self._context.store.unpin(*self._held.pop(fetch))

    def done(
        self,
        fetch: int,
        codes: bytes,
        checksums: bytes,
        answered: bool | None,
        held: bytes = b"",
        notes: bytes = b"",
    ) -> None:
        """Handle the end of a transfer, whose receiving thread has returned: publish the segments that arrived and that
        no order has evicted meanwhile, free the slots of the others, and call the callbacks that wait for them.
        `answered`, `held`, `notes`: see `FetchDone`."""
        transfer = self._under_way.pop(fetch)
        assert len(codes) == len(transfer.segments)
        assert len(checksums) == CHECKSUM_BYTES * transfer.shards * len(codes)
        if transfer.timer is not None:
            transfer.timer.cancel()
        if answered and transfer.device is None:
            self._peers.path_answered(transfer.node)
        if not transfer.segments:
            self._probes.ended(transfer.node)
            return
        if answered is False and transfer.device is None:
            waited_s = min(transfer.answer_s, self._context.now - transfer.started_at)
            deaths = self._peers.path_silent(transfer.node, transfer.started_at, waited_s)
            if deaths:
                self._probes.doubt(transfer.node, deaths)
        store = self._context.store
        size = len(checksums) // len(codes)
        arrived: list[Segment] = []
        # An operator may have evicted some meanwhile.
        outcome = [
            Code.LOST if segment.state is State.GONE else Code(code)
            for segment, code in zip(transfer.segments, codes, strict=True)
        ]
        for index, segment in enumerate(transfer.segments):
            if outcome[index] is Code.LOCAL:
                store.publish(segment, checksums[index * size : (index + 1) * size], self._context.now)
                arrived.append(segment)
            else:
                if held and held[index]:
                    self._held.setdefault(fetch, []).append(segment)
                else:
                    store.unpin(segment)
                store.discard(segment, self._context.now)
        if transfer.device == COLD:
            self.cold.ended(transfer, codes, notes)
        elif transfer.device is not None:
            self._reads.ended(transfer, codes)
        else:
            self._received(transfer, codes, len(arrived) * transfer.slot_bytes)
        store.touch(arrived, self._context.now, for_peer=transfer.for_peer)
        waiters = (deque(self._waiters.pop(segment)) for segment in transfer.segments)
        outcomes = deque(zip(transfer.segments, outcome, waiters, strict=True))
        self._settling[fetch] = outcomes
        self._context.in_steps(lambda: self._settle(fetch, outcomes))
        self._start_allowed()

    def _settle(self, fetch: int, outcomes: deque[tuple[Segment, Code, deque[OnArrival]]]) -> bool:
        """Call the next `SETTLED` callbacks that wait for segments of a transfer that has ended. Returns True if some
        are left: many fetches may wait for the same transfer."""
        store, room = self._context.store, SETTLED
        while outcomes:
            segment, code, waiters = outcomes[0]
            while waiters:
                if not room:
                    return True
                room -= 1
                on_arrival = waiters.popleft()
                if code is Code.LOCAL:
                    store.pin(segment)
                    on_arrival(segment, code)
                else:
                    on_arrival(None, code)
            outcomes.popleft()
            if code is Code.LOCAL:
                store.unpin(segment)
        del self._settling[fetch]
        return False

    def _received(self, transfer: Transfer, codes: bytes, nbytes: int) -> None:
        """A transfer from another node has ended, by which `nbytes` came in whole segments. Tells the sender which
        segments arrived with wrong bytes: it checks its copies, and drops those that were wrong before they were
        sent."""
        self._pieces -= transfer.background
        self._context.counters.add(ARRIVED, codes.count(Code.LOCAL))
        self._context.counters.add_for(ARRIVED_BYTES, nbytes, transfer.node)
        if nbytes and not transfer.disk_s:
            # The rate of a node that reads from its disk first is not that of the network.
            self._peers.path(transfer.node).measured(nbytes, self._context.now - transfer.started_at)
        keys = [s.key for s, code in zip(transfer.segments, codes, strict=True) if code == Code.BAD_CHECKSUM]
        if not keys:
            return
        self._context.counters.add(CORRUPT, len(keys))
        self._note(transfer, f"{len(keys)} arrived with a wrong checksum")
        self._peers.tell(transfer.node, wire.Corrupt(transfer.tenant, join_keys(keys)))

    def pinned(self) -> Iterator[Segment]:
        for transfer in (*self._under_way.values(), *self._queue, *self._reads.waiting(), *self.cold.waiting()):
            yield from transfer.segments
        for outcomes in self._settling.values():
            yield from (segment for segment, code, _ in outcomes if code is Code.LOCAL)
        yield from itertools.chain.from_iterable(self._held.values())

    def census(self) -> dict[str, int]:
        return {
            "transfers": len(self._under_way) - self._probes.under_way,
            "probes": self._probes.under_way,
            "queued transfers": len(self._queue),
            "segments in transfer": len(self._waiters),
            "transfers that end": len(self._settling),
            "transfers that hold slots": len(self._held),
        }

    def check_integrity(self) -> None:
        assert self._probes.under_way == sum(not transfer.segments for transfer in self._under_way.values())
        transfers = (*self._under_way.values(), *self._queue, *self._reads.waiting(), *self.cold.waiting())
        segments = [segment for transfer in transfers for segment in transfer.segments]
        self._reads.check_integrity()
        self.cold.check_integrity()
        assert all(self._settling.values())
        assert len(segments) == len(set(segments)) == len(self._waiters)
        assert all(segment in self._waiters for segment in segments)
        assert self._queued == {segment: piece for piece in self._queue for segment in piece.segments}
