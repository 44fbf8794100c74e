"""Writes of local engines: prepare, then commit or abort.

Prepare reserves slots and sets in-flight markers at the directory nodes. Commit publishes the segments at once, and
this node owns them (`cluster.owner`). Neither waits for the network.
"""

from __future__ import annotations

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.handover import Handover
from tokenlake.core.cluster.owner import Ownership
from tokenlake.core.context import Context
from tokenlake.core.engines.access import Touches, with_access
from tokenlake.core.engines.grants import Grants, Write
from tokenlake.core.engines.pins import Pins
from tokenlake.core.engines.salt_quotas import SaltQuotas
from tokenlake.core.engines.sessions import Process, Session
from tokenlake.core.instructions import Answer
from tokenlake.core.report.refusals import Refusals
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey, WriteId
from tokenlake.memory import Kind, Segment, State
from tokenlake.metrics import Metric
from tokenlake.wire import Code, engine
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import NO_SLOT_BYTES, split_keys

STORED = Metric("tokenlake_stored_segments_total", "Segments committed by engines of this node")
WRITTEN_BYTES = Metric("tokenlake_written_bytes_total", "Bytes of segments committed by engines of this node", "tenant")
STORE_SECONDS = Metric(
    "tokenlake_store_seconds",
    "Time from the reservation of slots to the commit of the last of them, of writes that were committed",
    kind="histogram",
)


class Writes:
    """Handles the requests by which local engines write segments: Prepare, Attach, Commit and Abort."""

    def __init__(
        self,
        context: Context,
        grants: Grants,
        directory_node: DirectoryNode,
        ownership: Ownership,
        handover: Handover,
        touches: Touches,
        refusals: Refusals,
        pins: Pins,
        salt_quotas: SaltQuotas,
    ) -> None:
        self._context = context
        self._refusals = refusals
        self._pins = pins
        self._salt_quotas = salt_quotas
        self._seconds = context.counters.histogram(STORE_SECONDS)
        self._grants = grants
        self._directory_node = directory_node
        self._ownership = ownership
        self._handover = handover
        self._touches = touches

    def prepare(self, process: Process, request: engine.Prepare) -> None:
        """Reserve slots for segments that an engine will write. The answer has one code per key, and a slot for each
        key with the code RESERVED. After a refusal no further key of the request gets a slot."""
        session, store = process.session, self._context.store
        keys = split_keys(request.keys)
        access, parents = session.recent.access(keys, request.first)
        hints = with_access(request.hints, access)
        write = Write(WriteId(self._context.next_id()), process.connection)
        write.pin_s = hints.pin_s
        room = self._grants.reserve_room(session)
        codes = bytearray()
        slots: list[bytes] = []
        refusal: Code | None = None
        kept = hints.without_pin()
        for index, key in enumerate(keys):
            known = store.get(session.tenant, key)
            outcome: Segment | Code
            if known is not None:
                outcome = Code.EXISTS if known.state is State.READY else Code.PENDING
            elif refusal is not None:
                outcome = refusal
            else:
                depth = request.first + index
                outcome = self._reserve(session, key, depth, room - len(write.open), kept, parents[index])
            if isinstance(outcome, Segment):
                write.open[index] = outcome
                codes.append(Code.RESERVED)
                slots.append(outcome.packed)
            else:
                codes.append(outcome)
                slots.append(NO_SLOT_BYTES)
                if outcome.refused:
                    refusal = outcome
                    self._refusals.refused(session.tenant, key, outcome)
                    continue
            self._refusals.served(session.tenant, key)
        # The engine computed segments again that this node has (EXISTS): that counts as a read of them. They are looked
        # up anew, since the reservation for a later key of this request may have evicted one.
        existing = [key for key, code in zip(keys, codes, strict=True) if code == Code.EXISTS]
        found = self._context.ready(session.tenant, existing)
        self._touches.read([segment for segment in found if segment is not None], hints)
        if write.open:
            self._grants.add_write(session, write)
            reserved = [segment.key for segment in write.open.values()]
            self._directory_node.announce(session.tenant, reserved, self._context.config.reservation_s)
        reply = engine.Prepared(request.id, write.id if write.open else 0, bytes(codes), b"".join(slots))
        self._context.emit(Answer(process.connection, reply))

    def _reserve(
        self, session: Session, key: SegmentKey, depth: int, room: int, hints: Hints, parent: SegmentKey | None
    ) -> Segment | Code:
        store = self._context.store
        if room <= 0:
            if store.pool(session.tenant, session.slot_bytes) is not None:
                return Code.SESSION_LIMIT
            return store.refusal(session.tenant, session.slot_bytes, Code.NO_REGION)
        return store.reserve(
            session.tenant,
            session.slot_bytes,
            key,
            Kind.DIRTY,
            depth,
            self._context.now,
            hints,
            parent,
            shards=session.shards,
        )

    def attach(self, process: Process, request: engine.Attach) -> None:
        """Let another process of the session fill shards of a write: the slots stay pinned until it gives them back as
        well. The answer has one code for each index up to the last uncommitted segment: RESERVED for an uncommitted
        one, or EXPIRED if the deadline of the write has passed; COMMITTED for all others, also where the write reserved
        none; SESSION_LIMIT for all if a limit is reached."""
        write = process.session.writes[WriteId(request.lease)]
        count = max(write.open) + 1
        if not self._grants.attach(process.session, write, process.connection):
            refused = engine.Prepared(request.id, 0, bytes([Code.SESSION_LIMIT]) * count, NO_SLOT_BYTES * count)
            self._context.emit(Answer(process.connection, refused))
            return
        open_code = Code.EXPIRED if write.expired else Code.RESERVED
        codes = bytes(open_code if index in write.open else Code.COMMITTED for index in range(count))
        slots = b"".join(write.open[at].packed if at in write.open else NO_SLOT_BYTES for at in range(count))
        self._context.emit(Answer(process.connection, engine.Prepared(request.id, write.id, codes, slots)))

    def commit(self, process: Process, request: engine.Commit) -> None:
        """Commit shards of a write: segments whose shards are all committed are published. After the deadline of the
        write nothing is published, and the process gives back the slots that the request names."""
        session = process.session
        write = session.writes.get(WriteId(request.write))
        if write is None or write.expired:
            codes = bytes([Code.EXPIRED]) * len(request.indices)
            if write is not None:
                self._grants.give_back(session, write, process.connection, request.indices)
        else:
            codes = self._publish(process, write, request)
        self._context.emit(Answer(process.connection, engine.Committed(request.id, codes)))

    def _publish(self, process: Process, write: Write, request: engine.Commit) -> bytes:
        session = process.session
        per_segment = CHECKSUM_BYTES * request.shards.bit_count()
        codes = bytearray()
        whole: list[Segment] = []
        for position, index in enumerate(request.indices):
            segment = write.open.get(index)
            checksums = request.checksums[position * per_segment : (position + 1) * per_segment]
            if segment is None or len(checksums) != per_segment:
                codes.append(Code.EXPIRED)
                continue
            committed = self._context.store.commit_shards(segment, request.shards, checksums)
            codes.append(Code.COMMITTED if committed else Code.RESERVED)
            if not committed:
                self._grants.filled(write, process.connection, index)
            else:
                self._context.store.publish(segment, segment.checksums, self._context.now)
                self._grants.committed(session, write, index)
                whole.append(segment)
        if whole and not write.open:
            self._seconds.add(self._context.now - write.began)
        self._context.counters.add(STORED, len(whole))
        self._context.counters.add_for(WRITTEN_BYTES, len(whole) * session.slot_bytes, session.tenant)
        if write.pin_s:
            self._pins.pin(whole, write.pin_s)
        self._ownership.committed(session.tenant, whole)
        self._handover.committed(whole)
        self._salt_quotas.trim(whole)
        return bytes(codes)

    def abort(self, process: Process, request: engine.Abort) -> None:
        """Abort a write for one process: it gives back all slots of the write."""
        write = process.session.writes.get(WriteId(request.write))
        if write is not None:
            self._grants.give_back(process.session, write, process.connection)
