"""Grants of the daemon before: a process that survived it names the leases and writes that it holds, and they go on
under their numbers.

A lease over a segment that was kept pins the segment; one over a slot whose segment is gone keeps the slot in
quarantine. A write is expired: its slots stay in quarantine until the process gives them back. What the process held at
other nodes is lost.
"""

from __future__ import annotations

from tokenlake.core.context import Context
from tokenlake.core.engines.grants import Grants, Lease
from tokenlake.core.engines.sessions import Process
from tokenlake.core.instructions import Answer
from tokenlake.core.kept import Kept
from tokenlake.core.report.account import Account
from tokenlake.core.report.misses import Beyond
from tokenlake.hints import NO_HINTS
from tokenlake.identity import LeaseId, WriteId
from tokenlake.memory import PoolId, State
from tokenlake.memory.kept_slots import NO_KEY
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import SlotRef, unpack_slots


class Regrants:
    """Handles `Regrant`."""

    def __init__(self, context: Context, grants: Grants, kept: Kept) -> None:
        self._context = context
        self._grants = grants
        self._kept = kept

    def regrant(self, process: Process, request: engine.Regrant) -> None:
        """Take over the grants that a process names, and answer with a code per slot. A process that is no survivor,
        or has returned, gets nothing new: its grants are confirmed."""
        codes = bytearray()
        for number, items, first, packed in request.leases:
            codes += self._lease(process, LeaseId(number), items, first, unpack_slots(packed))
        for number, packed in request.writes:
            codes += self._write(process, WriteId(number), unpack_slots(packed))
        self._context.emit(Answer(process.connection, engine.Regranted(request.id, bytes(codes))))
        if request.last and self._kept.is_survivor(process.connection):
            self._kept.returned(process.connection)

    def _lease(self, process: Process, number: LeaseId, items: int, first: int, places: list[SlotRef]) -> bytes:
        session, connection = process.session, process.connection
        survivor, at = self._kept.is_survivor(connection), PoolId(session.tenant, session.slot_bytes)
        codes = bytearray([Code.LOST]) * len(places)
        lease = session.leases.get(number)
        if lease is not None and len(lease.keys) != items:
            self._refuse(process)
            return bytes(codes)
        for index, place in enumerate(places, first):
            if not place.generation:
                continue
            known = lease.segments[index] if lease is not None else None
            held = lease is not None and connection in lease.held and lease.held[connection][index]
            if known is not None and known.place == place and (held or survivor):
                segment = known
            elif known is None and survivor and not (lease is not None and lease.is_held(index)):
                found = self._kept.hold(connection, at, place, writes=False)
                if found is None:
                    continue
                segment = found
            else:
                self._refuse(process)
                continue
            if lease is None:
                account = Account(at.tenant, 0, at.slot_bytes, 0, 0, range(items), Beyond(), independent=True)
                lease = Lease(number, [NO_KEY] * items, connection, NO_HINTS, account, [None] * items)
                if not self._grants.add_regranted(session, lease):
                    self._refuse(process)
                    return bytes([Code.SESSION_LIMIT]) * len(places)
            if not held and not self._grants.regrant_item(session, lease, connection, index, segment):
                self._refuse(process)
                codes[index - first] = Code.SESSION_LIMIT
                continue
            codes[index - first] = Code.LOCAL if segment.state is State.READY else Code.LOST
        return bytes(codes)

    def _write(self, process: Process, number: WriteId, places: list[SlotRef]) -> bytes:
        session, connection = process.session, process.connection
        survivor, at = self._kept.is_survivor(connection), PoolId(session.tenant, session.slot_bytes)
        codes = bytearray([Code.EXPIRED]) * len(places)
        for index, place in enumerate(places):
            if not place.generation:
                continue
            write = session.writes.get(number)
            known = write.open.get(index) if write is not None else None
            held = write is not None and index in write.held.get(connection, ())
            if known is not None and (known.place != place or not (held or survivor)):
                self._refuse(process)
                codes[index] = Code.LOST
            elif known is None:
                segment = self._kept.hold(connection, at, place, writes=True) if survivor else None
                if segment is None:
                    codes[index] = Code.LOST
                elif segment.state is State.READY:
                    codes[index] = Code.COMMITTED
                elif not self._grants.regrant_slot(session, number, connection, index, segment):
                    self._refuse(process)
                    codes[index] = Code.SESSION_LIMIT
            elif not held and not self._grants.regrant_slot(session, number, connection, index, known):
                self._refuse(process)
                codes[index] = Code.SESSION_LIMIT
        return bytes(codes)

    def _refuse(self, process: Process) -> None:
        if self._kept.is_survivor(process.connection):
            self._kept.refuse(process.connection)
