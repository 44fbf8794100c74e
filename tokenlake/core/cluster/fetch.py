"""Reading a lease: the segments that lie at other nodes are fetched into slots of this node.

::

    engine: Fetch of a range of a lease
        |   `LeaseReads`: which items are at which node, how many slots the session may still hold, the deadline
        v
    `Transfers`: one transfer per (segment, node), joined by every fetch that waits for the segment
        |   a receiving thread of the daemon writes into the reserved slots
        v
    published with its checksum, pinned for each waiting lease -> Fetched
        |   wrong checksum, or the node does not answer: other owners are asked within the same deadline
        v
    answered at the latest at the deadline; late bytes never reach a slot that has another segment

Transfers that no engine waits for (hand-overs) are cut into pieces and limited to a share of all received bytes
(`BackgroundLimit`).

Segments on a device of this node are brought in the same way, from this node itself: `Transfers` reads them back, at
most `READS` reads of a device at a time, and the others wait in a queue.

A node from which no bytes came gets no further transfer until bytes have come to a probe, a transfer of no segments
(`Peers.delivers`).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context
from tokenlake.core.engines.access import Touches, with_access
from tokenlake.core.engines.grants import PIECE, Grants, Lease, pack
from tokenlake.core.engines.sessions import Process
from tokenlake.core.instructions import AbortFetch, Answer, DiskRead, Note, StartFetch
from tokenlake.disk import NO_ENTRY, Place, pack_places
from tokenlake.disk.reads import READ_BYTES, READ_SEGMENTS, ReadQueue
from tokenlake.disk.slab import Slab
from tokenlake.hints import NO_ACCESS, NO_HINTS, Hints
from tokenlake.identity import LeaseId, NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, State
from tokenlake.memory.removals import DISK_DAMAGED_RULE, DISK_GONE_RULE
from tokenlake.metrics import Metric
from tokenlake.timers import Timer
from tokenlake.wire import Code, engine
from tokenlake.wire import peer as wire
from tokenlake.wire.checks import KNOWN_CODES
from tokenlake.wire.fields import CHECKSUM_BYTES, MAX_SECONDS
from tokenlake.wire.funnel import MissReason
from tokenlake.wire.slots import join_keys, split_keys

FETCH_SECONDS = Metric(
    "tokenlake_fetch_seconds",
    "Time from a fetch request to its answer, of fetches of segments at other nodes or on disk",
    kind="histogram",
)
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

MAX_RANGE = 1 << 16
"""Maximum number of codes in the answer to a fetch of a lease that does not exist."""
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
                tenant,
                slot_bytes,
                key,
                kind,
                depth,
                self._context.now,
                hints or NO_HINTS,
                source=None if from_disk or kind is not Kind.CACHED else node,
            )
            if isinstance(segment, Code):
                refused.append((on_arrival, segment))
                continue
            if from_disk:
                note = self._context.disk.note(entry)
                self._context.store.recall(segment, note.accesses, note.hints, self._context.now)
                transfer.places.append(self._context.disk.begin_read(entry))
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
                self._context.removals.add(read.tenant, segment.key, self._context.now, DISK_GONE_RULE)
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


class _Fetch:
    """One `Fetch` request of an engine: a range of items of a lease, and the items that have not arrived yet."""

    def __init__(self, process: Process, lease: Lease, request: engine.Fetch, now: float) -> None:
        self.process = process
        self.lease = lease
        self.request = request
        self.codes = bytearray(lease.code(index) for index in range(request.start, request.stop))
        self.awaited: Counter[NodeId] = Counter()
        """Number of items that are requested from each node and have not come."""
        self.timer: Timer | None = None
        self.answered = False
        self.began = self.until = now
        """Times in seconds of the request and of its deadline."""
        self.tried: dict[int, list[NodeId]] = {}
        """The nodes that did not bring an item, by index of the item; the first one is the node that leased it."""
        self.wrong: set[int] = set()
        """Indices of items that arrived with a wrong checksum."""
        self.not_asked: set[int] = set()
        """Indices of items whose leasing node was not asked, since it does not deliver now. They stay leased there."""
        self.failed: list[int] = []
        """Indices of items that did not come and are still to be requested from another node."""

    def set_code(self, index: int, code: Code) -> None:
        """Set the code that the answer gives for item `index` of the lease."""
        self.codes[index - self.request.start] = code


class LeaseReads:
    """Handles the requests of local engines about the segments that they lease: Attach, Locate, Hint, Release and
    Fetch."""

    def __init__(
        self,
        context: Context,
        grants: Grants,
        peers: Peers,
        transfers: Transfers,
        touches: Touches,
        copies_of: CopiesOf,
    ) -> None:
        self._context = context
        self._grants = grants
        self._peers = peers
        self._transfers = transfers
        self._touches = touches
        self._copies_of = copies_of
        self._seconds = context.counters.histogram(FETCH_SECONDS)

    # -- the lease

    def attach(self, process: Process, request: engine.Attach) -> None:
        """Let another process of the session hold a lease as well. The answer has the items that any process still
        holds; none if the lease has ended, or a limit of the session (bytes of its leases, processes of a lease) is
        reached."""
        session = process.session
        lease = session.leases.get(LeaseId(request.lease))
        if lease is None or not self._grants.attach_lease(session, lease, process.connection):
            reply = engine.Matched(request.id, 0, 0, b"", b"", b"")
        else:
            codes = bytes(lease.code(index) for index in range(len(lease.keys)))
            packed = pack(lease.readable(0, len(codes)), session.shards, checksums=request.checksums)
            reply = engine.Matched(request.id, lease.id, len(codes), codes, *packed)
        self._context.emit(Answer(process.connection, reply))

    def where(self, process: Process, request: engine.Locate) -> None:
        """Answer with the node of each segment of a lease, from the first on; the answer ends before the first lost
        segment."""
        lease = process.session.leases.get(LeaseId(request.lease))
        if lease is None:
            self._context.emit(Answer(process.connection, engine.Located(request.id, (), b"")))
            return
        here, nodes, owners = self._context.node, dict[NodeId, int](), bytearray()
        for segment, remote in zip(lease.readable(0, len(lease.keys)), lease.remotes, strict=True):
            if segment is not None:
                owners.append(engine.HERE)
            elif remote is not None and (remote in nodes or len(nodes) < engine.HERE):
                owners.append(nodes.setdefault(remote, len(nodes)))
            else:
                break
        times = dict(lease.disk_s)
        if here in nodes:
            nbytes = owners.count(nodes[here]) * process.session.slot_bytes
            times[here] = self._transfers.disk_s(nbytes)
        disk_s = tuple(times.get(node, 0.0) for node in nodes)
        located = engine.Located(request.id, tuple(nodes), bytes(owners), disk_s if any(disk_s) else ())
        self._context.emit(Answer(process.connection, located))

    def hint(self, process: Process, request: engine.Hint) -> None:
        """Apply hints that an engine gave after the match to the segments that it names, and to the segments of a lease
        that is still held."""
        tenant, hints = process.session.tenant, with_access(request.hints, NO_ACCESS)
        self._touches.hint(tenant, split_keys(request.keys), hints)
        lease = process.session.leases.get(LeaseId(request.lease))
        if lease is not None:
            # Later reads and the release of the lease are recorded with the newest hints.
            lease.add_hints(hints)
            if len(lease.keys) <= PIECE:
                # For a longer lease `pieces` makes further `Hint` messages, which name its segments by their keys.
                self._touches.hint(tenant, lease.keys, hints)

    def release(self, process: Process, request: engine.Release) -> None:
        """Give back items of leases that a process does not read any more, and note what the engine took."""
        leases = process.session.leases
        for number, start, stop, saved_s in request.took:
            if LeaseId(number) in leases:
                leases[LeaseId(number)].account.took(start, stop, saved_s)
        for number in request.uncounted:
            if LeaseId(number) in leases:
                leases[LeaseId(number)].account.counted = leases[LeaseId(number)].account.tail = 0
        ranges = [(leases[LeaseId(lease)], start, stop) for lease, start, stop in request.ranges if lease in leases]
        self._grants.release(process.session, process.connection, ranges, request.read)

    # -- fetches

    def fetch(self, process: Process, request: engine.Fetch) -> None:
        """Fetch those items of a range of a lease that are at other nodes. The request is answered when the last of
        them has arrived or was given up, at the latest at the deadline."""
        lease = process.session.leases.get(LeaseId(request.lease))
        count = max(0, request.stop - request.start)
        if lease is None or request.start < 0 or request.stop > len(lease.keys):
            count = min(count, MAX_RANGE)
            packed = pack([None] * count, process.session.shards, checksums=request.checksums)
            lost = engine.Fetched(request.id, bytes([Code.LOST]) * count, *packed)
            self._context.emit(Answer(process.connection, lost))
            return
        fetch = _Fetch(process, lease, request, self._context.now)
        by_node = self._items_by_node(fetch)
        limit_s = self._limit_s(fetch, by_node)
        if by_node:
            fetch.until = self._context.now + limit_s
            fetch.timer = self._context.after(limit_s, lambda: self._answer(fetch))
        self._bring(fetch, by_node, limit_s)
        if not fetch.awaited.total():
            self._answer(fetch)

    def _items_by_node(self, fetch: _Fetch) -> dict[NodeId, list[int]]:
        """Returns the indices of the items to request from each node. Sets the codes of the remote items that are not
        requested: they stay leased at their nodes, and a later fetch may bring them."""
        lease = fetch.lease
        by_node: dict[NodeId, list[int]] = {}
        for index in range(fetch.request.start, fetch.request.stop):
            node = lease.remotes[index]
            if node is not None and lease.segments[index] is None:
                by_node.setdefault(node, []).append(index)
        for node in [node for node in by_node if not self._transfers.delivers(node)]:
            if lease.trail is not None:
                lease.trail.silent[node] = None
                if not self._peers.connected(node):
                    lease.trail.unconnected |= {node}
            indices = by_node.pop(node)
            others = self._copies_of(fetch.process.session.tenant, [lease.keys[index] for index in indices])
            for index, copies in zip(indices, others, strict=True):
                if copies:
                    fetch.tried[index] = [node]
                    fetch.not_asked.add(index)
                    by_node.setdefault(copies[0], []).append(index)
                else:
                    fetch.set_code(index, Code.LOST)
        room = self._grants.fetch_room(fetch.process.session)
        if sum(map(len, by_node.values())) <= room:
            return by_node
        # The session may hold fewer further slots than this fetch has items. An item that another fetch of the lease
        # waits for takes no further slot. Of the others, the deepest ones, for which no slot is left, are left out of
        # the request.
        requested = itertools.chain.from_iterable(by_node.values())
        beyond = frozenset(sorted(index for index in requested if index not in lease.coming)[room:])
        if beyond and lease.trail is not None:
            lease.trail.refused = Code.SESSION_LIMIT
        for index in sorted(beyond):
            fetch.set_code(index, Code.SESSION_LIMIT)
        within = {node: [index for index in at if index not in beyond] for node, at in by_node.items()}
        return {node: at for node, at in within.items() if at}

    def _limit_s(self, fetch: _Fetch, by_node: dict[NodeId, list[int]]) -> float:
        """Returns the seconds after which the fetch is answered with the items that have arrived by then."""
        limit_s = fetch.request.deadline_s
        if not limit_s:
            size = fetch.process.session.slot_bytes
            predicted = (self._transfers.predict_s(node, size * len(at)) for node, at in by_node.items())
            limit_s = deadline_s(
                sum(predicted) + max((fetch.lease.disk_s.get(node, 0.0) for node in by_node), default=0)
            )
        return min(limit_s, fetch.request.at_most_s or MAX_DEADLINE_S, MAX_DEADLINE_S)

    def _bring(self, fetch: _Fetch, by_node: dict[NodeId, list[int]], limit_s: float) -> None:
        """Start transfers of the items in `by_node`, from their nodes."""
        lease, session = fetch.lease, fetch.process.session
        for node, indices in by_node.items():
            fetch.awaited[node] += len(indices)
            for index in indices:
                self._grants.item_expected(session, lease, index)
        for node, indices in by_node.items():
            wanted: list[tuple[SegmentKey, int, OnArrival]] = [
                (lease.keys[index], index, partial(self._arrived, fetch, node, index)) for index in indices
            ]
            self._transfers.bring(
                node,
                session.tenant,
                wanted,
                kind=Kind.CACHED,
                slot_bytes=session.slot_bytes,
                shards=session.shards,
                wait_s=limit_s,
                request=fetch.request.request,
                hints=lease.hints,
                disk_s=lease.disk_s.get(node, 0.0),
            )

    def _arrived(self, fetch: _Fetch, node: NodeId, index: int, segment: Segment | None, code: Code) -> None:
        """Handle the outcome of one item that was requested from `node`: its segment, or None and the reason `code`."""
        lease, session = fetch.lease, fetch.process.session
        fetch.awaited[node] -= 1
        self._grants.item_settled(session, lease, index)
        wanted = lease.remotes[index] is not None and lease.segments[index] is None and lease.is_held(index)
        if segment is not None and wanted:
            self._grants.item_arrived(session, lease, index, segment, from_disk=node == self._context.node)
            if lease.trail is not None:
                lease.trail.fetched += 1
        elif segment is not None:
            self._context.store.unpin(segment)
        elif wanted and code in (Code.BAD_CHECKSUM, Code.LOST):
            fetch.tried.setdefault(index, []).append(node)
            fetch.failed.append(index)
            if code is Code.BAD_CHECKSUM:
                fetch.wrong.add(index)
        elif wanted and (code.refused or code is Code.PENDING):
            # This node has no slot for the item, or another engine of this node is writing the segment and may not
            # commit it. The item stays leased at its node, and a later fetch may bring it.
            if lease.trail is not None:
                lease.trail.refused = code
        elif wanted:
            self._lost(fetch, index, node)
        fetch.set_code(index, code if lease.segments[index] is None else Code.LOCAL)
        if not fetch.awaited[node] and fetch.failed:
            self._ask_other_copies(fetch)
        if not fetch.awaited.total():
            self._answer(fetch)

    def _lost(self, fetch: _Fetch, index: int, node: NodeId) -> None:
        """Record that an item leased at `node` cannot be fetched from any node."""
        reason, detail = MissReason.LOST, ""
        if fetch.lease.trail is not None:
            late = fetch.answered or not self._peers.bulk_alive(node)
            gone = self._context.removals.get(fetch.process.session.tenant, fetch.lease.keys[index])
            rule = gone.rule if gone is not None and node == self._context.node else ""
            reason, detail = fetch.lease.trail.did_not_come(node, late=late, wrong=index in fetch.wrong, rule=rule)
        self._grants.item_lost(fetch.lease, index, reason, detail)

    def _ask_other_copies(self, fetch: _Fetch) -> None:
        """Request each item that did not come from the next node that may have a copy and can send it before the
        deadline. That node is asked without a lease: it sends the segment if it still has it."""
        lease, session = fetch.lease, fetch.process.session
        indices, fetch.failed = fetch.failed, []
        left_s = 0.0 if fetch.answered else fetch.until - self._context.now
        by_node: dict[NodeId, list[int]] = {}
        keys = [lease.keys[index] for index in indices]
        copies = self._copies_of(session.tenant, keys) if left_s > 0 else [[] for _ in keys]
        for index, others in zip(indices, copies, strict=True):
            if lease.remotes[index] is None or not lease.is_held(index):
                # Another fetch of the lease has settled the item, or it was released meanwhile.
                fetch.set_code(index, lease.code(index))
                continue
            tried = fetch.tried[index]
            in_time = (node for node in others if self._peers.predict_s(node, session.slot_bytes) < left_s)
            node = next((node for node in in_time if node not in tried), None)
            if node is not None:
                by_node.setdefault(node, []).append(index)
            elif index not in fetch.not_asked:
                self._lost(fetch, index, tried[0])
        self._bring(fetch, by_node, left_s)

    def _answer(self, fetch: _Fetch) -> None:
        if fetch.answered:
            return
        fetch.answered = True
        if fetch.timer is not None:
            fetch.timer.cancel()
            self._seconds.add(self._context.now - fetch.began)
        lease, request = fetch.lease, fetch.request
        if lease.trail is not None:
            lease.trail.fetch_s = max(lease.trail.fetch_s, self._context.now - fetch.began)
        segments = lease.readable(request.start, request.stop)
        for offset, segment in enumerate(segments):
            if segment is None and fetch.codes[offset] in (Code.LOCAL, Code.REMOTE):
                fetch.codes[offset] = Code.LOST
        if fetch.process.alive:
            packed = pack(segments, fetch.process.session.shards, checksums=request.checksums)
            fetched = engine.Fetched(request.id, bytes(fetch.codes), *packed)
            self._context.emit(Answer(fetch.process.connection, fetched))
