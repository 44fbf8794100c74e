"""The ledger of this node's segments (`tokenlake.memory.ledger`), by which the next daemon finds them in the memory.

::

    a segment becomes READY, or leaves; another node owns it, or this one does; a pin begins or ends
        --> `Record` in the instructions of the same event, before all that lets others see the change
    SealRequested --> the records of all segments with their newest notes, some at a time --> Sealed

Reads and hints change no record: after a crash the next daemon knows the accesses of the time when the record was
written.
"""

from __future__ import annotations

from tokenlake.core.context import Context, Part
from tokenlake.core.engines.pins import Pins
from tokenlake.core.instructions import Record, Sealed
from tokenlake.disk.notes import Note, Notes
from tokenlake.memory import Cursor, Kind, Segment, State
from tokenlake.memory import ledger as records
from tokenlake.wire.fields import CHECKSUM_BYTES

SEALED = 64
"""Slots that are examined at once, before other events are handled, to write their records anew."""


class Ledger(Part):
    """Says which records of the ledger change."""

    def __init__(self, context: Context, pins: Pins) -> None:
        self._context = context
        self._pins = pins
        self.notes = Notes()
        if context.config.keep:
            context.store.recorded = {}
        self._sealing = 0

    def take(self) -> Record | None:
        """Returns the records that have changed since the last call; None for none."""
        changed = self._context.store.recorded
        if not changed:
            return None
        self._context.store.recorded = {}
        slots: list[bytes] = []
        packed: list[bytes] = []
        for segment in changed.values():
            slots.append(segment.packed)
            packed.append(self._record(segment) if segment.state is State.READY else b"")
        return Record(b"".join(slots), tuple(packed))

    def _record(self, segment: Segment) -> bytes:
        """Returns the record of a READY segment; empty if it has too many shards for one."""
        if len(segment.checksums) > CHECKSUM_BYTES * records.max_shards(segment.slot_bytes):
            return b""
        note = Note(segment.depth, self._context.store.accesses(segment), segment.hints)
        return records.pack(
            records.Record(
                segment.place.generation,
                segment.key,
                segment.kind is Kind.PRIMARY,
                records.name_digest(segment.source),
                self.notes.pack(note),
                self._pins.left_s(segment),
                self._context.since(segment.touched),
                segment.checksums,
            )
        )

    def seal(self) -> None:
        """Write the records of all segments anew, and answer with `Sealed`."""
        cursor: Cursor | None = Cursor()
        store = self._context.store
        self._sealing += 1

        def work() -> bool:
            nonlocal cursor
            if store.recorded is None or cursor is None:
                self._sealing -= 1
                self._context.emit(Sealed())
                return False
            segments, cursor = store.walk(cursor, SEALED)
            for segment in segments:
                store.note(segment)
            return True

        self._context.in_steps(work)

    def census(self) -> dict[str, int]:
        return {"seals under way": self._sealing}
