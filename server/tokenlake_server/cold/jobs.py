"""The work of the cold tier: the segments of each instruction, and the states of their operations.

::

    WAITING --> AT THE PLACE <--> TOUCHING THE SLOT --> ENDED
       |              |                  |
       +--given up----+--> ENDED         +--given up--> ENDED when it stops touching

A call of the place may never return. Its operation can be ended all the same, because it touches the slot of its
segment only in a state of its own, which it enters while it is not ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from tokenlake.content import content_limit
from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.core.instructions import ColdRead, ColdWrite
from tokenlake.disk import NOTE_BYTES
from tokenlake.wire import Code
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import split_keys, unpack_slots


class GivenUp(Exception):
    """The operation was ended by another thread."""


class Job:
    """The execution of one instruction; guarded by the lock of the tier."""

    def __init__(self, instruction: ColdRead | ColdWrite) -> None:
        self.order = instruction
        self.keys = split_keys(instruction.keys)
        self.slots = unpack_slots(instruction.slots)
        self.codes = bytearray([Code.LOST]) * len(self.keys)
        self.left = len(self.keys)
        """Number of the segments that have not ended."""
        self.ops: list[Op] = []

    def done(self) -> Event:
        """The event that ends it."""
        raise NotImplementedError


class ReadJob(Job):
    """The execution of a `ColdRead`."""

    order: ColdRead

    def __init__(self, instruction: ColdRead) -> None:
        super().__init__(instruction)
        self.checksums = bytearray(CHECKSUM_BYTES * instruction.shards * len(self.keys))
        self.notes = bytearray(NOTE_BYTES * len(self.keys))

    def done(self) -> Event:
        order = self.order
        return events.FetchDone(order.fetch, bytes(self.codes), bytes(self.checksums), notes=bytes(self.notes))

    def found(self, index: int, checksums: bytes, note: bytes) -> None:
        """A segment was read whole."""
        size = len(checksums)
        self.checksums[index * size : (index + 1) * size] = checksums
        self.notes[index * NOTE_BYTES : (index + 1) * NOTE_BYTES] = note

    def not_found(self, index: int) -> None:
        """The read of a segment was given up, perhaps behind `found`."""
        self.found(index, bytes(CHECKSUM_BYTES * self.order.shards), bytes(NOTE_BYTES))

    @property
    def content_limit(self) -> int:
        """Most bytes of the content of a segment."""
        return content_limit(self.order.slot_bytes)


class WriteJob(Job):
    """The execution of a `ColdWrite`."""

    order: ColdWrite

    def done(self) -> Event:
        return events.ColdWritten(self.order.write, bytes(self.codes))

    def checksums(self, index: int) -> bytes:
        """The checksums of a segment."""
        size = CHECKSUM_BYTES * self.order.shards
        return self.order.checksums[index * size : (index + 1) * size]

    def note(self, index: int) -> bytes:
        """The note of a segment."""
        return self.order.notes[index * NOTE_BYTES : (index + 1) * NOTE_BYTES]


class Op:
    """The operation on one segment of a job. Its fields are guarded by the lock of the tier."""

    def __init__(self, job: Job, index: int, lock: threading.Lock) -> None:
        self.job = job
        self.index = index
        self.since: float | None = None
        """Of `time.monotonic`: when its thread last got on; None while no thread carries it out."""
        self.ended = False
        self.given_up = False
        self._touching = False
        self._lock = lock

    @contextlib.contextmanager
    def touching(self) -> Iterator[None]:
        """Within it the slot of the segment stays as it is. Raises `GivenUp`."""
        with self._lock:
            if self.ended or self.given_up:
                raise GivenUp
            self._touching = True
        try:
            yield
        finally:
            with self._lock:
                self._touching = False
                self.since = time.monotonic()
        if self.given_up:
            raise GivenUp

    def give_up(self) -> bool:
        """End the operation. True if it has ended; False if its thread ends it within moments, since it touches the
        slot now. Called with the lock."""
        self.given_up = True
        return not self._touching


def job_of(instruction: ColdRead | ColdWrite) -> ReadJob | WriteJob:
    """The execution of an instruction, of which nothing is done yet."""
    return ReadJob(instruction) if isinstance(instruction, ColdRead) else WriteJob(instruction)
