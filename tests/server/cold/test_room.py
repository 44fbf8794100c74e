"""The bound on the bytes of a cold tier, and the measurements of its place."""

from __future__ import annotations

import random
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.server.cold.scene import Scene, served, until
from tests.server.cold.test_store import writes
from tokenlake.wire import Code
from tokenlake_server.cold.measurement import TOLD_S, Measured, Measurement
from tokenlake_server.cold.room import Room

HEARD_S = 10.0


@given(st.integers(0, 1 << 30), st.integers(1, 6), st.integers(1, 40))
def test_writers_that_hear_late_keep_the_bound(seed: int, writers: int, objects: int) -> None:
    """Each writer hears of an object of another one up to `HEARD_S` late, and of its own at once."""
    chance = random.Random(seed)
    size = 1000
    nbytes = size // objects
    rooms = [Room(size, HEARD_S) for _ in range(writers)]
    for room in rooms:
        room.announced(0.0)
    written: list[tuple[float, int]] = []
    """(time, writer) of each object."""
    now = 0.0
    for _ in range(200):
        now += chance.uniform(0, 2)
        writer = chance.randrange(writers)
        late = chance.uniform(0, HEARD_S)
        named = sum(nbytes for at, who in written if who == writer or at < now - late)
        if rooms[writer].take(nbytes, named, writers - 1, now):
            assert now >= HEARD_S
            rooms[writer].wrote(nbytes, now)
            written.append((now, writer))
        assert len(written) * nbytes <= size


def test_room_that_was_given_up_is_there_again() -> None:
    room = Room(100, 0.0)
    room.announced(0.0)
    assert room.take(50, 0, 0, 1.0)
    assert not room.take(50, 0, 0, 1.0)
    room.gave_up(50)
    assert room.take(50, 0, 0, 1.0)


def test_a_tier_without_room_for_one_object_takes_none(tmp_path: Path) -> None:
    with served(Scene(tmp_path, size=4096)) as scene:
        until(lambda: scene.store.state.writable, "others have heard of it")
        assert scene.write([1]) == bytes([Code.LOST])
        assert scene.store.state.refused == 1
        assert scene.files() == []


def test_measurements_are_told_when_they_change() -> None:
    measured = Measured(0.001, 1e9, 1e9)
    measurement = Measurement(measured)
    later = time.monotonic() + TOLD_S + 1
    assert measurement.to_tell(later) is None
    for at in range(30):
        # Two reads of 0.1 s at a time.
        measurement.began_to_read(0.05)
        for _ in range(2):
            measurement.began(at, read=True)
        for _ in range(2):
            measurement.ended(1 << 20, at + 0.1, read=True)
    told = measurement.to_tell(later)
    assert told is not None
    assert 0.04 < told.latency_s < 0.05
    assert 0.8 * (2 << 20) / 0.1 < told.read_bytes_per_s < 1.2 * (2 << 20) / 0.1
    assert told.write_bytes_per_s == 1e9
    assert measurement.to_tell(later + 1) is None
    for at in range(100):
        measurement.began(at, read=False)
        measurement.ended(1 << 20, at + 1e-4, read=False)
    assert measurement.to_tell(later + 1) is None
    assert measurement.to_tell(later + TOLD_S + 1) is not None


def test_a_slow_place_serves_and_is_measured(tmp_path: Path) -> None:
    with served(Scene(tmp_path)) as scene:
        writes(scene, list(range(8)))
        fast = scene.store.state.latency_s

        def slow(call: str, path: str) -> None:
            time.sleep(0.05)

        scene.before = slow
        for _ in range(3):
            assert scene.read(list(range(8))) == bytes([Code.LOCAL]) * 8
        state = scene.store.state
        assert state.serving
        assert state.latency_s > max(fast, 0.03)
