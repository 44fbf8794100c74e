"""The work of a device: the segments of each instruction, and those that wait for a thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tokenlake.content import content_limit
from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.core.instructions import DiskErase, DiskRead, DiskWrite
from tokenlake.disk.places import NOTE_BYTES, unpack_places
from tokenlake.wire import Code
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import split_keys, unpack_slots
from tokenlake_server.disk.segments import SegmentIO, Stored, StoredSegment
from tokenlake_server.disk.store import DiskStore, Place
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.contents import Contents


class Segments:
    """The segments of one instruction; `codes` and `left` are guarded by the lock of the device."""

    def __init__(self, instruction: DiskRead | DiskWrite | DiskErase) -> None:
        self.keys = split_keys(instruction.keys)
        self.places = unpack_places(instruction.places)
        self.left = len(self.keys)
        """Number of the segments whose read or write has not ended."""
        self.codes = bytearray([Code.LOST]) * self.left
        shards = 0 if isinstance(instruction, DiskErase) else instruction.shards
        self._names = instruction.tenant, instruction.slot_bytes, shards

    def where(self, index: int) -> StoredSegment:
        """One of the segments, and its place."""
        return StoredSegment(*self._names, self.keys[index], *self.places[index])


class ReadJob(Segments):
    """The execution of one `DiskRead`."""

    done_to_it = "read"

    def __init__(self, instruction: DiskRead) -> None:
        super().__init__(instruction)
        self.instruction = instruction
        self.slots = unpack_slots(instruction.slots)
        count = len(self.keys)
        self.checksums = bytearray(CHECKSUM_BYTES * instruction.shards * count)

    def done(self) -> Event:
        """The event that ends it."""
        return events.FetchDone(self.instruction.fetch, bytes(self.codes), bytes(self.checksums))

    def carry_out(self, index: int, store: DiskStore, segment_io: SegmentIO, arena: Arena, contents: Contents) -> Code:
        """Read one segment into its slot. Raises `Mismatch` and OSError."""
        order = self.instruction
        (segment,) = arena.slots([self.slots[index]], order.slot_bytes)
        stored = store.read(segment_io, self.where(index), segment)
        size = len(stored.checksums)
        self.checksums[index * size : (index + 1) * size] = stored.checksums
        if stored.content:
            contents.offer(order.tenant, [self.keys[index]], [stored.content], content_limit(order.slot_bytes))
        return Code.LOCAL


class WriteJob(Segments):
    """The execution of one `DiskWrite`."""

    done_to_it = "written"

    def __init__(self, instruction: DiskWrite) -> None:
        super().__init__(instruction)
        self.instruction = instruction
        self.slots = unpack_slots(instruction.slots)

    def done(self) -> Event:
        """The event that ends it."""
        return events.DiskWritten(self.instruction.write, bytes(self.codes))

    def carry_out(self, index: int, store: DiskStore, segment_io: SegmentIO, arena: Arena, contents: Contents) -> Code:
        """Write one segment out of its slot. Raises OSError."""
        order = self.instruction
        (segment,) = arena.slots([self.slots[index]], order.slot_bytes)
        size = CHECKSUM_BYTES * order.shards
        content = contents.contents(order.tenant, [self.keys[index]], 1 << 12)
        checksums = order.checksums[index * size : (index + 1) * size]
        stored = Stored(checksums, content[0] if content else b"", self._note(index))
        store.write(segment_io, self.where(index), segment, stored)
        return Code.COMMITTED

    def record(self, store: DiskStore) -> None:
        """Record the segments that were written. Raises OSError."""
        order = self.instruction
        written = [
            Place(slot, generation, order.shards, self.keys[index], self._note(index))
            for index, (slot, generation) in enumerate(self.places)
            if self.codes[index] == Code.COMMITTED
        ]
        store.stored(order.tenant, order.slot_bytes, written)

    def _note(self, index: int) -> bytes:
        return self.instruction.notes[index * NOTE_BYTES : (index + 1) * NOTE_BYTES]


class EraseJob(Segments):
    """The execution of one `DiskErase`."""

    done_to_it = "erased"

    def __init__(self, instruction: DiskErase) -> None:
        super().__init__(instruction)
        self.instruction = instruction

    def done(self) -> Event:
        """The event that ends it."""
        return events.DiskErased(self.instruction.erase, bytes(self.codes))

    def carry_out(self, index: int, store: DiskStore, segment_io: SegmentIO, arena: Arena, contents: Contents) -> Code:
        """Erase the header of one segment. Raises OSError."""
        store.erase(segment_io, self.where(index))
        return Code.COMMITTED

    def record(self, store: DiskStore) -> None:
        """Record that the places of the erased segments are empty. Raises OSError."""
        order = self.instruction
        erased = [place.slot for place, code in zip(self.places, self.codes, strict=True) if code == Code.COMMITTED]
        store.forget(order.tenant, order.slot_bytes, erased)


Job = ReadJob | WriteJob | EraseJob
Op = tuple[Job, int]
"""One segment of a job."""


@dataclass(slots=True)
class Queue:
    """The segments that wait for a thread."""

    reads: deque[Op] = field(default_factory=deque)
    writes: deque[Op] = field(default_factory=deque)

    def of(self, job: Job) -> deque[Op]:
        """The waiting segments of such jobs."""
        return self.reads if isinstance(job, ReadJob) else self.writes

    def __len__(self) -> int:
        return len(self.reads) + len(self.writes)

    def take_all(self) -> list[Op]:
        """Empty the queue, and return what it had."""
        found = [*self.reads, *self.writes]
        self.reads.clear()
        self.writes.clear()
        return found


def job_of(instruction: DiskRead | DiskWrite | DiskErase) -> Job:
    """The execution of an instruction, of which nothing is done yet."""
    match instruction:
        case DiskRead():
            return ReadJob(instruction)
        case DiskWrite():
            return WriteJob(instruction)
        case DiskErase():
            return EraseJob(instruction)


def lose(write: WriteJob | EraseJob) -> None:
    """Mark all segments of a write as not written, or of an erasure as not erased."""
    write.codes[:] = bytes([Code.LOST]) * len(write.codes)
