"""Memory that the daemon before left: its regions, the segments in them, and the processes that may still use it.

::

    RegionKept     all slots of the region are withheld: they get no new segment (`memory.kept_slots`)
    SegmentsKept   segments whose record is true are READY; directory nodes are told of those that this node owns
    MemoryKept     the survivors: processes that mapped the memory of the daemon before
        |   all segments were passed in, and each survivor of the tenant has returned or is gone
        v
    the slots of the tenant are like any others

    a survivor:  Joined(survivor) --> Regrant ... Regrant(last) --> it has returned
                 |                                                     its leases and writes hold their slots
                 +--> SurvivorGone, ProcessGone                    --> it is gone

A survivor some of whose grants were refused stays one until it is gone: it may still read the slots.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.found import Found
from tokenlake.core.context import Context, Part
from tokenlake.core.engines.pins import Pins
from tokenlake.core.events import MAX_KEPT, MemoryKept, RegionKept, SegmentsKept
from tokenlake.core.instructions import CloseRegion, Record
from tokenlake.core.ledger import Ledger
from tokenlake.identity import ConnectionId, NodeId, SegmentKey, SessionId, TenantId
from tokenlake.memory import Kind, PoolId, Segment, State
from tokenlake.memory import ledger as records
from tokenlake.metrics import Level, Metric
from tokenlake.wire.fields import MAX_SECONDS
from tokenlake.wire.slots import SlotRef, unpack_slots

KEPT = Metric(
    "tokenlake_kept_segments_total", "Segments in memory that this node had before the restart of its daemon", "tenant"
)
KEPT_BYTES = Metric(
    "tokenlake_kept_bytes_total", "Bytes of the segments in memory that this node had before the restart", "tenant"
)
DROPPED = Metric(
    "tokenlake_kept_dropped_segments_total",
    "Segments of the daemon before that were not taken over, by reason: `void` (the record is damaged, or the slot has "
    "another generation), `known` (an engine or another record has the segment already), `ordered` (an operator has "
    "evicted it), `held` (a process may still write into the slot), `region` (its region was not taken over), `tenant` "
    "(the tenant is not configured any more)",
    "reason",
)
SURVIVORS = Metric(
    "tokenlake_survivors",
    "Processes of engines that may still use the memory of the daemon before and have not returned",
    "tenant",
    kind="gauge",
)
WITHHELD = Metric(
    "tokenlake_withheld_slots",
    "Free slots that get no segment, because survivors may use them or segments of the daemon before are being checked",
    "tenant",
    kind="gauge",
)

MAX_VOID = 1 << 14
"""Limit of the segments of a tenant that are remembered as evicted; beyond it none of the tenant is taken over."""
RELEASED = 256
"""Slots that are released at once, before other events are handled."""


class Kept(Part):
    """The kept memory of this node, until its slots are like all others."""

    def __init__(self, context: Context, directory_node: DirectoryNode, pins: Pins, ledger: Ledger) -> None:
        self._context = context
        self._pins = pins
        self._ledger = ledger
        self._slots = context.store.kept
        self._found = Found(context, directory_node, self._owned)
        self._pending = False
        """True while kept segments may still be passed in."""
        self._survivors: dict[int, TenantId] = {}
        self._refused: dict[int, None] = {}
        """The survivors some of whose grants were refused."""
        self._joined: dict[ConnectionId, int] = {}
        """The survivors that have joined and not returned, by connection."""
        self._sessions: dict[tuple[TenantId, SessionId], SessionId] = {}
        """The sessions of survivors, by their numbers at the daemon before, while the tenant has survivors."""
        self._awaited: dict[SlotRef, Segment] = {}
        """Leased slots in quarantine whose segments may still be passed in."""
        self._sources: dict[int, NodeId] = {}
        """The other members of the cluster by the digests of their names."""
        self.unwanted: dict[TenantId, None] = {}
        """Tenants with kept regions that are not configured any more."""
        self._void: dict[TenantId, dict[SegmentKey | int, None]] = {}
        """Segments (by key) and sizes of segments (0: all) that an operator evicted and that are not taken over."""
        self._behind: list[Callable[[], None]] = []
        """Calls that wait until all segments were passed in."""
        self._releasing = False
        """True while slices of a release are left."""

    # -- what the daemon before left

    def region(self, event: RegionKept) -> None:
        """Take a region over, or close it."""
        assert not self._context.config.made
        self._pending = True
        regions, tenant = self._context.store.regions, TenantId(event.tenant)
        if not event.slot_bytes:
            taken = regions.keep_spare(event.region, event.nbytes)
        else:
            generations = [number for (number,) in struct.iter_unpack("<Q", event.generations)]
            # A process of the tenant that maps the region can overwrite them.
            sound = max(generations, default=0) <= records.MAX_GENERATION
            at = PoolId(tenant, event.slot_bytes)
            taken = sound and self._slots.add_region(at, event.region, event.nbytes, generations)
            if taken and not self._configured(tenant):
                self.unwanted[tenant] = None
        if not taken:
            regions.number_from(event.region + 1)
            self._context.emit(CloseRegion(event.region))

    def _configured(self, tenant: TenantId) -> bool:
        quotas = self._context.config.quotas
        return not quotas or tenant in quotas

    def segments(self, event: SegmentsKept) -> None:
        """Take segments over whose records are true, and clear the records of the others."""
        assert self._pending
        assert len(event.records) <= MAX_KEPT
        tenant = TenantId(event.tenant)
        at = PoolId(tenant, event.slot_bytes)
        places = unpack_slots(event.slots)
        assert len(places) == len(event.records)
        dropped: Counter[str] = Counter()
        void: list[bytes] = []
        owned: list[SegmentKey] = []
        for place, raw in zip(places, event.records, strict=True):
            taken = self._take(at, place, raw)
            if isinstance(taken, str):
                dropped[taken] += 1
                void.append(place.pack())
            elif taken.source is None:
                owned.append(taken.key)
        counters, count = self._context.counters, len(places) - len(void)
        counters.add_for(KEPT, count, tenant)
        counters.add_for(KEPT_BYTES, count * event.slot_bytes, tenant)
        for reason, segments in dropped.items():
            counters.add_for(DROPPED, segments, reason)
        if void and self._context.config.keep:
            self._context.emit(Record(b"".join(void), (b"",) * len(void)))
        self._found.add(tenant, owned)

    def _take(self, at: PoolId, place: SlotRef, raw: bytes) -> Segment | str:
        """Take over the segment in a slot. Returns it, or the reason that it is not taken."""
        if not self._configured(at.tenant):
            return "tenant"
        if not self._slots.has_region(at, place.region):
            return "region"
        withheld, here = self._slots.find(at, place)
        record = records.unpack(raw)
        if not withheld or record is None or record.generation != place.generation:
            return "void"
        try:
            note = self._ledger.notes.unpack(record.note)
        except ValueError:
            return "void"
        store, now = self._context.store, self._context.now
        void = self._void.get(at.tenant, ())
        if record.key in void or 0 in void or at.slot_bytes in void:
            return "ordered"
        if store.get(at.tenant, record.key) is not None:
            return "known"
        awaited = self._awaited.pop(place, None)
        if here is not None and here is not awaited:
            return "held"
        source = self._source(record.source)
        kind = Kind.PRIMARY if record.primary and source is None else Kind.CACHED
        segment = awaited or Segment(at, record.key, place, kind, note.depth, now)
        segment.key, segment.kind, segment.depth = record.key, kind, note.depth
        segment.hints, segment.source, segment.checksums = note.hints, source, record.checksums
        touched = now - min(max(0.0, record.age_s), MAX_SECONDS)
        (self._slots.add if awaited is None else self._slots.revive)(segment, note.accesses, touched, now)
        if record.pinned_s > 0:
            self._pins.pin([segment], record.pinned_s)
        return segment

    def _source(self, digest: int) -> NodeId | None:
        """Returns the member of the cluster whose name has this digest, if it is another node."""
        if digest and not self._sources:
            names = (NodeId(name) for name in self._context.record.members if name != self._context.node)
            self._sources = {records.name_digest(name): name for name in names}
        return self._sources.get(digest)

    def memory(self, event: MemoryKept) -> None:
        """All regions are known, and so are the survivors."""
        self._context.store.regions.number_from(event.next_region)
        for number, tenant in event.survivors:
            self._survivors[number] = TenantId(tenant)
        if not event.unchecked:
            self.done()

    def done(self) -> None:
        """All segments were passed in."""
        self._pending = False
        self._awaited.clear()
        self._void.clear()
        behind, self._behind = self._behind, []
        for call in behind:
            call()
        self._release()

    def void(self, tenant: TenantId, keys: Sequence[SegmentKey], slot_bytes: int) -> None:
        """An operator evicts these segments; without keys all of the tenant, of the size `slot_bytes` unless it is 0.
        Those that were not passed in yet are not taken over."""
        if self._pending:
            void = self._void.setdefault(tenant, {})
            void.update(dict.fromkeys(keys) if keys else {slot_bytes: None})
            if len(void) > MAX_VOID:
                self._void[tenant] = {0: None}

    def when_complete(self, call: Callable[[], None]) -> None:
        """Call `call` now or, while segments are still being passed in, behind the last of them."""
        if self._pending:
            self._behind.append(call)
        else:
            call()

    def _owned(self, tenant: TenantId, key: SegmentKey) -> bool:
        segment = self._context.store.get(tenant, key)
        return (segment is not None and segment.owned) or self._context.disk.find(tenant, key) >= 0

    # -- survivors

    def is_survivor(self, connection: ConnectionId) -> bool:
        """Returns True if the process of this connection is a survivor that has not returned."""
        return connection in self._joined

    def joining(self, number: int, tenant: TenantId, session: SessionId) -> tuple[SessionId, ConnectionId] | None:
        """A process joins as the survivor `number`. Returns (session that it joins, 0 for a new one; its earlier
        connection, 0 without one), or None if it is no survivor. `session`: the number of its session at the daemon
        before."""
        if self._survivors.get(number) != tenant:
            return None
        earlier = next((each for each, known in self._joined.items() if known == number), ConnectionId(0))
        return self._sessions.get((tenant, session), SessionId(0)), earlier

    def joined(self, number: int, before: SessionId, now: SessionId, connection: ConnectionId) -> None:
        """The survivor `number` has joined the session `now`, which had the number `before` at the daemon before."""
        self._leave(number)
        self._joined[connection] = number
        if before:
            self._sessions[self._survivors[number], before] = now

    def moved(self, old: ConnectionId, new: ConnectionId) -> None:
        """A process goes on over another connection."""
        number = self._joined.pop(old, None)
        if number is not None:
            self._joined[new] = number

    def hold(self, connection: ConnectionId, at: PoolId, place: SlotRef, *, writes: bool) -> Segment | None:
        """Returns the segment in a slot that a survivor still uses, which the caller pins if it is not READY or is
        leased. If the slot has none it goes to quarantine. None if the slot cannot be one that the survivor uses, or is
        not known."""
        number = self._joined[connection]
        withheld, segment = self._slots.find(at, place)
        if not withheld:
            if self._slots.has_region(at, place.region):
                # Its generation is another one, so that the segment may be another one too.
                self.refuse(connection)
            return None
        assert self._survivors[number] == at.tenant
        if segment is None:
            segment = self._slots.hold(at, place, self._context.now)
            if self._pending and not writes:
                self._awaited[place] = segment
        elif writes:
            self._awaited.pop(place, None)
        return segment

    def refuse(self, connection: ConnectionId) -> None:
        """A grant of a survivor was refused: it does not return."""
        self._refused[self._joined[connection]] = None

    def returned(self, connection: ConnectionId) -> None:
        """A survivor has named all that it holds."""
        number = self._joined[connection]
        if number not in self._refused:
            self.survivor_gone(number)

    def process_gone(self, connection: ConnectionId) -> None:
        """A process is dead or said `Bye`."""
        number = self._joined.pop(connection, None)
        if number is not None:
            self.survivor_gone(number)

    def survivor_gone(self, number: int) -> None:
        """The survivor does not use any slot but those of its grants."""
        tenant = self._survivors.pop(number, None)
        if tenant is None:
            return
        self._refused.pop(number, None)
        self._leave(number)
        if tenant not in self._survivors.values():
            for name in [each for each in self._sessions if each[0] == tenant]:
                del self._sessions[name]
        self._release()

    def _leave(self, number: int) -> None:
        for connection in [each for each, known in self._joined.items() if known == number]:
            del self._joined[connection]

    # -- release

    def _release(self) -> None:
        """Release the slots of tenants without survivors, some at a time, once all segments were passed in."""
        if not (self._pending or self._releasing) and self._releasable():
            self._releasing = True
            self._context.in_slices(self._release_some)

    def _releasable(self) -> bool:
        blocked = dict.fromkeys(self._survivors.values())
        return any(pool.withheld and pool.tenant not in blocked for pool in self._context.store.pools())

    def _release_some(self) -> bool:
        blocked = dict.fromkeys(self._survivors.values())
        for pool in self._context.store.pools():
            if pool.withheld and pool.tenant not in blocked:
                self._slots.release(pool, RELEASED)
                break
        self._releasing = self._releasable()
        return self._releasing

    # -- reports and checks

    def levels(self) -> Iterable[Level]:
        """The gauges of this part."""
        yield from (Level(SURVIVORS, (tenant,), count) for tenant, count in Counter(self._survivors.values()).items())
        free: Counter[str] = Counter()
        for pool in self._context.store.pools():
            if pool.withheld:
                free[pool.tenant] += pool.withheld_free
        yield from (Level(WITHHELD, (tenant,), count) for tenant, count in free.items())

    def pinned(self) -> Iterator[Segment]:
        return self._slots.pinned()

    def census(self) -> dict[str, int]:
        return {
            "survivors": len(self._survivors),
            "kept segments to advertise": len(self._found),
            "orders behind kept segments": len(self._behind),
        }

    def check_integrity(self) -> None:
        numbers = list(self._joined.values())
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) <= set(self._survivors)
        assert set(self._refused) <= set(self._survivors)
        assert {tenant for tenant, _ in self._sessions} <= set(self._survivors.values())
        assert all(segment.state is State.GONE for segment in self._awaited.values())
        assert self._pending or not self._awaited
