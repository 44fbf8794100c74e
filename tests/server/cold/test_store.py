"""The cold tier with its threads: what is written is read, by this process and by others, and found by the index."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.server.cold.scene import DEADLINE_S, SECRETS, SLOT, Scene, key_of, object_of, served, stored_bytes, until
from tokenlake.core import events
from tokenlake.wire import Code
from tokenlake_server.cold.records import ERASED, REMOVED
from tokenlake_server.cold.sealed import object_bytes
from tokenlake_server.cold.upkeep import Erasure

COMMITTED, EXISTS, LOCAL, LOST = (bytes([code]) for code in (Code.COMMITTED, Code.EXISTS, Code.LOCAL, Code.LOST))


def writes(scene: Scene, numbers: list[int], tenant: str = "a") -> None:
    """Write segments, as soon as the tier takes them."""
    until(lambda: scene.write(numbers[:1], tenant) in (COMMITTED, EXISTS), "it takes segments")
    assert scene.write(numbers[1:], tenant) == COMMITTED * (len(numbers) - 1)


def test_segments_are_written_found_and_read(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        assert scene.look([1, 2]) == [0, 0]
        writes(scene, [1, 2, 3])
        assert scene.look([1, 9, 3]) == [1, 0, 1]
        assert scene.look([1], slot_bytes=2 * SLOT) == [0]
        assert scene.read([1, 2, 3, 9]) == LOCAL * 3 + LOST
        assert scene.write([1, 4]) == EXISTS + COMMITTED
        state = scene.store.state
        assert (state.objects, state.nbytes) == (4, 4 * object_bytes(SLOT))
        scene.store.index.check_integrity()


def test_another_process_with_the_secret_finds_them_all(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, list(range(20)))
    with served(Scene(tmp_path, secrets={"other name": SECRETS["a"]})) as scene:
        assert scene.look(list(range(21)), "other name") == [1] * 20 + [0]
        assert scene.read(list(range(20)), "other name") == LOCAL * 20


def test_processes_hear_of_each_other_while_they_run(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as one, served(Scene(tmp_path)) as other:
        writes(one, [1, 2])
        until(lambda: other.look([1, 2]) == [1, 1], "the other one hears of both")
        assert other.read([1, 2]) == LOCAL * 2
        assert other.write([1]) == EXISTS
        other.erase([1])
        assert other.look([1, 2]) == [0, 1]
        until(lambda: one.look([1, 2]) == [0, 1], "the first one hears of the eviction")
        until(lambda: len(one.files()) == 1, "the object is deleted")


def test_another_tenant_finds_nothing_and_reads_nothing(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])
        assert scene.look([1], "b") == [0]
        assert scene.read([1], "b") == LOST
        writes(scene, [1], "b")
        assert len(scene.files()) == 2
        assert scene.read([1], "a") == scene.read([1], "b") == LOCAL


def test_a_tenant_without_a_name_here_is_a_miss(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        assert scene.look([1], "c") == [0]
        assert scene.read([1], "c") == LOST
        assert scene.write([1], "c") == LOST


def test_files_tell_nothing(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1, 2])
        until(lambda: list(tmp_path.glob("index/journal/*")), "there is a journal")
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    names = "".join(str(path) for path in tmp_path.rglob("*"))
    for number in (1, 2):
        assert key_of(number) not in everything
        assert key_of(number)[:8] not in everything
        assert key_of(number).hex()[:12] not in names
    assert SECRETS["a"] not in everything
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*"))


def test_an_eviction_of_all_of_a_tenant(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1, 2])
        writes(scene, [1], "b")
        scene.erase([])
        assert scene.look([1, 2]) == [0, 0]
        until(lambda: len(scene.files()) == 1, "the objects are deleted")
        assert scene.read([1], "b") == LOCAL
        assert scene.write([1]) == COMMITTED
        assert scene.look([1]) == [1]


def test_objects_that_were_not_used_expire(tmp_path: Path) -> None:
    with served(Scene(tmp_path, days=2)) as scene:
        writes(scene, [1, 2])
        upkeep = scene.session.upkeep
        assert upkeep.expire() == 0
        scene.pass_days(1)
        assert scene.read([1]) == LOCAL
        scene.pass_days(1.5)
        assert upkeep.expire() > 0
        assert scene.look([1, 2]) == [1, 0]
        until(lambda: not object_of(scene, 2).exists(), "the object is deleted")
        assert object_of(scene, 1).exists()


def test_a_full_tier_loses_the_longest_unused(tmp_path: Path) -> None:
    size = 50 * object_bytes(SLOT)
    with served(Scene(tmp_path, size=size)) as scene:
        number = 0
        end = time.monotonic() + DEADLINE_S
        while number < 300:
            assert time.monotonic() < end, "objects expire"
            if scene.write([number]) == COMMITTED:
                number += 1
                scene.ahead_s += 120
            assert stored_bytes(tmp_path) <= size
        assert scene.look([299, 298, 0]) == [1, 1, 0]
        assert 20 < scene.store.state.objects <= 50
        scene.store.index.check_integrity()


def test_the_bound_holds_with_several_writers(tmp_path: Path) -> None:
    size = 60 * object_bytes(SLOT)
    scenes = [Scene(tmp_path, size=size) for _ in range(3)]
    with served(scenes[0]), served(scenes[1]), served(scenes[2]):
        most = 0
        for number in range(240):
            scenes[number % 3].start_write([1000 * (number % 3) + number])
            most = max(most, stored_bytes(tmp_path))
        for scene in scenes:
            scene.wait(events.ColdWritten, 80)
        assert 0 < most <= size
        assert stored_bytes(tmp_path) <= size
        assert sum(scene.store.state.refused for scene in scenes) > 0


@pytest.mark.parametrize("kind", [ERASED, REMOVED])
def test_what_was_removed_can_be_written_again(tmp_path: Path, kind: int) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, [1])
        names = scene.store._around.tenants["a"].shorts(key_of(1)).tolist()
        scene.store._erase(Erasure(tuple(names), kind))
        until(lambda: not scene.files(), "the object is deleted")
        assert scene.look([1]) == [0]
        assert scene.write([1]) == COMMITTED
        assert scene.read([1]) == LOCAL
