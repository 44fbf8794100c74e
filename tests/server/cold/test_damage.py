"""Damage of every kind, by accident and by intent: each is a miss, never other bytes, and never a hang."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from tests.server.cold.scene import SLOT, Scene, key_of, note_of, object_of, served, stored_bytes, until
from tests.server.cold.test_store import writes
from tokenlake.core import events
from tokenlake.wire import Code
from tokenlake_server.cold import sealed
from tokenlake_server.cold.names import ColdTenant, short_of
from tokenlake_server.cold.records import MAX_ROOT, Kind
from tokenlake_server.cold.sealed import HEAD_BYTES, object_bytes

LOCAL, LOST, BAD, COMMITTED = (bytes([code]) for code in (Code.LOCAL, Code.LOST, Code.BAD_CHECKSUM, Code.COMMITTED))
MISSES = {Code.LOST, Code.BAD_CHECKSUM}


def require_miss(scene: Scene, number: int) -> None:
    """The segment is a miss, its object goes, and it can be written again."""
    assert set(scene.read([number])) <= MISSES
    assert scene.look([number]) == [0]
    until(lambda: not object_of(scene, number).is_file(), "the object is removed")
    assert scene.write([number]) == COMMITTED
    assert scene.read([number]) == LOCAL


def cut(at: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, at if at >= 0 else path.stat().st_size + at)


def flip(at: int, bit: int = 1) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= bit
        path.write_bytes(data)

    return damage


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    "damage",
    [
        *[cut(at) for at in (0, 1, 100, HEAD_BYTES, HEAD_BYTES + 1, -1, -17)],
        *[flip(at) for at in (0, 8, 16, 20, 50, 80, 88, 92, 96, 150, HEAD_BYTES, HEAD_BYTES + 999, -17, -1)],
        append,
        lambda path: path.write_bytes(bytes(object_bytes(SLOT))),
        lambda path: path.write_bytes(os.urandom(object_bytes(SLOT))),
        lambda path: os.truncate(path, 1 << 40),
        lambda path: path.write_bytes(path.read_bytes()[:HEAD_BYTES].ljust(object_bytes(SLOT), b"\0")),
    ],
)
def test_a_damaged_object_is_a_miss(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])
        damage(object_of(scene, 1))
        require_miss(scene, 1)


def test_every_byte_of_an_object_counts(tmp_path: Path) -> None:
    """A flipped bit anywhere is a miss, or changes nothing (the zeros behind the sealed part)."""
    scene = Scene(tmp_path, slot_bytes=4096)
    with served(scene):
        writes(scene, [1])
        path = object_of(scene, 1)
        sound = path.read_bytes()
        chance = random.Random(7)
        for _ in range(150):
            data = bytearray(sound)
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
            code = scene.read([1])
            assert code == LOCAL or set(code) <= MISSES
            if code != LOCAL:
                until(lambda: not path.exists(), "it is removed")
                scene.store.index.added(
                    short_of(ColdTenant(scene.secrets["a"]).name(key_of(1))),
                    sealed_kind(scene),
                    scene.session.catalogue.clock.minute(),
                )
            path.write_bytes(sound)
        assert scene.read([1]) == LOCAL


def sealed_kind(scene: Scene) -> Kind:
    return scene.store.index.kinds.all[0]


def test_swapped_objects_are_misses(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1, 2])
        one, two = object_of(scene, 1), object_of(scene, 2)
        first = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(first)
        assert set(scene.read([1, 2])) <= MISSES


def test_parts_of_one_object_in_another_are_misses(tmp_path: Path) -> None:
    size = 2 << 20
    with served(Scene(tmp_path, slot_bytes=size)) as scene:
        writes(scene, [1, 2])
        one, two = (object_of(scene, number) for number in (1, 2))
        data, other = bytearray(one.read_bytes()), two.read_bytes()
        piece = sealed.PIECE_BYTES + sealed.TAG_BYTES
        swapped = data[:HEAD_BYTES] + data[HEAD_BYTES + piece :] + data[HEAD_BYTES : HEAD_BYTES + piece]
        one.write_bytes(swapped)
        two.write_bytes(other[:HEAD_BYTES] + data[HEAD_BYTES:])
        assert set(scene.read([1, 2])) <= MISSES


def test_an_object_of_another_tenant_is_a_miss(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1], "b")
        writes(scene, [1], "a")
        shutil.copy(object_of(scene, 1, "b"), object_of(scene, 1, "a"))
        assert scene.read([1], "a") == BAD
        assert scene.read([1], "b") == LOCAL


def test_a_segment_with_other_shards_is_a_miss(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])
        assert scene.read([1], shards=4) == BAD


def test_a_segment_of_another_size_is_a_miss(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])
    with served(Scene(tmp_path, slot_bytes=2 * SLOT)) as scene:
        assert scene.look([1]) == [0]
        assert scene.read([1]) == BAD


def test_an_object_with_other_checksums_is_a_miss(tmp_path: Path) -> None:
    """Sealed with the right key, by a writer whose memory was not what the engine had written."""
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])
        tenant = ColdTenant(scene.secrets["a"])
        stored = sealed.Stored(note_of(key_of(1)), bytes(16), b"")
        room, idle = sealed.room_for_piece(), Scene(tmp_path)
        op = _Free()
        parts = sealed.parts(tenant, tenant.name(key_of(1)), memoryview(bytearray(SLOT)), 2, stored, room, op)
        object_of(scene, 1).write_bytes(b"".join(map(bytes, parts)))
        assert idle.seen == []
        require_miss(scene, 1)


class _Free:
    def touching(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize("kind", ["symlink", "pipe", "folder", "dangling", "loop"])
def test_what_is_no_file_is_a_miss(tmp_path: Path, kind: str) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])
        path = object_of(scene, 1)
        path.rename(outside)
        match kind:
            case "symlink":
                path.symlink_to(outside)
            case "pipe":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "dangling":
                path.symlink_to("/nowhere/else")
            case "loop":
                path.symlink_to(path.name)
        assert set(scene.read([1])) <= MISSES
        assert outside.exists()
    outside.unlink()


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])
        folder = object_of(scene, 1).parent
        folder.rename(outside)
        folder.symlink_to(outside)
        assert set(scene.read([1])) <= MISSES
        assert scene.write([1]) == LOST
    assert len(list(outside.iterdir())) == 1
    shutil.rmtree(outside)


def test_foreign_files_stay_and_do_no_harm(tmp_path: Path) -> None:
    for path in ("objects/ab/foreign", "objects/zz/00000000000000", "index/journal/x", "index/table/x", "file", "x/y"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"foreign")
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1, 2])
        upkeep = scene.session.upkeep
        for folder in range(256):
            upkeep.scan(folder)
        assert scene.read([1, 2]) == LOCAL * 2
        assert upkeep.scanned == 0
    assert (tmp_path / "objects/ab/foreign").exists()
    assert (tmp_path / "index/journal/x").exists()


# -- the index


def index_files(path: Path) -> list[Path]:
    return [each for each in path.glob("index/**/*") if each.is_file()]


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        cut(0),
        cut(10),
        cut(-1),
        flip(0),
        flip(12),
        flip(30),
        flip(-1),
        append,
        lambda path: path.write_bytes(os.urandom(5000)),
        lambda path: os.truncate(path, MAX_ROOT + (1 << 40)),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
        become_pipe,
    ],
)
@pytest.mark.parametrize("part", ["root", "table", "journal"])
def test_a_damaged_index_is_a_miss_that_heals(tmp_path: Path, part: str, damage: Callable[[Path], object]) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1, 2, 3])
        scene.merged()
        writes(scene, [4, 5])
    for path in index_files(tmp_path):
        if part in str(path):
            damage(path)
    with served(Scene(tmp_path)) as scene:
        for number in range(1, 6):
            code = scene.read([number]) if scene.look([number]) == [1] else LOST
            assert code == LOCAL or set(code) <= MISSES
        upkeep = scene.session.upkeep
        for folder in range(256):
            upkeep.scan(folder)
        assert scene.look([1, 2, 3, 4, 5]) == [1] * 5
        assert scene.read([1, 2, 3, 4, 5]) == LOCAL * 5
        scene.store.index.check_integrity()


def test_an_index_that_was_removed_is_found_again(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1, 2, 3])
    shutil.rmtree(tmp_path / "index")
    with served(Scene(tmp_path)) as scene:
        assert scene.look([1, 2, 3]) == [0, 0, 0]
        upkeep = scene.session.upkeep
        for folder in range(256):
            upkeep.scan(folder)
        assert upkeep.scanned == 3
        assert scene.read([1, 2, 3]) == LOCAL * 3


def test_an_object_of_no_entry_that_was_evicted(tmp_path: Path) -> None:
    """Its writer died before its journal, and an operator evicted the whole tenant: no index named it."""
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1, 2, 3])
    shutil.rmtree(tmp_path / "index")
    with served(Scene(tmp_path, evicted_s=time.time())) as scene:
        upkeep = scene.session.upkeep
        for folder in range(256):
            upkeep.scan(folder)
        assert upkeep.scanned == 0
        assert not scene.files()
        assert scene.look([1, 2, 3]) == [0, 0, 0]


def test_an_old_index_costs_misses_only(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1, 2, 3])
    old = {path: path.read_bytes() for path in index_files(tmp_path)}
    with served(Scene(tmp_path)) as scene:
        scene.erase([1])
        until(lambda: not object_of(scene, 1).exists(), "it is deleted")
        writes(scene, [4])
    for path in index_files(tmp_path):
        path.unlink()
    for path, data in old.items():
        path.write_bytes(data)
    with served(Scene(tmp_path)) as scene:
        assert scene.look([1, 2, 3, 4]) == [1, 1, 1, 0]
        assert scene.read([1, 2, 3]) == LOST + LOCAL * 2
        assert scene.look([1]) == [0]


def test_objects_that_vanish_are_misses(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1, 2])
        object_of(scene, 1).unlink()
        assert scene.read([1, 2]) == LOST + LOCAL
        assert scene.look([1, 2]) == [0, 1]
        assert scene.store.state.vanished == 1


def test_half_written_files_are_removed_in_time(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])
        folder = object_of(scene, 1).parent
        old, young = folder / ".x.old", folder / ".x.young"
        for path in (old, young):
            path.write_bytes(b"half")
        os.utime(old, (1e9, 1e9))
        upkeep = scene.session.upkeep
        upkeep.scan(int(folder.name, 16))
        assert not old.exists()
        assert young.exists()
        assert scene.read([1]) == LOCAL


# -- a place that fails


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.EACCES, errno.ENODEV, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["read", "write"])
def test_a_place_that_fails_is_set_aside_and_comes_back(tmp_path: Path, call: str, error: int) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])

        def fail(name: str, path: str) -> None:
            if name == call:
                raise OSError(error, "injected")

        scene.before = fail
        codes = [scene.read([1]) if call == "read" else scene.write([number]) for number in range(10, 20)]
        assert all(set(code) <= MISSES for code in codes)
        scene.wait(events.ColdGone)
        assert scene.look([1]) == [0]
        assert scene.write([50]) == scene.read([1]) == LOST
        scene.before = lambda name, path: None
        scene.wait(events.ColdReady, 2)
        assert scene.look([1]) == [1]
        assert scene.read([1]) == LOCAL
        writes(scene, [60])


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_place_goes_on_reading(tmp_path: Path, error: int) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])

        def full(name: str, path: str) -> None:
            if name == "write" and path.startswith("objects"):
                raise OSError(error, "injected")

        scene.before = full
        assert scene.write([2, 3]) == LOST * 2
        assert scene.read([1]) == LOCAL
        assert scene.store.state.serving
        assert "full" in scene.store.state.problem
        scene.before = lambda name, path: None
        writes(scene, [2, 3])
        assert not scene.of(events.ColdGone)


def holding(released: threading.Event, call: str = "") -> Callable[[str, str], None]:
    """Calls of the place, or one kind of them, do not return until `released` is set."""

    def hold(name: str, path: str) -> None:
        if call in ("", name):
            released.wait(60)

    return hold


@pytest.mark.parametrize("call", ["read", "write", "list", "require", "delete"])
def test_a_place_that_hangs_holds_nothing(tmp_path: Path, call: str) -> None:
    """All that waits or runs ends, the memory is not touched later, and the daemon ends."""
    released = threading.Event()
    scene = Scene(tmp_path)
    with served(scene):
        writes(scene, [1, 2])
        scene.before = holding(released, call)
        scene.erase([2])
        fetch, write = scene.start_read([1] * 6), scene.start_write([10, 11, 12, 13])

        def set_aside() -> bool:
            scene.store.watch(time.monotonic())
            return bool(scene.of(events.ColdGone))

        until(set_aside, "it is set aside")
        codes = scene.done(fetch).codes + scene.wait(events.ColdWritten, where=lambda event: event.write == write).codes
        assert set(codes) <= {*MISSES, Code.LOCAL, Code.COMMITTED}
        if call == "read":
            assert codes[:6] == LOST * 6
            view = scene.arena.slots(scene.slots(128, 1), SLOT)[0]
            view[:] = b"x" * SLOT
            released.set()
            until(lambda: scene.store._left_behind == 0, "the threads return")
            assert bytes(view) == b"x" * SLOT
        released.set()
        scene.before = lambda name, path: None
        scene.wait(events.ColdReady, 2)
        until(lambda: scene.look([1]) == [1], "the index is read")
        assert scene.read([1]) == LOCAL


def test_a_daemon_ends_while_its_place_hangs(tmp_path: Path) -> None:
    released = threading.Event()
    scene = Scene(tmp_path)
    scene.store.start()
    scene.wait(events.ColdReady)
    scene.before = holding(released)
    fetch = scene.start_read([1])
    ended = threading.Thread(target=scene.store.close)
    ended.start()
    ended.join(scene.store._patience.close_s + 5)
    assert not ended.is_alive()
    assert scene.done(fetch).codes == LOST
    released.set()


def test_a_place_that_hangs_at_the_start_is_opened_later(tmp_path: Path) -> None:
    released = threading.Event()
    scene = Scene(tmp_path)
    scene.before = holding(released)
    scene.store.start()
    assert scene.look([1]) == [0]
    assert scene.write([1]) == scene.read([1]) == LOST
    released.set()
    scene.wait(events.ColdReady)
    writes(scene, [1])
    scene.store.close()


def test_an_aborted_read_ends_at_once(tmp_path: Path) -> None:
    released = threading.Event()
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])
        scene.before = holding(released, "read")
        fetch = scene.start_read([1])
        scene.store.abort(fetch)
        assert scene.done(fetch).codes == LOST
        scene.store.abort(fetch)
        released.set()
        assert scene.look([1]) == [1]
        assert scene.read([1]) == LOCAL


def test_a_directory_that_is_removed_and_comes_back(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with served(Scene(place)) as scene:
        writes(scene, [1])
        place.rename(tmp_path / "away")
        scene.wait(events.ColdGone)
        assert set(scene.read([1])) <= MISSES
        place.mkdir()
        scene.wait(events.ColdReady, 2)
        assert scene.look([1]) == [0]
        writes(scene, [1])


def test_files_that_vanish_while_the_tier_works(tmp_path: Path) -> None:
    """Somebody removes everything in the directory, again and again."""
    with served(Scene(tmp_path)) as scene:
        for number in range(20):
            writes(scene, [number])
            for each in tmp_path.iterdir():
                shutil.rmtree(each, ignore_errors=True)
            code = scene.read([number])
            assert code == LOCAL or set(code) <= MISSES
        assert stored_bytes(tmp_path) >= 0


def test_clocks_that_differ_by_years(tmp_path: Path) -> None:
    with (
        served(Scene(tmp_path, clock=lambda: 1.0e9)) as old,
        served(Scene(tmp_path, clock=lambda: 4.0e9)) as new,
    ):
        writes(old, [1, 2])
        until(lambda: new.look([1, 2]) == [1, 1], "the other one hears of both")
        new.erase([1])
        until(lambda: old.look([1, 2]) == [0, 1], "the first one hears of the eviction")
        writes(old, [1])
        until(lambda: new.look([1]) == [1], "the other one hears that it is there again")
        assert new.read([1, 2]) == LOCAL * 2
        for scene in (old, new):
            assert scene.session.upkeep.expire() == 0
