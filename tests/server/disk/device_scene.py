"""A device with an arena and without rules: a test gives it instructions and waits for its events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.server.disk.scene import SHARDS, Entry, bytes_of, checksums_of
from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.core.instructions import DiskErase, DiskForget, DiskRead, DiskTrim, DiskWrite
from tokenlake.disk.places import Place, pack_places
from tokenlake.wire.slots import SlotRef
from tokenlake_server.disk.device import Device, Patience, Surroundings
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.files import Files
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.contents import Contents
from tokenlake_server.start.standing_orders import StandingOrders

E = TypeVar("E")
REGION_BYTES = 16 << 20
DEADLINE_S = 30.0
DISK = "/dev/null/disk"
"""The path of the device: its orders cannot be written there."""
QUICK = Patience(
    slow_s=0.5, errors=3, check_s=0.02, most_check_s=0.05, sync_s=0.02, capacity_s=0.05, probe_bytes=2 << 20
)


@dataclass
class Scene:
    """The events of a device, and the memory that it reads into and writes from."""

    arena: Arena = field(default_factory=Arena)
    seen: list[Event] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    device: Device = field(init=False)
    number: int = 0

    def __post_init__(self) -> None:
        self.arena.make(0, REGION_BYTES)

    def post(self, event: Event) -> None:
        with self.changed:
            self.seen.append(event)
            self.changed.notify_all()

    def deliver(self, event: Event) -> bool:
        self.post(event)
        return True

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.seen if isinstance(event, kind)]

    def wait(self, kind: type[E], count: int = 1, where: Callable[[E], bool] = lambda event: True) -> E:
        """Wait until there are `count` events of a kind. Returns the last of these."""
        with self.changed:
            found = self.changed.wait_for(
                lambda: len([each for each in self.of(kind) if where(each)]) >= count, DEADLINE_S
            )
            assert found, f"no {kind.__name__}: {self.seen}"
            return [each for each in self.of(kind) if where(each)][count - 1]

    def views(self, slots: list[SlotRef], slot_bytes: int) -> list[memoryview]:
        return self.arena.slots(slots, slot_bytes)

    def write(self, entries: list[Entry]) -> int:
        """Write segments of one slab. Returns the number of the write."""
        first = entries[0]
        slots = [SlotRef(0, at, 1) for at in range(len(entries))]
        for view, each in zip(self.views(slots, first.slot_bytes), entries, strict=True):
            view[:] = bytes_of(each.key, each.slot_bytes)
        self.number += 1
        self.device.carry_out(
            DiskWrite(
                self.number,
                0,
                first.tenant,
                first.slot_bytes,
                SHARDS,
                b"".join(each.key for each in entries),
                b"".join(slot.pack() for slot in slots),
                pack_places([Place(each.slot, each.generation) for each in entries]),
                b"".join(checksums_of(bytes_of(each.key, each.slot_bytes)) for each in entries),
                b"".join(each.note for each in entries),
            )
        )
        return self.number

    def written(self, entries: list[Entry]) -> bytes:
        """Write segments, and wait. Returns the codes."""
        number = self.write(entries)
        return self.wait(events.DiskWritten, where=lambda event: event.write == number).codes

    def start_read(self, entries: list[Entry], first_slot: int = 100) -> int:
        first = entries[0]
        slots = [SlotRef(0, first_slot + at, 1) for at in range(len(entries))]
        for view in self.views(slots, first.slot_bytes):
            view[:] = bytes(first.slot_bytes)
        self.number += 1
        self.device.carry_out(
            DiskRead(
                self.number,
                0,
                first.tenant,
                first.slot_bytes,
                SHARDS,
                b"".join(each.key for each in entries),
                b"".join(slot.pack() for slot in slots),
                pack_places([Place(each.slot, each.generation) for each in entries]),
            )
        )
        return self.number

    def done(self, fetch: int) -> events.FetchDone:
        return self.wait(events.FetchDone, where=lambda event: event.fetch == fetch)

    def read(self, entries: list[Entry]) -> bytes:
        """Read segments and compare the bytes of those that came. Returns the codes."""
        result = self.done(self.start_read(entries))
        slots = [SlotRef(0, 100 + at, 1) for at in range(len(entries))]
        for at, (view, each) in enumerate(zip(self.views(slots, entries[0].slot_bytes), entries, strict=True)):
            if result.codes[at] == 1:
                assert bytes(view) == bytes_of(each.key, each.slot_bytes)
                size = 8 * SHARDS
                assert result.checksums[at * size : (at + 1) * size] == checksums_of(view)
        return result.codes

    def forget(self, entries: list[Entry]) -> None:
        first = entries[0]
        places = pack_places([Place(each.slot, each.generation) for each in entries])
        keys = b"".join(each.key for each in entries)
        self.device.forget(DiskForget(0, first.tenant, first.slot_bytes, keys, places))

    def erased(self, entries: list[Entry]) -> bytes:
        """Erase segments of one slab, and wait. Returns the codes."""
        first = entries[0]
        places = pack_places([Place(each.slot, each.generation) for each in entries])
        self.number += 1
        number = self.number
        keys = b"".join(each.key for each in entries)
        self.device.carry_out(DiskErase(number, 0, first.tenant, first.slot_bytes, keys, places))
        return self.wait(events.DiskErased, where=lambda event: event.erase == number).codes

    def trim(self, tenant: str, slot_bytes: int, places: int) -> None:
        self.device.forget(DiskTrim(0, tenant, slot_bytes, places))

    def watch_until(self, kind: type[E], count: int = 1) -> E:
        """Let the device look for operations that take too long until there are events of a kind."""
        until = time.monotonic() + DEADLINE_S
        while len(self.of(kind)) < count and time.monotonic() < until:
            self.device.watch(time.monotonic())
            time.sleep(0.02)
        return self.wait(kind, count)


def no_orders() -> StandingOrders:
    """Orders without files that can be written."""
    return StandingOrders(Path("/dev/null/orders"), [DISK])


@contextmanager
def served(
    open_files: Callable[[], Files],
    keys: DiskKeys | None = None,
    patience: Patience = QUICK,
    limit: int | None = None,
    orders: StandingOrders | None = None,
) -> Iterator[Scene]:
    """A device that serves these files, until the block ends."""
    scene = Scene()
    around = Surroundings(
        "c", "node", keys or DiskKeys(), scene.arena, scene.post, scene.deliver, Contents(), orders or no_orders()
    )
    scene.device = Device(0, DISK, limit, open_files, around, patience)
    scene.device.start()
    try:
        yield scene
    finally:
        scene.device.close()
        scene.arena.close()
