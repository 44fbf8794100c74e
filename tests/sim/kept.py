"""The memory of a simulated node whose daemon keeps it for the next one: its regions, its ledger, and the processes
that map it.

::

    Record, CutRegion, CloseRegion --> the ledger, as a driver writes it, an instruction at a time
    the daemon ends, in order or within an event --> the next one is passed what the ledger and the headers say

Also an independent model: after each event the ledger is true, and no slot gets a new segment before its record was
cleared.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from tests.sim.arena import SHARDS, SLOTS, Region
from tokenlake.core import NodeCore, events, instructions
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.memory import Kind, State, ledger
from tokenlake.wire.slots import SlotRef, join_keys, unpack_slots

if TYPE_CHECKING:
    from tests.sim.engine import SimProcess
    from tests.sim.node import SimNode


class Entry(NamedTuple):
    """A region in the table of the ledger."""

    nbytes: int
    tenant: str = ""
    slot_bytes: int = 0


class KeptMemory:
    """Outlives the lives of its node."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.table: dict[int, Entry] = {}
        self.records: dict[tuple[int, int], bytes] = {}
        """By region and slot; a slot without an entry has a cleared record."""
        self.next_region = 0
        self.survivors: dict[int, SimProcess] = {}
        """By number: the processes that have mapped memory of this node."""
        self.clean = False
        """The last life ended in order."""
        self.pending = False
        """Segments of the life before are still being checked."""
        self.ends = False
        """The life is to end with `Sealed`."""
        self.dies_in: int | None = None
        """The life ends within the instructions of an event, when so many were carried out."""

        self.ordered: dict[int, dict[tuple[int, int], bytes]] = {}
        """By number of the order: the records of segments that an operator evicts."""

    # -- orders

    def evict(self, tenant: str, keys: list[SegmentKey]) -> None:
        """An operator evicts these segments of a tenant, all without keys."""
        number = self.node.cluster.next_id()
        self.ordered[number] = {
            where: raw
            for where, raw in self.records.items()
            if self.table[where[0]].tenant == tenant and (not keys or _key_of(raw) in keys)
        }
        self.node.deliver(events.EvictRequested(number, tenant, join_keys(keys)))

    def evicted(self, order: instructions.EvictionDone) -> None:
        """The operator is told that the segments are gone: a later daemon finds none of them."""
        left = [where for where, raw in self.ordered.pop(order.request, {}).items() if self.records.get(where) == raw]
        self.node.cluster.expect(not left, f"{self.node.name}: an operator evicted the segments that {left} still have")

    # -- instructions

    def made(self, region: int, nbytes: int) -> None:
        """The memory of a region is there."""
        self.table[region] = Entry(nbytes)
        self.next_region = max(self.next_region, region + 1)

    def record(self, order: instructions.Record) -> None:
        """See `tokenlake_testing.driver.Ledger`."""
        for place, record in zip(unpack_slots(order.slots), order.records, strict=True):
            name = place.region, place.slot
            if not record:
                self.records.pop(name, None)
            elif place.region in self.table:
                self.records[name] = record

    def cut(self, order: instructions.CutRegion) -> None:
        """See `tokenlake_testing.driver.Ledger`."""
        self.table[order.region] = Entry(order.nbytes, order.tenant, order.slot_bytes)

    def close(self, order: instructions.CloseRegion) -> None:
        """See `tokenlake_testing.driver.Ledger`. The pages are given back: a process that still maps the region sees
        zeros."""
        self.table.pop(order.region, None)
        for slot in range(SLOTS):
            self.records.pop((order.region, slot), None)
        region = self.node.arena.regions.pop(order.region, None)
        if region is not None:
            region.end()

    def sealed(self, order: instructions.Sealed) -> None:
        """See `tokenlake_testing.driver.Ledger`."""
        if self.ends:
            self.node.crash(clean=True)

    def stamped(self, places: list[SlotRef]) -> None:
        """Slots are about to get new generations."""
        for place in places:
            raw = self.records.get((place.region, place.slot))
            told = f"{self.node.name}: the slot {place}"
            self.node.cluster.expect(raw is None, f"{told} gets a segment before its record is cleared")
            held = self.node.arena.regions[place.region].generations[place.slot]
            self.node.cluster.expect(place.generation > held, f"{told} had generation {held} before")

    # -- lives

    def connected(self, process: SimProcess) -> None:
        """A process was given the lock of the daemon."""
        if not process.survivor:
            process.survivor = self.node.cluster.next_id()
        self.survivors[process.survivor] = process

    def gone(self, process: SimProcess) -> None:
        """The driver notices that a process is dead, or maps nothing any more."""
        if self.survivors.pop(process.survivor, None) is not None:
            self.node.deliver(events.SurvivorGone(process.survivor))

    def regions(self) -> dict[int, Region]:
        """The memory that the next life begins with."""
        self.ends, self.dies_in = False, None
        self.ordered.clear()
        known = self.node.arena.regions
        return {region: known[region] for region in self.table}

    def recover(self) -> None:
        """Pass to the rules of a life that begins what the one before left."""
        deliver, clean = self.node.deliver, self.clean
        self.clean = False
        for region, entry in sorted(self.table.items()):
            generations = self.node.arena.regions[region].generations
            packed = struct.pack(f"<{SLOTS}Q", *generations) if entry.slot_bytes else b""
            deliver(events.RegionKept(region, entry.nbytes, entry.tenant, entry.slot_bytes, packed))
        for where in [where for where in self.records if not (clean or self._sound(*where))]:
            del self.records[where]
        found = [self._passed(*where) for where in sorted(self.records)]
        self.survivors = {number: each for number, each in self.survivors.items() if not each.dead}
        survivors = tuple((number, each.tenant) for number, each in self.survivors.items())
        kept = events.MemoryKept(self.node.incarnation - 1, self.next_region, survivors, unchecked=not clean)
        self.pending = not clean
        if clean:
            for each in found:
                deliver(each)
            deliver(kept)
        else:
            deliver(kept)
            self._check(found)

    def _check(self, found: list[events.SegmentsKept]) -> None:
        """Pass the segments to the rules one after the other, as their checks end."""
        life = self.node.life

        def step() -> None:
            if life.stopped:
                return
            if life.frozen:
                self.node.cluster.clock.after(0.01, step)
            elif found:
                self.node.deliver(found.pop())
                self.node.cluster.clock.after(2 * self.node.cluster.clock.delay_s(), step)
            else:
                self.pending = False
                self.node.deliver(events.SegmentsKeptDone())

        self.node.cluster.clock.after(self.node.cluster.clock.delay_s(), step)

    def _sound(self, region: int, slot: int) -> bool:
        """Whether the bytes have the checksums of the record."""
        record = ledger.unpack(self.records[region, slot])
        assert record is not None
        return b"".join(self.node.arena.regions[region].shards[slot]) == record.checksums

    def _passed(self, region: int, slot: int) -> events.SegmentsKept:
        entry = self.table[region]
        place = SlotRef(region, slot, self.node.arena.regions[region].generations[slot])
        return events.SegmentsKept(entry.tenant, entry.slot_bytes, place.pack(), (self.records[region, slot],))

    # -- the model

    def check(self, core: NodeCore) -> None:
        """The ledger has a true record of each READY segment, and no other one: but those that are still being
        checked."""
        name = self.node.name
        ready = {
            (each.place.region, each.place.slot): each for each in core.store.segments() if each.state is State.READY
        }
        for where, segment in ready.items():
            assert where in self.records, f"{name}: the ledger lacks {segment}"
            record = ledger.unpack(self.records[where])
            assert record is not None, f"{name}: the record of {segment} is damaged"
            told = record.generation, record.key, record.checksums
            assert told == (segment.place.generation, segment.key, segment.checksums), f"{name}: {segment}, {record}"
            # A copy whose owner has left the cluster is the owner's from the restart on.
            source = record.source == ledger.name_digest(segment.source) or segment.source is None
            assert source, f"{name}: the source of {segment} is not that of the record"
            assert record.primary == (segment.kind is Kind.PRIMARY), f"{name}: the kind of {segment}, {record}"
            assert len(record.checksums) == 8 * SHARDS
        for where in self.records.keys() - ready.keys():
            assert self.pending, f"{name}: the ledger has a record of {where}, where no segment is READY"
        regions = {region: pool.tenant for pool in core.store.pools() for region in pool.regions}
        assert regions.keys() <= self.table.keys()
        assert all(self.table[region].tenant == NodeId(tenant) for region, tenant in regions.items())


def _key_of(raw: bytes) -> SegmentKey | None:
    found = ledger.unpack(raw)
    return None if found is None else found.key
