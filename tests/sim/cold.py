"""The cold tier of a simulated cluster: objects with real bytes that outlive all nodes, and faults of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.sim.arena import SHARDS, content
from tests.sim.clock import RandomClock
from tests.sim.disk import Life
from tokenlake.core import events, instructions
from tokenlake.disk import NOTE_BYTES
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake.wire.slots import split_keys, unpack_slots


class Object(NamedTuple):
    """One object of the tier."""

    shards: tuple[bytes, ...]
    checksums: bytes
    note: bytes


Name = tuple[str, int, bytes]


class Cold:
    """The objects, and what is wrong with the tier now."""

    def __init__(self, clock: RandomClock) -> None:
        self.clock = clock
        self.objects: dict[Name, Object] = {}
        self.index: dict[Name, None] = {}
        """What the indices of all nodes name: also objects that are gone, and not all that are there."""
        self.latency_s, self.rate = 0.001, 1e9
        self.fails = False
        """Reads and writes fail."""
        self.full = False
        """Writes fail."""
        self.slow_s = 0.0
        """Seconds that each read and write takes more."""
        self.late_s = 0.0
        """Seconds until a look is answered."""


class ColdPort:
    """Carries out the instructions of one node about the tier, through all its lives."""

    def __init__(self, cold: Cold, expect: Callable[[bool, str], None]) -> None:
        """`expect`: as of `World`."""
        self.cold = cold
        self._expect = expect
        self._life: Life | None = None
        self._reading: dict[int, instructions.ColdRead] = {}

    def start(self, life: Life) -> None:
        """A life of the node begins, or the tier came back."""
        if self._life is not life:
            self._reading.clear()
        self._life = life
        if not self.cold.fails:
            life.driver.deliver(events.ColdReady(self.cold.latency_s, self.cold.rate, self.cold.rate))

    def gone(self) -> None:
        """The node finds that the tier cannot be used."""
        if self._life is not None:
            self._life.driver.deliver(events.ColdGone("no answer"))

    def back(self) -> None:
        """The node finds the tier again."""
        if self._life is not None:
            self.start(self._life)

    def _later(self, seconds: float, act: Callable[[Life], None]) -> None:
        life = self._life
        assert life is not None

        def due() -> None:
            if not life.driver.stopped:
                if life.driver.frozen:
                    self.cold.clock.after(0.01, due)
                else:
                    act(life)

        self.cold.clock.after(seconds, due)

    def look(self, order: instructions.ColdLook) -> None:
        """See `tokenlake_testing.driver.ColdStore`."""
        names = [(order.tenant, order.slot_bytes, key) for key in split_keys(order.keys)]
        found = bytes(name in self.cold.index for name in names)
        self._later(self.cold.late_s, lambda life: life.driver.deliver(events.ColdLooked(order.look, found)))

    def read(self, order: instructions.ColdRead) -> None:
        """See `tokenlake_testing.driver.ColdStore`."""
        self._reading[order.fetch] = order

        def act(life: Life) -> None:
            if self._reading.pop(order.fetch, None) is None:
                return
            codes, sums, notes = bytearray(), bytearray(), bytearray()
            for key, slot in zip(split_keys(order.keys), unpack_slots(order.slots), strict=True):
                name = order.tenant, order.slot_bytes, key
                found = self.cold.objects.get(name)
                if self.cold.fails or found is None:
                    codes.append(Code.LOST)
                elif b"".join(found.shards) != found.checksums:
                    codes.append(Code.BAD_CHECKSUM)
                else:
                    codes.append(Code.LOCAL)
                    for shard, value in enumerate(found.shards):
                        life.arena.write(slot, shard, value)
                    sums += found.checksums
                    notes += found.note
                    continue
                self.cold.index.pop(name, None)
                sums += bytes(8 * SHARDS)
                notes += bytes(NOTE_BYTES)
            life.driver.deliver(events.FetchDone(order.fetch, bytes(codes), bytes(sums), notes=bytes(notes)))

        self._later(self.cold.clock.delay_s() + self.cold.slow_s, act)

    def abort(self, order: instructions.AbortFetch) -> None:
        """See `tokenlake_testing.driver.ColdStore`."""

        def act(life: Life) -> None:
            read = self._reading.pop(order.fetch, None)
            if read is not None:
                count = len(split_keys(read.keys))
                lost, sums, notes = bytes([Code.LOST]) * count, bytes(8 * SHARDS * count), bytes(NOTE_BYTES * count)
                life.driver.deliver(events.FetchDone(order.fetch, lost, sums, notes=notes))

        if order.fetch in self._reading:
            self._later(0.005, act)

    def write(self, order: instructions.ColdWrite) -> None:
        """See `tokenlake_testing.driver.ColdStore`."""
        keys, slots = split_keys(order.keys), unpack_slots(order.slots)
        size = len(order.checksums) // len(keys)

        def act(life: Life) -> None:
            codes = bytearray()
            for at, (key, slot) in enumerate(zip(keys, slots, strict=True)):
                name = order.tenant, order.slot_bytes, key
                if self.cold.fails or self.cold.full:
                    codes.append(Code.LOST)
                    continue
                if name in self.cold.index:
                    codes.append(Code.EXISTS)
                    continue
                shards = tuple(life.arena.read(slot, shard) for shard in range(SHARDS))
                right = shards == content(order.tenant, SegmentKey(key)) or life.arena.flipped(slot)
                self._expect(right, "wrong bytes are written to the cold tier")
                note = order.notes[at * NOTE_BYTES : (at + 1) * NOTE_BYTES]
                self.cold.objects[name] = Object(shards, order.checksums[at * size : (at + 1) * size], note)
                self.cold.index[name] = None
                codes.append(Code.COMMITTED)
            life.driver.deliver(events.ColdWritten(order.write, bytes(codes)))

        self._later(self.cold.clock.delay_s() + self.cold.slow_s, act)

    def erase(self, order: instructions.ColdErase) -> None:
        """See `tokenlake_testing.driver.ColdStore`."""
        keys = set(split_keys(order.keys))
        for name in list(self.cold.objects | self.cold.index):
            tenant, slot_bytes, key = name
            named = key in keys if keys else order.slot_bytes in (0, slot_bytes)
            if tenant == order.tenant and named:
                self.cold.objects.pop(name, None)
                self.cold.index.pop(name, None)
