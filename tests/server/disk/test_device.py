"""A device with its threads: what it writes it reads again, and how it ends, fails and comes back."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.robustness.live import wait_until
from tests.server.disk.device_scene import DISK, Scene, served
from tests.server.disk.medium import Inode, Medium, MediumFiles
from tests.server.disk.scene import bytes_of, entry
from tokenlake.core import events
from tokenlake.disk.places import SLAB_BYTES, Place, slab_bytes, unpack_places
from tokenlake.wire import Code
from tokenlake_server.disk.check import THREADS
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.files import DirectoryFiles
from tokenlake_server.disk.store import OWN_BYTES
from tokenlake_server.start.standing_orders import StandingOrders

LOCAL, LOST, COMMITTED, BAD = Code.LOCAL, Code.LOST, Code.COMMITTED, Code.BAD_CHECKSUM
SEGMENTS = [entry(number, number) for number in range(5)]


def recovered(scene: Scene) -> list[Place]:
    scene.wait(events.DiskRecovered)
    return [place for found in scene.of(events.DiskFound) for place in unpack_places(found.places)]


@contextmanager
def on(medium: Medium, *, write: bool = True, orders: StandingOrders | None = None) -> Iterator[Scene]:
    """A device on this medium that serves; `write`: it has written SEGMENTS."""
    with served(lambda: MediumFiles(medium), orders=orders) as scene:
        scene.wait(events.DiskRecovered)
        if write:
            scene.written(SEGMENTS)
        yield scene


@contextmanager
def troubled(*, write: bool = True, orders: StandingOrders | None = None) -> Iterator[tuple[Scene, Trouble]]:
    """The same on a medium of its own, of which things may go wrong."""
    trouble = Trouble(Medium())
    with on(trouble.medium, write=write, orders=orders) as scene:
        yield scene, trouble


@pytest.mark.parametrize("keys", [DiskKeys(), DiskKeys([b"k" * 32])])
@pytest.mark.parametrize("slot_bytes", [1000, 8192])
def test_segments_come_back_after_a_restart(tmp_path: Path, keys: DiskKeys, slot_bytes: int) -> None:
    segments = [entry(number, number, slot_bytes=slot_bytes) for number in range(20)]
    with served(lambda: DirectoryFiles(tmp_path), keys) as scene:
        assert not recovered(scene)
        assert scene.written(segments) == bytes([COMMITTED]) * 20
        assert scene.read(segments) == bytes([LOCAL]) * 20
        scene.forget(segments[3:5])
    with served(lambda: DirectoryFiles(tmp_path), keys) as scene:
        left = segments[:3] + segments[5:]
        assert recovered(scene) == [Place(each.slot, each.generation) for each in left]
        (found,) = scene.of(events.DiskFound)
        assert found.keys == b"".join(each.key for each in left)
        assert found.notes == b"".join(each.note for each in left)
        assert scene.read(left) == bytes([LOCAL]) * 18


def test_the_events_of_a_start_come_in_order() -> None:
    medium = Medium()
    for _ in range(2):
        with served(lambda: MediumFiles(medium)) as scene:
            scene.wait(events.DiskRecovered)
            kinds = [type(event) for event in scene.seen]
            (ready,) = scene.of(events.DiskReady)
            assert ready.read_bytes_per_s > 0 < ready.write_bytes_per_s
            scene.written(SEGMENTS)
    assert kinds == [events.DiskReady, events.DiskFound, events.DiskRecovered]


def test_the_capacity_is_the_limit_or_the_free_space() -> None:
    gib = 1 << 30
    for limit, capacity in ((3 * gib, 3 * gib - OWN_BYTES), (20 * gib, 10 * gib - (64 << 20))):
        with served(lambda: MediumFiles(Medium(10 * gib)), limit=limit) as scene:
            assert scene.wait(events.DiskReady).capacity_bytes == pytest.approx(capacity, abs=10_000)


def test_a_segment_written_after_a_trim_was_ordered_stays() -> None:
    medium = Medium()
    trouble = Trouble(medium)
    again = entry(12, 2, generation=2)
    with on(medium) as scene:
        # The thread of the index is busy with this write, so that it carries the trim out late.
        trouble.hang("sync")
        scene.write([entry(9, 0, tenant="other")])
        wait_until(lambda: bool(trouble.hung), "the thread of the index syncs")
        scene.forget(SEGMENTS[2:])
        scene.trim("default", 4096, 2)
        number = scene.write([again])
        slab = medium.names["slab-00000"]
        wait_until(lambda: bytes_of(again.key, 4096) in slab.content, "the bytes are written")
        trouble.hanging.set()
        written = scene.wait(events.DiskWritten, where=lambda event: event.write == number)
        assert written.codes == bytes([COMMITTED])
        assert scene.read([again]) == bytes([LOCAL])
        assert scene.read(SEGMENTS[:2]) == bytes([LOCAL]) * 2
    assert len(slab.content) == 4096 + 3 * 8192
    with served(lambda: MediumFiles(medium)) as scene:
        recovered(scene)
        assert scene.read([again]) == bytes([LOCAL])


# -- failures


class Trouble:
    """What goes wrong on a medium."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.error: int | None = None
        self.operations: tuple[str, ...] = ("read", "write", "sync", "size", "create")
        self.slabs_only = True
        self.hanging = threading.Event()
        """Cleared: operations do not return until it is set."""
        self.hanging.set()
        self.hung: list[str] = []
        """Operations that did not return at once."""
        medium.trouble = self

    def hang(self, *operations: str) -> None:
        self.operations = operations
        self.hanging.clear()

    def __call__(self, operation: str, name: str) -> None:
        if operation in self.operations and (name.startswith("slab") or not self.slabs_only):
            if not self.hanging.is_set():
                self.hung.append(operation)
            assert self.hanging.wait(30)
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))


def test_one_unreadable_segment_is_lost_and_the_device_stays() -> None:
    with troubled() as (scene, trouble):
        trouble.error = errno.EIO
        assert scene.read(SEGMENTS[:1]) == bytes([LOST])
        trouble.error = None
        assert scene.read(SEGMENTS) == bytes([LOCAL]) * 5
        assert not scene.of(events.DiskGone)
        assert scene.device.state.read_errors == 1


@pytest.mark.parametrize("error", [errno.EIO, errno.ENODEV, errno.EROFS])
def test_read_errors_set_the_device_aside_until_a_check_succeeds(error: int) -> None:
    with troubled() as (scene, trouble):
        trouble.error, trouble.slabs_only = error, False
        assert scene.read(SEGMENTS) == bytes([LOST]) * 5
        assert os.strerror(error) in scene.wait(events.DiskGone).reason
        assert not scene.device.state.serving
        assert scene.read(SEGMENTS) == bytes([LOST]) * 5
        assert scene.written(SEGMENTS) == bytes([LOST]) * 5
        trouble.error = None
        scene.wait(events.DiskRecovered, 2)
        assert scene.read(SEGMENTS) == bytes([LOCAL]) * 5
        assert len(scene.of(events.DiskFound)) == 1


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_failed_write_commits_nothing(operation: str) -> None:
    with troubled(write=False) as (scene, trouble):
        trouble.error, trouble.operations = errno.EIO, (operation,)
        assert scene.written(SEGMENTS) == bytes([LOST]) * 5
        trouble.error = None
        scene.wait(events.DiskRecovered, 2)
        assert not scene.of(events.DiskFound)
        assert scene.written(SEGMENTS) == bytes([COMMITTED]) * 5


@pytest.mark.parametrize("operation", ["read", "write", "sync"])
def test_a_slow_device_is_set_aside_until_it_answers(operation: str) -> None:
    with troubled(write=False) as (scene, trouble):
        scene.written(SEGMENTS[:1])
        trouble.hang(operation)
        reads = [scene.start_read(SEGMENTS[:1], 100 + at) for at in range(12)] if operation == "read" else []
        write = scene.write(SEGMENTS[1:]) if operation != "read" else 0
        assert "slow" in scene.watch_until(events.DiskGone).reason
        # What waits for a thread ends at once; what a thread carries out ends when it returns.
        assert len(scene.of(events.FetchDone)) == max(0, len(reads) - 4)
        trouble.hanging.set()
        for read in reads:
            scene.done(read)
        if write:
            assert scene.wait(events.DiskWritten, 2).codes == bytes([LOST]) * 4
        scene.wait(events.DiskRecovered, 2)
        assert scene.read(SEGMENTS[:1]) == bytes([LOCAL])


def test_the_state_does_not_wait_for_a_device_that_hangs() -> None:
    with troubled(write=False) as (scene, trouble), ThreadPoolExecutor(1) as pool:
        trouble.hang("size")
        scene.write(SEGMENTS)
        wait_until(lambda: bool(trouble.hung), "a slab grows")
        state = pool.submit(lambda: scene.device.state)
        try:
            assert state.result(10).serving
        finally:
            trouble.hanging.set()


def test_a_device_is_gone_before_the_reads_that_it_loses() -> None:
    medium = Medium()
    trouble = Trouble(medium)

    def pause(record: logging.LogRecord) -> bool:
        """Let the other read end while the thread that sets the device aside writes its line to the log."""
        if "set aside" in record.getMessage():
            scene.wait(events.FetchDone)
        return True

    log = logging.getLogger("tokenlake_server.disk.device")
    log.addFilter(pause)
    try:
        with served(lambda: MediumFiles(medium)) as scene:
            scene.wait(events.DiskRecovered)
            scene.written(SEGMENTS)
            trouble.error = errno.ENODEV
            trouble.hang("read")
            reads = [scene.start_read(SEGMENTS[:1], first_slot) for first_slot in (100, 101)]
            wait_until(lambda: len(trouble.hung) == 2, "both reads are under way")
            trouble.hanging.set()
            for read in reads:
                assert scene.done(read).codes == bytes([LOST])
            kinds = [type(event) for event in scene.seen]
            assert kinds.index(events.DiskGone) < kinds.index(events.FetchDone)
    finally:
        log.removeFilter(pause)


def test_a_full_device_keeps_its_segments() -> None:
    medium = Medium(200 << 20)
    with served(lambda: MediumFiles(medium), limit=150 << 20) as scene:
        scene.wait(events.DiskRecovered)
        assert scene.written(SEGMENTS) == bytes([COMMITTED]) * 5
        trouble = Trouble(medium)
        trouble.error, trouble.operations = errno.ENOSPC, ("size",)
        assert scene.written([entry(50, 15000)]) == bytes([LOST])
        smaller = scene.wait(events.DiskReady, 2).capacity_bytes
        used = scene.device.state.slab_bytes
        assert used <= smaller <= used + SLAB_BYTES < 150 << 20
        assert (scene.device.state.serving, scene.device.state.problem[:5]) == (True, "full:")
        assert scene.read(SEGMENTS) == bytes([LOCAL]) * 5
        assert not scene.of(events.DiskGone)
        trouble.error = None
        assert scene.wait(events.DiskReady, 3).capacity_bytes > smaller
        assert not scene.device.state.problem
        assert scene.written([entry(50, 15000)]) == bytes([COMMITTED])


@pytest.mark.parametrize("operations", [("size", "create"), ("size", "create", "write")])
def test_a_full_device_is_opened_for_reads(operations: tuple[str, ...]) -> None:
    """Some file systems need space also to write what a file has already."""
    medium = Medium()
    with on(medium):
        pass
    trouble = Trouble(medium)
    trouble.error, trouble.slabs_only, trouble.operations = errno.ENOSPC, False, operations
    with served(lambda: MediumFiles(medium)) as scene:
        assert len(recovered(scene)) == 5
        assert scene.device.state.problem[:5] == "full:"
        assert scene.read(SEGMENTS) == bytes([LOCAL]) * 5
        assert scene.written([entry(50, 15000)]) == bytes([LOST])
        scene.forget(SEGMENTS[:1])
        assert scene.read(SEGMENTS[1:]) == bytes([LOCAL]) * 4
        assert not scene.of(events.DiskGone)
        trouble.error = None
        wait_until(lambda: not scene.device.state.problem, "the device has room")
        assert scene.written([entry(50, 15000)]) == bytes([COMMITTED])


def test_all_files_stay_within_the_limit(tmp_path: Path) -> None:
    """Also with many sizes of segments, each of which has a slab, and with space that an earlier slab does not need."""
    limit = 64 << 20
    with served(lambda: DirectoryFiles(tmp_path), limit=limit) as scene:
        capacity = scene.wait(events.DiskReady).capacity_bytes
        scene.wait(events.DiskRecovered)
        used = 0
        for size in range(1, 200):
            slot_bytes = size * 100_000
            used += slab_bytes(slot_bytes, 1)
            if used > capacity:
                break
            assert scene.written([entry(size, 0, slot_bytes=slot_bytes)]) == bytes([COMMITTED]), size
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
        assert size > 20
        assert scene.written([entry(size, 0, slot_bytes=8 << 20)]) == bytes([LOST])
        assert scene.wait(events.DiskReady, 2).capacity_bytes <= capacity


# -- orders of operators


def orders_at(path: Path) -> StandingOrders:
    orders = StandingOrders(path / "home", [DISK])
    orders.load()
    return orders


def test_erased_segments_are_never_found_again() -> None:
    """Also where their records are found on the device as they were before."""
    medium = Medium()
    with served(lambda: MediumFiles(medium)) as scene:
        scene.wait(events.DiskRecovered)
        scene.written(SEGMENTS)
        table = bytes(medium.names["table-00000"].content)
        assert scene.erased(SEGMENTS[:3]) == bytes([COMMITTED]) * 3
    medium.lose_power(random.Random(0))
    kept = {name: bytes(inode.content) for name, inode in medium.names.items()}
    for content in (table, b"", bytes(len(table))):
        for name, data in {**kept, "table-00000": content}.items():
            medium.names[name] = Inode()
            medium.names[name].content[:] = data
        with served(lambda: MediumFiles(medium)) as scene:
            recovered(scene)
            assert scene.read(SEGMENTS[:3]) == bytes([BAD]) * 3


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_an_erasure_that_fails_says_so(operation: str) -> None:
    with troubled() as (scene, trouble):
        trouble.error, trouble.operations = errno.EIO, (operation,)
        assert scene.erased(SEGMENTS) == bytes([LOST]) * 5
        trouble.error = None


def test_segments_are_erased_where_there_is_no_space() -> None:
    medium = Medium()
    with on(medium) as scene:
        medium.nbytes = 0
        assert scene.erased(SEGMENTS[:3]) == bytes([COMMITTED]) * 3
    with served(lambda: MediumFiles(medium)) as scene:
        assert len(recovered(scene)) == 2


async def test_an_eviction_empties_a_device_that_is_set_aside(tmp_path: Path) -> None:
    """Nothing is found before, by a later daemon too."""
    orders = orders_at(tmp_path)
    with troubled(orders=orders) as (scene, trouble):
        trouble.error = errno.EROFS
        scene.read(SEGMENTS)
        scene.wait(events.DiskGone)
        orders.evict([scene.device.path])
        assert scene.device.remove()
    await orders.save()
    trouble.operations = ("write", "size", "sync", "remove")
    orders = orders_at(tmp_path)
    with served(lambda: MediumFiles(trouble.medium), orders=orders) as scene:
        wait_until(lambda: bool(scene.device.state.problem), "a problem")
        trouble.error = None
        assert not recovered(scene)
        assert orders.clean(scene.device.path)


def test_an_eviction_sets_a_device_in_use_aside(tmp_path: Path) -> None:
    orders = orders_at(tmp_path)
    with on(Medium(), orders=orders) as scene:
        orders.evict([scene.device.path])
        assert scene.device.remove() == ""
        scene.wait(events.DiskGone)
        scene.wait(events.DiskRecovered, 2)
        assert not scene.of(events.DiskFound)
        assert scene.written(SEGMENTS) == bytes([COMMITTED]) * 5


def test_a_device_that_cannot_be_opened_is_tried_again() -> None:
    medium = Medium()
    trouble = Trouble(medium)
    trouble.error, trouble.slabs_only = errno.EIO, False
    with served(lambda: MediumFiles(medium)) as scene:
        wait_until(lambda: bool(scene.device.state.problem), "a problem")
        assert not scene.seen
        assert scene.written(SEGMENTS) == bytes([LOST]) * 5
        trouble.error = None
        scene.wait(events.DiskRecovered)
        assert scene.device.state.problem == ""


def test_an_aborted_read_ends_soon() -> None:
    with troubled() as (scene, trouble):
        trouble.hanging.clear()
        busy = [scene.start_read(SEGMENTS[:2], 100 + 2 * at) for at in range(2)]
        waiting = scene.start_read(SEGMENTS, 200)
        scene.device.abort(waiting)
        assert scene.done(waiting).codes == bytes([LOST]) * 5
        scene.device.abort(12345)
        trouble.hanging.set()
        for each in busy:
            assert scene.done(each).codes == bytes([LOCAL]) * 2


def test_a_device_that_closes_is_gone_before_its_reads_end() -> None:
    """The rules would drop the segments that waited to be read as damaged."""
    with troubled() as (scene, trouble):
        trouble.hang("read")
        reads = [scene.start_read(SEGMENTS) for _ in range(2)]
        wait_until(lambda: len(trouble.hung) == THREADS, "all threads read")
        closing = threading.Thread(target=scene.device.close)
        closing.start()
        ended = scene.done(reads[1])
        trouble.hanging.set()
        closing.join()
        assert ended.codes == bytes([LOST]) * 5
        kinds = [type(event) for event in scene.seen]
        assert kinds.index(events.DiskGone) < kinds.index(events.FetchDone)
    with on(trouble.medium, write=False) as scene:
        assert scene.read(SEGMENTS) == bytes([LOCAL]) * 5


def test_no_thread_of_a_device_that_hangs_keeps_the_process() -> None:
    medium = Medium()
    trouble = Trouble(medium)
    trouble.slabs_only = False
    trouble.hang("write")
    # Python waits at its end for threads that are not daemons.
    before = {thread for thread in threading.enumerate() if not thread.daemon}
    with served(lambda: MediumFiles(medium)):
        wait_until(lambda: bool(trouble.hung), "the check writes")
        waited = {thread for thread in threading.enumerate() if not thread.daemon}
        trouble.hanging.set()
    assert waited <= before
