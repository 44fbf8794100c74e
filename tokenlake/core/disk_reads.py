"""Reads of segments from the devices of this node into its slots.

At most `READS` of a device run at a time, and the others wait in a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tokenlake.core.cluster.transfer import ABORTED, Transfer
from tokenlake.core.context import Context
from tokenlake.core.instructions import DiskRead
from tokenlake.disk import NO_ENTRY, Place, pack_places
from tokenlake.disk.reads import READ_BYTES, READ_SEGMENTS, ReadQueue
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory.removals import DISK_DAMAGED_RULE, DISK_GONE_RULE
from tokenlake.metrics import Metric
from tokenlake.wire import Code
from tokenlake.wire.fields import MAX_SECONDS
from tokenlake.wire.slots import join_keys

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


class DiskReads:
    """The reads of this node that are under way or wait for their device."""

    def __init__(
        self, context: Context, begin: Callable[[Transfer, float], int], lose: Callable[[Transfer], None]
    ) -> None:
        """`begin`: counts a read as under way, to be aborted after so many seconds, and returns its id. `lose`: gives
        up a read that has not begun."""
        self._context = context
        self._begin = begin
        self._lose = lose
        self._queue: ReadQueue[Transfer] = ReadQueue(context.disk.devices)
        self._seconds = context.counters.histogram(READ_SECONDS)

    def predict_s(self, nbytes: int) -> float:
        """Returns the expected seconds until `nbytes` are read, at most `MAX_SECONDS`."""
        return min(MAX_SECONDS, self._queue.predict_s(nbytes))

    def find(self, tenant: TenantId, key: SegmentKey, slot_bytes: int, shards: int) -> int:
        """Returns the entry of a segment on disk, if it has this size and number of shards."""
        disk = self._context.disk
        entry = disk.find(tenant, key)
        fits = entry >= 0 and disk.slab(entry).slot_bytes == slot_bytes and disk.shards(entry) == shards
        return entry if fits else NO_ENTRY

    def add(self, transfer: Transfer) -> None:
        """Queue reads from disk into the slots that are reserved for the segments, one or more reads for each device of
        the disk tier."""
        pieces: dict[int, Transfer] = {}
        most = max(1, min(READ_SEGMENTS, READ_BYTES // transfer.slot_bytes))
        for segment, place in zip(transfer.segments, transfer.places, strict=True):
            device = place[0].device.number
            piece = pieces.get(device)
            if piece is None or len(piece.segments) == most:
                piece = pieces[device] = replace(transfer, segments=[], places=[], device=device)
                piece.timer = self._context.after(transfer.wait_s, partial(self._drop, piece))
                self._queue.add(device, piece, 0)
            piece.segments.append(segment)
            piece.places.append(place)
            self._queue.grow(device, piece, transfer.slot_bytes)
        for device in pieces:
            self._start_next(device)

    def _start_next(self, device: int) -> None:
        while (read := self._queue.take(device)) is not None:
            if read.timer is not None:
                read.timer.cancel()
            fetch = self._begin(read, max(0.0, read.asked_at + read.wait_s - self._context.now))
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

    def _drop(self, read: Transfer) -> None:
        """Drop a read that waited for its device until its deadline."""
        assert read.device is not None
        self._queue.drop(read.device, read)
        self._context.counters.add(ABORTED)
        self._end_places(read)
        self._lose(read)

    def _end_places(self, read: Transfer) -> None:
        for slab, slot in read.places:
            self._context.disk.end_read(slab, slot, self._context.now)

    def ended(self, read: Transfer, codes: bytes) -> None:
        """Handle the end of a read from a device. A segment whose bytes were wrong, or that the device could not read,
        leaves the disk. After a read that was aborted at its deadline, the segments that were not read stay on disk."""
        assert read.device is not None
        disk, counters = self._context.disk, self._context.counters
        came = read.nbytes if codes.count(Code.LOCAL) == len(codes) else 0
        self._queue.ended(read.device, read.nbytes, self._context.now - read.started_at, came)
        self._seconds.add(self._context.now - read.asked_at)
        # The reason is told at once, because the fetches that wait are answered in this event.
        removals, now = self._context.removals, self._context.now
        for (slab, slot), segment, code in zip(read.places, read.segments, codes, strict=True):
            if code == Code.LOST and slab.void:
                removals.add(read.tenant, segment.key, now, DISK_GONE_RULE)
            elif slab.entries[slot] and (code == Code.BAD_CHECKSUM or (code == Code.LOST and not read.aborted)):
                counters.add(DAMAGED)
                removals.add(read.tenant, segment.key, now, DISK_DAMAGED_RULE)
                disk.forget_place(slab, slot, DISK_DAMAGED_RULE)
        self._end_places(read)
        arrived = codes.count(Code.LOCAL)
        counters.add_for(READ, arrived, read.tenant)
        counters.add_for(READ_BACK_BYTES, arrived * read.slot_bytes, read.tenant)
        self._start_next(read.device)

    def waiting(self) -> Iterator[Transfer]:
        """Yields the reads that wait for their device."""
        return iter(self._queue)

    def check_integrity(self) -> None:
        """Raises AssertionError when the queue does not add up."""
        self._queue.check_integrity()
