"""Reads of segments from the cold tier into slots of this node.

At most `READS` of them run at a time, and the others wait in a queue. A segment that has come is this node's own: the
directory names it, and other nodes fetch it from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tokenlake.core.cluster.transfer import ABORTED, Transfer
from tokenlake.core.cold_tier import AGAIN_S, ColdTier
from tokenlake.core.context import Context
from tokenlake.core.instructions import ColdErase, ColdRead
from tokenlake.disk import NOTE_BYTES
from tokenlake.disk.notes import Notes
from tokenlake.disk.reads import READ_BYTES, READ_SEGMENTS, ReadQueue
from tokenlake.identity import TenantId
from tokenlake.memory import PoolId, Segment, State
from tokenlake.memory.removals import COLD_DAMAGED_RULE
from tokenlake.metrics import Metric
from tokenlake.wire import Code
from tokenlake.wire.fields import MAX_SECONDS
from tokenlake.wire.slots import join_keys

READ = Metric("tokenlake_cold_read_segments_total", "Segments read from the cold tier whole", "tenant")
READ_BYTES_TOTAL = Metric(
    "tokenlake_cold_read_bytes_total", "Bytes of segments read from the cold tier whole", "tenant"
)
READ_TIME = Metric(
    "tokenlake_cold_read_seconds",
    "Time from the request to the end of a read from the cold tier, its wait included",
    kind="histogram",
)
ABSENT = Metric(
    "tokenlake_cold_absent_segments_total", "Segments that the index of the cold tier named and that could not be read"
)
DAMAGED = Metric("tokenlake_cold_damaged_segments_total", "Segments in the cold tier whose bytes were wrong")

COLD = -1
"""The number of the cold tier where devices of the disk tier have theirs."""
MEASURED_BYTES = 16 << 20
"""Bytes that come before the rate of all reads together is measured again."""
READS = 8
"""Reads that are under way at a time: those of a store with a latency of 50 ms and 5 GB/s."""


class ColdReads:
    """The reads from the cold tier that are under way or wait."""

    def __init__(
        self,
        context: Context,
        tier: ColdTier,
        begin: Callable[[Transfer, float], int],
        lose: Callable[[Transfer], None],
        own: Callable[[TenantId, list[Segment]], None],
    ) -> None:
        """`begin`, `lose`: as of `DiskReads`. `own`: makes this node the owner of segments that came."""
        self._context = context
        self.tier = tier
        self._begin = begin
        self._lose = lose
        self._own = own
        self._queue: ReadQueue[Transfer] = ReadQueue({COLD: tier}, READS)
        self._notes = Notes()
        self._came = 0
        self._busy_since = 0.0
        self._seconds = context.counters.histogram(READ_TIME)

    def predict_s(self, nbytes: int) -> float:
        """Returns the expected seconds until `nbytes` are read, at most `MAX_SECONDS`; 0 for no bytes."""
        return min(MAX_SECONDS, self.tier.latency_s + self._queue.predict_s(nbytes)) if nbytes else 0.0

    def pays(self, pool: PoolId, segments: int) -> bool:
        """Returns True if reading so many segments is cheaper than computing them, or the time of that is not known."""
        return self.tier.pays(pool, segments, self._queue.predict_s(0))

    def add(self, transfer: Transfer) -> None:
        """Queue one or more reads into the slots that are reserved for the segments of a transfer."""
        most = max(1, min(READ_SEGMENTS, READ_BYTES // transfer.slot_bytes))
        for start in range(0, len(transfer.segments), most):
            piece = replace(transfer, segments=transfer.segments[start : start + most], device=COLD)
            piece.timer = self._context.after(transfer.wait_s, partial(self._drop, piece))
            self._queue.add(COLD, piece, piece.nbytes)
        self._start_next()

    def _start_next(self) -> None:
        while (read := self._queue.take(COLD)) is not None:
            if read.timer is not None:
                read.timer.cancel()
            if self._queue.under_way(COLD) == 1:
                # The latency counts apart.
                self._came, self._busy_since = 0, self._context.now + self.tier.latency_s
            fetch = self._begin(read, max(0.0, read.asked_at + read.wait_s - self._context.now))
            self._context.emit(
                ColdRead(
                    fetch,
                    read.tenant,
                    read.slot_bytes,
                    read.shards,
                    join_keys(segment.key for segment in read.segments),
                    b"".join(segment.packed for segment in read.segments),
                    read.request,
                )
            )

    def _drop(self, read: Transfer) -> None:
        """Drop a read that waited until its deadline."""
        self._queue.drop(COLD, read)
        self._context.counters.add(ABORTED)
        self._lose(read)

    def ended(self, read: Transfer, codes: bytes, notes: bytes) -> None:
        """Handle the end of a read. `notes`: those of the segments that came. After one that was aborted at its
        deadline, the segments that did not come stay in the cold tier; if none came, it is set aside."""
        tier, counters, now = self.tier, self._context.counters, self._context.now
        arrived = codes.count(Code.LOCAL)
        came = arrived * read.slot_bytes
        self._queue.ended(COLD, read.nbytes, now - read.started_at, 0)
        self._measure(came)
        self._seconds.add(now - read.asked_at)
        if arrived:
            tier.delivered()
        elif read.aborted:
            tier.silent()
        damaged = []
        for segment, code in zip(read.segments, codes, strict=True):
            if code == Code.BAD_CHECKSUM:
                damaged.append(segment.key)
                self._context.removals.add(read.tenant, segment.key, now, COLD_DAMAGED_RULE)
            if code == Code.BAD_CHECKSUM or (code != Code.LOCAL and not read.aborted):
                tier.absent(read.tenant, segment.key)
        if damaged:
            self._context.emit(ColdErase(read.tenant, join_keys(damaged)))
        counters.add(DAMAGED, len(damaged))
        if not read.aborted:
            counters.add(ABSENT, len(codes) - arrived - len(damaged))
        counters.add_for(READ, arrived, read.tenant)
        counters.add_for(READ_BYTES_TOTAL, came, read.tenant)
        # A segment that an operator evicted meanwhile is gone; one that another node owns by now stays a cached copy.
        come: list[Segment] = []
        for index, segment in enumerate(read.segments):
            if segment.state is State.READY:
                segment.cold = segment.touched + AGAIN_S
                self._recall(segment, notes[index * NOTE_BYTES : (index + 1) * NOTE_BYTES])
                if segment.source is None:
                    come.append(segment)
        self._own(read.tenant, sorted(come, key=lambda segment: segment.depth))
        self._start_next()

    def _measure(self, nbytes: int) -> None:
        """`nbytes` have come: measure the rate of all reads together, over the time in which some were under way."""
        self._came += nbytes
        busy_s = self._context.now - self._busy_since
        if self._came >= MEASURED_BYTES and busy_s > 0:
            rate = self._came / busy_s
            self.tier.measured(rate)
            self._came, self._busy_since = 0, self._context.now

    def _recall(self, segment: Segment, packed: bytes) -> None:
        """Give a segment what was known of it when it was written. Another version may have written the note."""
        try:
            note = self._notes.unpack(packed)
        except ValueError:
            return
        self._context.store.recall(segment, note.accesses, note.hints, self._context.now)

    def waiting(self) -> Iterator[Transfer]:
        """Yields the reads that wait."""
        return iter(self._queue)

    def check_integrity(self) -> None:
        """Raises AssertionError when the queue does not add up."""
        self._queue.check_integrity()
