"""The disk of a simulated node: places with real bytes, which outlive a crash as far as they were synced."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.sim.arena import SHARDS, Arena
from tests.sim.clock import RandomClock
from tokenlake.core import events, instructions
from tokenlake.disk import NOTE_BYTES, Place, pack_places, unpack_places
from tokenlake.wire import Code
from tokenlake.wire.slots import split_keys, unpack_slots
from tokenlake_testing.driver import NodeDriver


class Life(NamedTuple):
    """One life of the node that has the disk."""

    driver: NodeDriver
    arena: Arena


class Written(NamedTuple):
    """The content of one place."""

    key: bytes
    generation: int
    shards: tuple[bytes, ...]
    checksums: bytes
    note: bytes


class Disk:
    """Carries out the instructions about device 0; the same object serves all lives of the node."""

    def __init__(self, clock: RandomClock, capacity: int) -> None:
        """`capacity`: bytes of all places."""
        self.clock = clock
        self.capacity = capacity
        self.places: dict[tuple[str, int, int], Written] = {}
        """The synced bytes, by tenant, slot size and place."""
        self.index: dict[tuple[str, int, int], None] = {}
        """The places of which the index has a record."""
        self.rate = 1e9
        """Bytes per second that it reports."""
        self.fails = False
        """Writes and reads fail."""
        self.slow_s = 0.0
        """Seconds that each write and read takes more."""
        self._life: Life | None = None

    def start(self, life: Life) -> None:
        """A life of the node begins: report what is on the disk."""
        self._life = life
        life.driver.deliver(events.DiskReady(0, self.capacity, self.rate, self.rate))
        for (tenant, slot_bytes, slot), written in list(self.places.items()):
            if (tenant, slot_bytes, slot) in self.index:
                place = pack_places([Place(slot, written.generation)])
                found = events.DiskFound(0, tenant, slot_bytes, SHARDS, written.key, place, written.note)
                life.driver.deliver(found)
        life.driver.deliver(events.DiskRecovered(0))

    def _later(self, act: Callable[[Life], None]) -> None:
        life = self._life
        assert life is not None

        def due() -> None:
            if not life.driver.stopped:
                if life.driver.frozen:
                    self.clock.after(0.01, due)
                else:
                    act(life)

        self.clock.after(self.clock.delay_s() + self.slow_s, due)

    def write(self, order: instructions.DiskWrite) -> None:
        """See `tokenlake_testing.driver.Disks`."""
        slots, size = unpack_slots(order.slots), len(order.checksums) // len(unpack_slots(order.slots))

        def act(life: Life) -> None:
            codes = bytearray()
            for at, (key, place) in enumerate(zip(split_keys(order.keys), unpack_places(order.places), strict=True)):
                name = order.tenant, order.slot_bytes, place.slot
                if self.fails:
                    codes.append(Code.LOST)
                    continue
                shards = tuple(life.arena.read(slots[at], shard) for shard in range(SHARDS))
                note = order.notes[at * NOTE_BYTES : (at + 1) * NOTE_BYTES]
                checksums = order.checksums[at * size : (at + 1) * size]
                self.places[name] = Written(key, place.generation, shards, checksums, note)
                self.index[name] = None
                codes.append(Code.COMMITTED)
            life.driver.deliver(events.DiskWritten(order.write, bytes(codes)))

        self._later(act)

    def read(self, order: instructions.DiskRead) -> None:
        """See `tokenlake_testing.driver.Disks`."""

        def act(life: Life) -> None:
            codes, found = bytearray(), bytearray()
            wanted = zip(split_keys(order.keys), unpack_places(order.places), unpack_slots(order.slots), strict=True)
            for key, place, slot in wanted:
                written = self.places.get((order.tenant, order.slot_bytes, place.slot))
                sound = written is not None and (written.key, written.generation) == (key, place.generation)
                if self.fails:
                    codes.append(Code.LOST)
                elif written is None or not sound or b"".join(written.shards) != written.checksums:
                    codes.append(Code.BAD_CHECKSUM)
                else:
                    codes.append(Code.LOCAL)
                    for shard, value in enumerate(written.shards):
                        life.arena.write(slot, shard, value)
                    found += written.checksums
                    continue
                found += bytes(8 * SHARDS)
            life.driver.deliver(events.FetchDone(order.fetch, bytes(codes), bytes(found)))

        self._later(act)

    def abort(self, order: instructions.AbortFetch) -> None:
        """See `tokenlake_testing.driver.Disks`."""

    def forget(self, order: instructions.DiskForget) -> None:
        """See `tokenlake_testing.driver.Disks`."""
        for place in unpack_places(order.places):
            self.index.pop((order.tenant, order.slot_bytes, place.slot), None)

    def erase(self, order: instructions.DiskErase) -> None:
        """See `tokenlake_testing.driver.Disks`."""
        names = [(order.tenant, order.slot_bytes, place.slot) for place in unpack_places(order.places)]

        def act(life: Life) -> None:
            if not self.fails:
                for name in names:
                    self.places.pop(name, None)
                    self.index.pop(name, None)
            code = Code.LOST if self.fails else Code.COMMITTED
            life.driver.deliver(events.DiskErased(order.erase, bytes([code]) * len(names)))

        self._later(act)

    def trim(self, order: instructions.DiskTrim) -> None:
        """See `tokenlake_testing.driver.Disks`."""
        for name in [name for name in self.places if name[:2] == (order.tenant, order.slot_bytes)]:
            if name[2] >= order.places:
                del self.places[name]
