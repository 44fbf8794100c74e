"""Writing: prepare, commit, and what the directory nodes are told.

Prepare reserves slots and tells each directory node that the segments are PENDING here; commit publishes them at once
as
dirty copies and hands them to `Pushes`. Nothing here waits for the network.
"""

from __future__ import annotations

from tokenlake.core.access import with_access
from tokenlake.core.claims import Claims
from tokenlake.core.context import Context
from tokenlake.core.instructions import Answer
from tokenlake.core.pushes import Pushes
from tokenlake.core.sessions import Process, Session, Sessions, Write
from tokenlake.core.touches import Touches
from tokenlake.hints import NO_HINTS, Hints
from tokenlake.identity import SegmentKey, TenantId, WriteId
from tokenlake.metrics import Metric
from tokenlake.store import Kind, Segment, State
from tokenlake.wire import Code
from tokenlake.wire import engine as wire
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import NO_SLOT_BYTES, split_keys

__all__ = ["Writes"]

STORED = Metric("tokenlake_stored_segments_total", "Segments committed by local engines")
WRITTEN_BYTES = Metric("tokenlake_written_bytes_total", "Bytes of segments committed by engines of this node", "tenant")
REFUSED = Metric("tokenlake_refused_segments_total", "Segments for which a local engine got no slot")


class Writes:
    """Prepare, Commit and Abort of the local engines."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        claims: Claims,
        pushes: Pushes,
        touches: Touches,
    ) -> None:
        self._context = context
        self._touches = touches
        self._sessions = sessions
        self._claims = claims
        self._pushes = pushes

    def prepare(self, process: Process, request: wire.Prepare) -> None:
        """One code per key; slots for the RESERVED."""
        session = process.session
        keys = split_keys(request.keys)
        write = Write(WriteId(self._context.next_id()), session.tenant, request.first, process.connection)
        hints = with_access(request.hints, session.recent.access(keys, request.first))
        write.request, write.hints = request.request, hints
        codes = bytearray()
        slots: list[bytes] = []
        room = self._sessions.reserve_room(session)
        refusal: Code | None = None
        for index, key in enumerate(keys):
            known = self._context.store.get(session.tenant, key)
            outcome: Segment | Code
            if known is not None:
                outcome = Code.EXISTS if known.state is State.READY else Code.PENDING
            elif refusal is not None:
                # Nothing comes free meanwhile.
                outcome = refusal
            else:
                outcome = self._reserve(session, key, request.first + index, room - len(write.open), hints)
            if isinstance(outcome, Segment):
                write.open[index] = outcome
                codes.append(Code.RESERVED)
                slots.append(outcome.packed)
            else:
                codes.append(outcome)
                slots.append(NO_SLOT_BYTES)
                if outcome.refused:
                    refusal = outcome
                    self._context.counters.add(REFUSED)
        # What was computed again although it is here was wanted: it must not be the next to go. Looked up anew,
        # since a later key of the same request may have taken its slot.
        existing = [key for key, code in zip(keys, codes, strict=True) if code == Code.EXISTS]
        found = self._context.ready(session.tenant, existing)
        self._touches.read([segment for segment in found if segment is not None], hints)
        if write.open:
            self._sessions.add_write(session, write)
            announced = [segment.key for segment in write.open.values()]
            self._claims.announce(session.tenant, announced, self._context.config.reservation_s)
        number = write.id if write.open else 0
        reply = wire.Prepared(request.id, number, bytes(codes), b"".join(slots))
        self._context.emit(Answer(process.connection, reply))

    def _reserve(self, session: Session, key: SegmentKey, depth: int, room: int, hints: Hints | None) -> Segment | Code:
        if room <= 0:
            pool = self._context.store.pool(session.tenant, session.slot_bytes)
            if pool is None:
                return self._context.store.refusal(session.tenant, Code.NO_REGION)
            return Code.SESSION_LIMIT
        segment = self._context.store.reserve(
            session.tenant, session.slot_bytes, key, Kind.DIRTY, depth, self._context.now, hints or NO_HINTS
        )
        if isinstance(segment, Segment):
            segment.missing_shards = (1 << session.shards) - 1
            segment.checksums = bytes(CHECKSUM_BYTES * session.shards)
        return segment

    def attach(self, process: Process, request: wire.Attach) -> None:
        """Another process of the session fills shards of the write: its slots stay until it gave them back too.
        RESERVED for what is open, EXPIRED once the deadline passed, COMMITTED for the rest."""
        write = process.session.writes[WriteId(request.lease)]
        self._sessions.attach(write, process.connection)
        count = max(write.open) + 1
        open_code = Code.EXPIRED if write.expired else Code.RESERVED
        codes = bytes(open_code if index in write.open else Code.COMMITTED for index in range(count))
        slots = b"".join(write.open[at].packed if at in write.open else NO_SLOT_BYTES for at in range(count))
        self._context.emit(Answer(process.connection, wire.Prepared(request.id, write.id, codes, slots)))

    def commit(self, process: Process, request: wire.Commit) -> None:
        """Publish what is whole. A commit after the deadline gives those slots back: they were filled."""
        session = process.session
        write = session.writes.get(WriteId(request.write))
        if write is None or write.expired:
            codes = bytes([Code.EXPIRED]) * len(request.indices)
            if write is not None:
                self._sessions.give_back(session, write, process.connection, request.indices)
        else:
            codes = self._publish(process, write, request)
        self._context.emit(Answer(process.connection, wire.Committed(request.id, codes)))

    def _publish(self, process: Process, write: Write, request: wire.Commit) -> bytes:
        session = process.session
        shards = [shard for shard in range(session.shards) if request.shards >> shard & 1]
        per_segment = CHECKSUM_BYTES * len(shards)
        codes = bytearray()
        whole: list[Segment] = []
        for position, index in enumerate(request.indices):
            segment = write.open.get(index)
            mine = request.checksums[position * per_segment : (position + 1) * per_segment]
            if segment is None or len(mine) != per_segment:
                codes.append(Code.EXPIRED)
                continue
            segment.checksums = _with_checksums(segment.checksums, shards, mine)
            for shard in shards:
                segment.missing_shards &= ~(1 << shard)
            codes.append(Code.RESERVED if segment.missing_shards else Code.COMMITTED)
            if segment.missing_shards:
                self._sessions.filled(write, process.connection, index)
            else:
                self._context.store.publish(segment, segment.checksums, self._context.now)
                self._sessions.committed(session, write, index)
                whole.append(segment)
        self._context.counters.add(STORED, len(whole))
        self._context.counters.add_for(WRITTEN_BYTES, session.tenant, len(whole) * session.slot_bytes)
        self._pushes.add(session.tenant, whole, write.request)
        return bytes(codes)

    def abort(self, process: Process, request: wire.Abort) -> None:
        """This process will not write into the slots any more."""
        write = process.session.writes.get(WriteId(request.write))
        if write is not None:
            self._sessions.give_back(process.session, write, process.connection)

    def withdraw_given_up(self) -> None:
        """Tell the directory nodes which segments nobody writes here any more."""
        by_tenant: dict[TenantId, list[SegmentKey]] = {}
        for tenant, key in self._sessions.take_given_up():
            by_tenant.setdefault(tenant, []).append(key)
        for tenant, keys in by_tenant.items():
            self._claims.withdraw(tenant, keys)


def _with_checksums(known: bytes, shards: list[int], mine: bytes) -> bytes:
    """`known` with the checksums of `shards` replaced by `mine`, in order."""
    if len(mine) == len(known):
        return mine
    merged = bytearray(known)
    for position, shard in enumerate(shards):
        at = shard * CHECKSUM_BYTES
        merged[at : at + CHECKSUM_BYTES] = mine[position * CHECKSUM_BYTES : (position + 1) * CHECKSUM_BYTES]
    return bytes(merged)
