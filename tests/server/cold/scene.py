"""A cold tier with an arena and without rules: a test gives it instructions and waits for its events."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.core.instructions import ColdErase, ColdLook, ColdRead, ColdWrite
from tokenlake.disk import NOTE_BYTES
from tokenlake.wire.slots import SlotRef
from tokenlake_server.cold.base import Listed, Reader
from tokenlake_server.cold.directory import DirectoryObjects
from tokenlake_server.cold.names import ColdTenant, path_of, short_of
from tokenlake_server.cold.places import Place
from tokenlake_server.cold.store import ColdStore, Surroundings
from tokenlake_server.cold.upkeep import Patience
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.contents import Contents

E = TypeVar("E")
SLOT = 64 << 10
SHARDS = 2
SIZE = 1 << 30
DEADLINE_S = 10.0
SECRETS = {"a": b"a" * 32, "b": b"b" * 32}
QUICK = Patience(slow_s=0.5, errors=3, check_s=0.02, most_check_s=0.05, full_s=0.05, scan_s=3600, probe_bytes=1 << 14)


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def bytes_of(key: bytes, slot_bytes: int = SLOT) -> bytes:
    return hashlib.shake_128(key).digest(slot_bytes)


def checksums_of(segment: bytes | memoryview, shards: int = SHARDS) -> bytes:
    size = len(segment) // shards
    digests = (xxhash.xxh3_64_intdigest(segment[at : at + size]) for at in range(0, size * shards, size))
    return b"".join(each.to_bytes(8, "little") for each in digests)


def note_of(key: bytes) -> bytes:
    return key + bytes(NOTE_BYTES - len(key))


class QuickPlace:
    """A place that others see at once, with faults that a test switches on."""

    poll_s = 0.02
    late_s = 0.0

    def __init__(self, inner: Place) -> None:
        self._inner = inner
        self.before: Callable[[str, str], None] = lambda call, path: None
        """Is called before each call of the place: with its name, and a path."""
        self.ahead_s: Callable[[], float] = lambda: 0.0
        """By how much the clock of the place is ahead."""

    def read(self, path: str) -> Reader:
        self.before("read", path)
        return self._inner.read(path)

    def write(self, path: str, parts: Iterator[memoryview], nbytes: int) -> None:
        self.before("write", path)
        self._inner.write(path, parts, nbytes)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.before("delete", path)
        self._inner.delete(paths)

    def list(self, folder: str) -> Iterator[Listed]:
        self.before("list", folder)
        for each in self._inner.list(folder):
            yield each._replace(modified_s=each.modified_s + self.ahead_s())

    def require(self) -> None:
        self.before("require", "")
        self._inner.require()

    def close(self) -> None:
        self._inner.close()


@dataclass
class Scene:
    """The events of a cold tier, and the memory that it reads into and writes from."""

    path: Path
    size: int = SIZE
    days: float = 14.0
    patience: Patience = QUICK
    secrets: dict[str, bytes] = field(default_factory=lambda: dict(SECRETS))
    clock: Callable[[], float] = time.time
    before: Callable[[str, str], None] = lambda call, path: None
    inner: Callable[[], Place] | None = None
    """Opens the place; None: the directory `path`."""
    ahead_s: float = 0.0
    evicted_s: float = 0.0
    """The time of the last eviction by an operator."""
    slot_bytes: int = SLOT
    arena: Arena = field(default_factory=Arena)
    seen: list[Event] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    opened: list[QuickPlace] = field(default_factory=list)
    number: int = 0
    store: ColdStore = field(init=False)

    def __post_init__(self) -> None:
        self.arena.make(0, 256 * self.slot_bytes)
        around = Surroundings(
            self.arena,
            self.post,
            Contents(),
            {name: ColdTenant(secret) for name, secret in self.secrets.items()},
            lambda: self.evicted_s,
        )
        self.store = ColdStore(str(self.path), self.open, self.size, self.days, around, self.patience, self.clock)

    def open(self) -> Place:
        place = QuickPlace(self.inner() if self.inner is not None else DirectoryObjects(self.path))
        place.before = lambda call, path: self.before(call, path)
        place.ahead_s = lambda: self.ahead_s
        self.opened.append(place)
        return place

    def post(self, event: Event) -> None:
        with self.changed:
            self.seen.append(event)
            self.changed.notify_all()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.seen if isinstance(event, kind)]

    def wait(self, kind: type[E], count: int = 1, where: Callable[[E], bool] = lambda event: True) -> E:
        """Wait until there are `count` events of a kind. Returns the last of these."""

        def found() -> list[E]:
            return [each for each in self.of(kind) if where(each)]

        with self.changed:
            assert self.changed.wait_for(lambda: len(found()) >= count, DEADLINE_S), f"no {kind.__name__}: {self.seen}"
            return found()[count - 1]

    def slots(self, first: int, count: int) -> list[SlotRef]:
        return [SlotRef(0, first + at, 1) for at in range(count)]

    def start_write(self, numbers: Sequence[int], tenant: str = "a", shards: int = SHARDS) -> int:
        keys = [key_of(number) for number in numbers]
        slots = self.slots(0, len(keys))
        for view, key in zip(self.arena.slots(slots, self.slot_bytes), keys, strict=True):
            view[:] = bytes_of(key, self.slot_bytes)
        self.number += 1
        self.store.carry_out(
            ColdWrite(
                self.number,
                tenant,
                self.slot_bytes,
                shards,
                b"".join(keys),
                b"".join(slot.pack() for slot in slots),
                b"".join(checksums_of(bytes_of(key, self.slot_bytes), shards) for key in keys),
                b"".join(note_of(key) for key in keys),
            )
        )
        return self.number

    def write(self, numbers: Sequence[int], tenant: str = "a", shards: int = SHARDS) -> bytes:
        """Write segments. Returns the codes."""
        number = self.start_write(numbers, tenant, shards)
        return self.wait(events.ColdWritten, where=lambda event: event.write == number).codes

    def start_read(self, numbers: Sequence[int], tenant: str = "a", shards: int = SHARDS) -> int:
        slots = self.slots(128, len(numbers))
        for view in self.arena.slots(slots, self.slot_bytes):
            view[:] = bytes(self.slot_bytes)
        self.number += 1
        keys = b"".join(map(key_of, numbers))
        packed = b"".join(slot.pack() for slot in slots)
        self.store.carry_out(ColdRead(self.number, tenant, self.slot_bytes, shards, keys, packed))
        return self.number

    def done(self, fetch: int) -> events.FetchDone:
        return self.wait(events.FetchDone, where=lambda event: event.fetch == fetch)

    def read(self, numbers: Sequence[int], tenant: str = "a", shards: int = SHARDS) -> bytes:
        """Read segments, and compare all that came. Returns the codes."""
        result = self.done(self.start_read(numbers, tenant, shards))
        views = self.arena.slots(self.slots(128, len(numbers)), self.slot_bytes)
        for at, (view, number) in enumerate(zip(views, numbers, strict=True)):
            if result.codes[at] == 1:
                key = key_of(number)
                assert bytes(view) == bytes_of(key, self.slot_bytes)
                size = 8 * shards
                assert result.checksums[at * size : (at + 1) * size] == checksums_of(view, shards)
                assert result.notes[at * NOTE_BYTES : (at + 1) * NOTE_BYTES] == note_of(key)
        return result.codes

    def look(self, numbers: Sequence[int], tenant: str = "a", slot_bytes: int | None = None) -> list[int]:
        """Which of the segments the index has."""
        keys = b"".join(map(key_of, numbers))
        order = ColdLook(1, tenant, self.slot_bytes if slot_bytes is None else slot_bytes, SHARDS, keys)
        answer = self.store.look(order)
        assert isinstance(answer, events.ColdLooked)
        return list(answer.found)

    def erase(self, numbers: Sequence[int], tenant: str = "a") -> None:
        self.store.erase(ColdErase(tenant, b"".join(map(key_of, numbers))))

    @property
    def session(self) -> Any:
        """The place as it is open."""
        session = self.store._session
        assert session is not None
        return session

    def pass_days(self, days: float) -> None:
        """Let time pass at the place."""
        self.ahead_s += days * 86400
        clock = self.session.catalogue.clock
        before = clock.seconds()
        until(lambda: self.write([self._next()]) and clock.seconds() > before + days * 80000, "the clock is read")

    def _next(self) -> int:
        self.number += 1
        return 1_000_000 + self.number

    def merged(self) -> None:
        """Merge all journals into tables, and let the keeper read them."""
        catalogue = self.session.catalogue
        before, catalogue._merge_s = catalogue.seen.root.sequence, -1e12
        until(lambda: catalogue.seen.root.sequence > before and not self.store.index.recent, "journals are merged")
        catalogue._merge_s = 1e12

    def files(self) -> list[Path]:
        """The objects of segments."""
        return sorted(path for path in self.path.glob("objects/*/*") if not path.name.startswith("."))


def object_of(scene: Scene, number: int, tenant: str = "a") -> Path:
    """The file of a segment."""
    return scene.path / path_of(short_of(ColdTenant(scene.secrets[tenant]).name(key_of(number))))


def stored_bytes(path: Path) -> int:
    """Bytes of all objects of segments, half-written ones included."""
    total = 0
    for each in path.glob("objects/*/*"):
        with contextlib.suppress(FileNotFoundError):
            total += each.stat().st_size
    return total


@contextmanager
def served(scene: Scene) -> Iterator[Scene]:
    """The tier in use."""
    scene.store.start()
    try:
        scene.wait(events.ColdReady)
        yield scene
    finally:
        scene.before = lambda call, path: None
        scene.store.close()


def until(true: Callable[[], object], what: str) -> None:
    """Wait until something is true."""
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)
