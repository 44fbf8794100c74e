"""Transfers: segments of other nodes, or of a device of this node, come into slots of this node.

::

    one transfer per (segment, node), joined by every fetch that waits for the segment
        |   a receiving thread of the daemon writes into the reserved slots
        v
    published with its checksum, pinned for each waiting lease
        |   or given up at its deadline; late bytes never reach a slot that has another segment
        v
    the callback of each wanted segment is called once

Transfers that no engine waits for (hand-overs) are cut into pieces and limited to a share of all received bytes
(`BackgroundLimit`).

Segments on a device of this node are brought in the same way, from this node itself: at most `READS` reads of a device
at a time, and the others wait in a queue.

A node from which no bytes came gets no further transfer until bytes have come to a probe, a transfer of no segments
(`Peers.delivers`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context
from tokenlake.core.instructions import AbortFetch, DiskRead, Note, StartFetch
from tokenlake.disk import NO_ENTRY, Place, pack_places
from tokenlake.disk.reads import READ_BYTES, READ_SEGMENTS, ReadQueue
from tokenlake.disk.tier import Slab
from tokenlake.hints import NO_HINTS, Hints
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, State
from tokenlake.memory.removals import DISK_DAMAGED_RULE, DISK_GONE_RULE, Removal
from tokenlake.metrics import Metric
from tokenlake.timers import Timer
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.checks import KNOWN_CODES
from tokenlake.wire.fields import CHECKSUM_BYTES, MAX_SECONDS
from tokenlake.wire.slots import join_keys

ARRIVED = Metric("tokenlake_received_segments_total", "Segments received whole from other nodes")
ARRIVED_BYTES = Metric("tokenlake_received_bytes_total", "Bytes of segments received whole from other nodes")
CORRUPT = Metric("tokenlake_corrupt_segments_total", "Segments whose checksum was wrong on arrival")
READ = Metric("tokenlake_disk_read_segments_total", "Segments read back from disk whole", "tenant")
READ_BACK_BYTES = Metric("tokenlake_disk_read_bytes_total", "Bytes of segments read back from disk whole", "tenant")
READ_SECONDS = Metric(
    "tokenlake_disk_read_seconds",
    "Time from the request to the end of a read from disk, its wait included",
    kind="histogram",
)
DAMAGED = Metric(
    "tokenlake_disk_damaged_segments_total", "Segments on disk whose bytes were wrong or could not be read"
)
ABORTED = Metric("tokenlake_aborted_fetches_total", "Transfers that missed their deadline")

MAX_DEADLINE_S = 60.0
"""Maximum deadline in seconds that a client may set for a fetch."""
SETTLED = 256
"""Maximum number of segments of ended transfers that one event reports to the fetches that wait for them. Each takes up
to 5 us."""
MAX_PIECES = 2
"""Maximum number of pieces of background transfers under way at a time: half of a daemon's receiving threads, since a
large piece takes two."""
PIECE_S = 0.05
"""Expected duration of a background piece: a read that starts meanwhile is delayed by little more than this."""
MAX_PIECE_BYTES = 16 << 20
LEAST_ANSWER_S = 0.025
"""Minimum seconds that a node has to answer a transfer: half of the minimum of `deadline_s`. A transfer with a shorter
deadline does not show that a node is slow."""
MAX_PROBES = 2
"""Maximum number of probes under way at a time: a probe that is not answered takes a receiving thread."""
LONGEST_PAUSE_S = 10.0
"""Maximum pause before a probe. A node that answers probes and delivers no segment costs one fetch in each such
pause."""
MAX_CREDIT = 64 << 20
"""Maximum number of bytes of background transfers for which fetches of engines earn credit in advance (see
`BackgroundLimit`)."""

CopiesOf = Callable[[TenantId, Sequence[SegmentKey]], list[list[NodeId]]]
"""For each segment, the other nodes that may have a copy of it and deliver segments, the likeliest first."""
OnArrival = Callable[[Segment | None, Code], None]
"""Called once per wanted segment: with the segment, pinned for the caller, and LOCAL; or with None and the reason."""


def deadline_s(predicted_s: float) -> float:
    """Returns the seconds after which a transfer is given up: three times the predicted time plus 50 ms."""
    return predicted_s * 3 + 0.050


class BackgroundLimit:
    """Limits background transfers (hand-overs) to a share of the received bytes while engines fetch.

    While no engine fetches, only the number of background transfers is limited. While engines fetch, each byte that
    they fetch earns credit, which a background transfer spends.
    """

    def __init__(self, share: float) -> None:
        """`share` of all received bytes, in (0, 1)."""
        self._credit_per_byte = share / (1 - share)
        self._credit = 0.0
        self._fetches = 0
        self._pieces = 0

    def piece_segments(self, slot_bytes: int, slot_s: float) -> int:
        """Returns how many segments one piece of a background transfer has, at least 1. `slot_s`: expected seconds to
        transfer one segment of `slot_bytes`."""
        return max(1, min(MAX_PIECE_BYTES // slot_bytes, int(PIECE_S / slot_s)))

    def allows(self, nbytes: int) -> bool:
        """Returns True if a piece of `nbytes` of a background transfer may start now."""
        # A single segment may be larger than the maximum credit.
        return self._pieces < MAX_PIECES and (not self._fetches or self._credit >= min(nbytes, MAX_CREDIT))

    def started(self, nbytes: int, *, background: bool) -> None:
        """Count a transfer of `nbytes` that starts. `background`: no engine waits for it."""
        if background:
            self._pieces += 1
            credit = self._credit - nbytes
            self._credit = credit if self._fetches else max(0.0, credit)
        else:
            self._fetches += 1
            self._credit = min(MAX_CREDIT, self._credit + nbytes * self._credit_per_byte)

    def ended(self, *, background: bool) -> None:
        """Count the end of a transfer that had started, whatever its outcome."""
        if background:
            self._pieces -= 1
        else:
            self._fetches -= 1


@dataclass(eq=False)
class Transfer:
    """One transfer of segments from another node, or from a device of this node, into reserved slots of this node. The
    slots stay pinned until the receiving thread has returned."""

    node: NodeId
    tenant: TenantId
    kind: Kind
    slot_bytes: int
    shards: int
    wait_s: float
    """Seconds after which the transfer is aborted, or dropped from the queue of background transfers."""
    request: str
    """Name of the engine's request, for the log; empty for none."""
    segments: list[Segment] = field(default_factory=list)
    timer: Timer | None = None
    asked_at: float = 0.0
    """Time in seconds at which the transfer was asked for."""
    started_at: float = 0.0
    answer_s: float = 0.0
    """Seconds that the node has for its first bytes; see `StartFetch`."""
    disk_s: float = 0.0
    """Seconds that the node needs to read the segments from its disk."""
    device: int | None = None
    """The device of this node from which the segments are read; None: they come from another node."""
    places: list[tuple[Slab, int]] = field(default_factory=list)
    """The places of the segments on the device."""
    aborted: bool = False

    @property
    def background(self) -> bool:
        """True if no engine waits for the segments."""
        return self.kind is not Kind.CACHED

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * len(self.segments)


class Transfers:
    """All transfers of segments to this node, under way or queued."""

    def __init__(self, context: Context, peers: Peers) -> None:
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
        self._limit = BackgroundLimit(context.config.background_share)
        self._queue: dict[Transfer, None] = {}
        """Background pieces that the limit holds back, oldest first."""
        self._reads: ReadQueue[Transfer] = ReadQueue(context.disk.devices)
        self._read_seconds = context.counters.histogram(READ_SECONDS)
        self._queued: dict[Segment, Transfer] = {}
        """The queued piece of a background transfer to which each segment belongs."""
        self._doubted: set[NodeId] = set()
        """Nodes whose bulk path counts as dead because transfers were not answered. They are probed until they
        answer."""
        self._to_probe: dict[NodeId, None] = {}
        """The nodes of `_doubted` whose next probe is due and has not started."""
        self._probes = 0
        """Number of probes under way."""

    def delivers(self, node: NodeId) -> bool:
        """Returns True if segments can be brought from `node` now: another node that delivers, or this one, from
        disk."""
        return node == self._context.node or self._peers.delivers(node)

    def predict_s(self, node: NodeId, nbytes: int) -> float:
        """Returns the expected seconds until `nbytes` have come from `node`."""
        return self._reads.predict_s(nbytes) if node == self._context.node else self._peers.predict_s(node, nbytes)

    def disk_s(self, nbytes: int) -> float:
        """Returns the expected seconds until `nbytes` are read from this node's disk, at most `MAX_SECONDS`."""
        return min(MAX_SECONDS, self._reads.predict_s(nbytes))

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
    ) -> None:
        """Transfer segments from `node`, which may be this one (from disk), as copies of `kind`. `wanted`: (key, index
        in the prompt, callback) of each.

        A segment that is stored here or under way is not transferred again. The callback of a segment that gets no slot
        is called at once with the reason, that of a segment of a node that does not deliver with LOST, and that of a
        segment that a local engine is writing with PENDING. `wait_s`: seconds after which the transfer is aborted.
        CACHED copies are for an engine that waits; copies of other kinds come by background transfers. `disk_s`:
        seconds that `node` needs to read the segments from its disk.
        """
        transfer = Transfer(node, tenant, kind, slot_bytes, shards, wait_s, request)
        transfer.asked_at, transfer.disk_s = self._context.now, disk_s
        from_disk = node == self._context.node
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
            entry = self._on_disk(tenant, key, slot_bytes, shards) if from_disk else NO_ENTRY
            if entry < 0 if from_disk else not self._peers.delivers(node):
                refused.append((on_arrival, Code.LOST))
                continue
            segment = self._context.store.reserve(
                tenant, slot_bytes, key, kind, depth, self._context.now, hints or NO_HINTS
            )
            if isinstance(segment, Code):
                refused.append((on_arrival, segment))
                continue
            if from_disk:
                self._recall(segment, entry)
                transfer.places.append(self._context.disk.begin_read(entry))
            else:
                segment.source = node if kind is Kind.CACHED else None
            self._waiters[segment] = [on_arrival]
            transfer.segments.append(segment)
        if transfer.segments and from_disk:
            self._read(transfer)
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
        self._limit.started(transfer.nbytes, background=transfer.background)
        self._order(transfer)

    def _order(self, transfer: Transfer) -> None:
        fetch = self._context.next_id()
        self._under_way[fetch] = transfer
        # Half of the time is left for another copy. A node in good health answers as soon as a ping.
        transfer.answer_s = max(LEAST_ANSWER_S, min(transfer.wait_s / 2, self._context.config.suspect_s))
        if transfer.disk_s:
            transfer.answer_s = min(transfer.wait_s, transfer.answer_s + 3 * transfer.disk_s)
        transfer.started_at = self._context.now
        transfer.timer = self._context.after(transfer.wait_s, lambda: self._abort(fetch))
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

    # -- reads from disk

    def _on_disk(self, tenant: TenantId, key: SegmentKey, slot_bytes: int, shards: int) -> int:
        """Returns the entry of a segment on disk, if it has this size and number of shards."""
        disk = self._context.disk
        entry = disk.find(tenant, key)
        fits = entry >= 0 and disk.slab(entry).slot_bytes == slot_bytes and disk.shards(entry) == shards
        return entry if fits else NO_ENTRY

    def _recall(self, segment: Segment, entry: int) -> None:
        """Give the segment, which is about to be read back, the hints and the count of accesses in its note on disk."""
        note = self._context.disk.note(entry)
        segment.hints = segment.hints.merged_over(note.hints)
        pool = self._context.store.pool(segment.tenant, segment.slot_bytes)
        if pool is not None:
            pool.retention.recall(segment.key, note.accesses, note.hints, self._context.now)

    def _read(self, transfer: Transfer) -> None:
        """Queue reads from disk into the slots that are reserved for the segments, one or more reads for each device of
        the disk tier."""
        pieces: dict[int, Transfer] = {}
        most = max(1, min(READ_SEGMENTS, READ_BYTES // transfer.slot_bytes))
        for segment, place in zip(transfer.segments, transfer.places, strict=True):
            device = place[0].device.number
            piece = pieces.get(device)
            if piece is None or len(piece.segments) == most:
                piece = pieces[device] = replace(transfer, segments=[], places=[], device=device)
                piece.timer = self._context.after(transfer.wait_s, partial(self._drop_read, piece))
                self._reads.add(device, piece, 0)
            piece.segments.append(segment)
            piece.places.append(place)
            self._reads.grow(device, piece, transfer.slot_bytes)
        for device in pieces:
            self._start_reads(device)

    def _start_reads(self, device: int) -> None:
        while (read := self._reads.take(device)) is not None:
            if read.timer is not None:
                read.timer.cancel()
            fetch = self._context.next_id()
            self._under_way[fetch] = read
            read.started_at = self._context.now
            left_s = max(0.0, read.asked_at + read.wait_s - read.started_at)
            read.timer = self._context.after(left_s, partial(self._abort, fetch))
            places = (Place(slot, slab.generations[slot]) for slab, slot in read.places)
            self._context.emit(
                DiskRead(
                    fetch,
                    device,
                    read.tenant,
                    read.slot_bytes,
                    read.shards,
                    join_keys(segment.key for segment in read.segments),
                    b"".join(segment.packed for segment in read.segments),
                    pack_places(places),
                    read.request,
                )
            )

    def _drop_read(self, read: Transfer) -> None:
        """Drop a read that waited for its device until its deadline."""
        assert read.device is not None
        self._reads.drop(read.device, read)
        self._context.counters.add(ABORTED)
        self._end_places(read)
        self._lose(read)

    def _end_places(self, read: Transfer) -> None:
        for slab, slot in read.places:
            self._context.disk.end_read(slab, slot, self._context.now)

    def _read_ended(self, read: Transfer, codes: bytes) -> None:
        """Handle the end of a read from a device. A segment whose bytes were wrong, or that the device could not read,
        leaves the disk. After a read that was aborted at its deadline, the segments that were not read stay on disk."""
        assert read.device is not None
        disk, counters = self._context.disk, self._context.counters
        whole = codes.count(Code.LOCAL) == len(codes)
        self._reads.ended(read.device, read.nbytes, self._context.now - read.started_at, whole)
        self._read_seconds.add(self._context.now - read.asked_at)
        for (slab, slot), segment, code in zip(read.places, read.segments, codes, strict=True):
            if code == Code.LOST and slab.void:
                self._context.removals.add(read.tenant, segment.key, Removal(self._context.now, DISK_GONE_RULE))
            elif code == Code.BAD_CHECKSUM or (code == Code.LOST and not read.aborted):
                counters.add(DAMAGED)
                disk.forget_place(slab, slot, DISK_DAMAGED_RULE)
                if code == Code.BAD_CHECKSUM:
                    self._context.store.found_corrupt(segment.tenant, segment.key)
        self._end_places(read)
        arrived = codes.count(Code.LOCAL)
        counters.add_for(READ, arrived, read.tenant)
        counters.add_for(READ_BACK_BYTES, arrived * read.slot_bytes, read.tenant)
        self._start_reads(read.device)

    # -- probes

    def _doubt(self, node: NodeId, pause_s: float) -> None:
        """Probe `node` after `pause_s`, and again until it answers."""
        if node not in self._doubted:
            self._doubted.add(node)
            self._probe_in(node, pause_s)

    def _probe_in(self, node: NodeId, seconds: float) -> None:
        def due() -> None:
            self._to_probe[node] = None
            self._start_probes()

        self._context.after(seconds, due)

    def _start_probes(self) -> None:
        while self._to_probe and self._probes < MAX_PROBES:
            node = next(iter(self._to_probe))
            del self._to_probe[node]
            if self._peers.bulk_alive(node):
                self._doubted.discard(node)
            elif not self._peers.usable(node):
                self._probe_in(node, self._context.config.gossip_s)
            else:
                self._probes += 1
                self._order(Transfer(node, TenantId(""), Kind.CACHED, 0, 1, 2 * self._context.config.suspect_s, ""))

    def _probed(self, node: NodeId) -> None:
        self._probes -= 1
        if self._peers.bulk_alive(node):
            self._doubted.discard(node)
        else:
            self._probe_in(node, self._context.config.gossip_s)
        self._start_probes()

    # -- background transfers

    def _enqueue(self, transfer: Transfer) -> None:
        """Queue a background transfer in pieces, so that a fetch that starts next waits for one piece at most."""
        slot_s = self._peers.predict_s(transfer.node, transfer.slot_bytes)
        size = self._limit.piece_segments(transfer.slot_bytes, slot_s)
        for start in range(0, len(transfer.segments), size):
            piece = replace(transfer, segments=transfer.segments[start : start + size])
            piece.timer = self._context.after(transfer.wait_s, partial(self._drop_queued, piece))
            self._queue[piece] = None
            self._queued.update(dict.fromkeys(piece.segments, piece))
        self._start_allowed()

    def _start_allowed(self) -> None:
        while self._queue:
            piece = next(iter(self._queue))
            if not self._limit.allows(piece.nbytes):
                return
            self._start_queued(piece)

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
            self._peers.silent_since(transfer.node, transfer.started_at)
            self._peers.missed(transfer.node, transfer.nbytes, self._context.now - transfer.started_at)
        self._note(transfer, "missed its deadline")

    def _note(self, transfer: Transfer, event: str) -> None:
        request = f" for request {transfer.request!r}" if transfer.request else ""
        source = transfer.node if transfer.device is None else f"disk {transfer.device}"
        text = f"a fetch of {len(transfer.segments)} segments from {source}{request}: {event}"
        self._context.emit(Note(text, "fetch"))

    def check_done(self, fetch: int, codes: bytes, checksums: bytes, held: bytes) -> None:
        """Raises `ValueError` when no such transfer is under way, or its result has the wrong size or codes. Changes
        nothing."""
        transfer = self._under_way.get(fetch)
        if transfer is None:
            raise ValueError(f"fetch {fetch} is not under way")
        count = len(transfer.segments)
        if len(codes) != count or codes.translate(None, KNOWN_CODES):
            raise ValueError(f"fetch {fetch} of {count} segments ended with the codes {codes.hex()}")
        if held and (
            len(held) != count or any(flag and code == Code.LOCAL for flag, code in zip(held, codes, strict=True))
        ):
            raise ValueError(f"fetch {fetch} of {count} segments with codes {codes.hex()} holds {held.hex()}")
        if len(checksums) != CHECKSUM_BYTES * transfer.shards * count:
            raise ValueError(
                f"fetch {fetch} of {count} segments of {transfer.shards} shards ended with {len(checksums)} bytes of "
                "checksums"
            )

    def check_settled(self, fetch: int) -> None:
        """Raises `ValueError` when the transfer holds no slots. Changes nothing."""
        if fetch not in self._held:
            raise ValueError(f"fetch {fetch} holds no slots")

    def settled(self, fetch: int) -> None:
        """Free the slots of a transfer into which bytes could still come when it was done."""
        self._context.store.unpin(*self._held.pop(fetch))

    def done(self, fetch: int, codes: bytes, checksums: bytes, answered: bool | None, held: bytes = b"") -> None:
        """Handle the end of a transfer, whose receiving thread has returned: publish the segments that arrived, free
        the slots of the others, and call the callbacks that wait for them. `answered`, `held`: see `FetchDone`."""
        transfer = self._under_way.pop(fetch)
        if transfer.timer is not None:
            transfer.timer.cancel()
        if answered and transfer.device is None:
            self._peers.bulk_answered(transfer.node)
        if not transfer.segments:
            self._probed(transfer.node)
            return
        if answered is False and transfer.device is None:
            waited_s = min(transfer.answer_s, self._context.now - transfer.started_at)
            times = self._peers.bulk_silent(transfer.node, transfer.started_at, waited_s)
            if times:
                pause_s = self._context.config.gossip_s * (2.0 ** min(times - 1, 16) - 1)
                self._doubt(transfer.node, min(pause_s, LONGEST_PAUSE_S))
        store = self._context.store
        size = len(checksums) // len(codes)
        arrived: list[Segment] = []
        for index, segment in enumerate(transfer.segments):
            if codes[index] == Code.LOCAL:
                store.publish(segment, checksums[index * size : (index + 1) * size], self._context.now)
                arrived.append(segment)
            else:
                if held and held[index]:
                    self._held.setdefault(fetch, []).append(segment)
                else:
                    store.unpin(segment)
                store.discard(segment, self._context.now)
        if transfer.device is not None:
            self._read_ended(transfer, codes)
        else:
            self._received(transfer, codes, len(arrived) * transfer.slot_bytes)
        store.touch(arrived, self._context.now)
        waiters = (deque(self._waiters.pop(segment)) for segment in transfer.segments)
        outcomes = deque(zip(transfer.segments, map(Code, codes), waiters, strict=True))
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
        self._limit.ended(background=transfer.background)
        self._context.counters.add(ARRIVED, codes.count(Code.LOCAL))
        self._context.counters.add(ARRIVED_BYTES, nbytes)
        if nbytes and not transfer.disk_s:
            # The rate of a node that reads from its disk first is not that of the network.
            self._peers.measured(transfer.node, nbytes, self._context.now - transfer.started_at)
        keys = [s.key for s, code in zip(transfer.segments, codes, strict=True) if code == Code.BAD_CHECKSUM]
        if not keys:
            return
        self._context.counters.add(CORRUPT, len(keys))
        self._note(transfer, f"{len(keys)} arrived with a wrong checksum")
        for key in keys:
            self._context.store.found_corrupt(transfer.tenant, key)
        self._peers.tell(transfer.node, wire.Corrupt(transfer.tenant, join_keys(keys)))

    def pinned(self) -> Iterator[Segment]:
        """Yields a segment once for each pin that transfers hold on it; for integrity checks."""
        for transfer in (*self._under_way.values(), *self._queue, *self._reads):
            yield from transfer.segments
        for outcomes in self._settling.values():
            yield from (segment for segment, code, _ in outcomes if code is Code.LOCAL)
        yield from itertools.chain.from_iterable(self._held.values())

    def census(self) -> dict[str, int]:
        """How many transfers and segments in transfer this node keeps, by kind: for gauges, and for tests that look for
        leaks."""
        return {
            "transfers": len(self._under_way) - self._probes,
            "probes": self._probes,
            "queued transfers": len(self._queue),
            "segments in transfer": len(self._waiters),
            "transfers that end": len(self._settling),
            "transfers that hold slots": len(self._held),
        }

    def check_integrity(self) -> None:
        """Raises AssertionError when a segment belongs to no transfer or to two, or the count of probes is wrong."""
        assert self._probes == sum(not transfer.segments for transfer in self._under_way.values())
        transfers = (*self._under_way.values(), *self._queue, *self._reads)
        segments = [segment for transfer in transfers for segment in transfer.segments]
        self._reads.check_integrity()
        assert all(self._settling.values())
        assert len(segments) == len(set(segments)) == len(self._waiters)
        assert all(segment in self._waiters for segment in segments)
        assert self._queued == {segment: piece for piece in self._queue for segment in piece.segments}
