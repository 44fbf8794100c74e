"""The cold tier on S3, with a server that is damaged, stopped and killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.cold.bucket import BUCKET, Bucket, needs_s3, of_server, s3_server
from tests.server.cold.scene import SLOT, Scene, key_of, served, until
from tests.server.cold.test_store import writes
from tokenlake.core import events
from tokenlake.wire import Code
from tokenlake_server.cold.base import read_whole, write_whole
from tokenlake_server.cold.names import ColdTenant, path_of, short_of
from tokenlake_server.cold.places import open_place
from tokenlake_server.cold.sealed import object_bytes

pytestmark = needs_s3
COMMITTED, EXISTS, LOCAL, LOST, BAD = (
    bytes([code]) for code in (Code.COMMITTED, Code.EXISTS, Code.LOCAL, Code.LOST, Code.BAD_CHECKSUM)
)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    with s3_server(tmp_path / "log") as found, of_server(found.variables):
        yield found


def scene_at(prefix: str, tmp_path: Path) -> Scene:
    return Scene(tmp_path, inner=lambda: open_place(f"s3://{BUCKET}/{prefix}"))


def test_segments_are_shared_by_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    with served(scene_at("x", tmp_path)) as one, served(scene_at("x", tmp_path)) as other:
        writes(one, list(range(20)))
        assert one.read(list(range(20))) == LOCAL * 20
        until(lambda: other.look(list(range(20))) == [1] * 20, "the other one hears of all")
        assert other.read(list(range(20))) == LOCAL * 20
        one.merged()
        other.erase([3])
        until(lambda: one.look([3]) == [0], "the first one hears of the eviction")
    with served(scene_at("x", tmp_path)) as later:
        assert later.look(list(range(20))) == [1, 1, 1, 0] + [1] * 16
        assert later.read([0, 1, 2, 3]) == LOCAL * 3 + LOST
    with served(scene_at("y", tmp_path)) as elsewhere:
        assert elsewhere.look([1]) == [0]


def test_a_segment_of_several_pieces(bucket: Bucket, tmp_path: Path) -> None:
    scene = Scene(tmp_path, inner=lambda: open_place(f"s3://{BUCKET}"), slot_bytes=(5 << 20) + 4096)
    with served(scene):
        writes(scene, [1, 2])
        assert scene.read([1, 2]) == LOCAL * 2


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "swapped", "gone"])
def test_a_damaged_object_is_a_miss(bucket: Bucket, tmp_path: Path, damage: str) -> None:
    place = open_place(f"s3://{BUCKET}/z")
    with served(scene_at("z", tmp_path)) as scene:
        writes(scene, [1, 2])
        one, two = (path_of(short_of(ColdTenant(scene.secrets["a"]).name(key_of(number)))) for number in (1, 2))
        data = bytearray(read_whole(place, one, object_bytes(SLOT)))
        match damage:
            case "cut":
                data = data[:-1]
            case "longer":
                data += b"x"
            case "flipped":
                data[5000] ^= 1
            case "swapped":
                data = bytearray(read_whole(place, two, object_bytes(SLOT)))
        if damage == "gone":
            place.delete([one])
        else:
            write_whole(place, one, bytes(data))
        assert scene.read([1, 2]) == (LOST if damage == "gone" else BAD) + LOCAL
        assert scene.look([1, 2]) == [0, 1]


def test_a_server_that_stops_and_goes_on(bucket: Bucket, tmp_path: Path) -> None:
    with served(scene_at("x", tmp_path)) as scene:
        writes(scene, [1, 2, 3])
        bucket.process.send_signal(signal.SIGSTOP)
        try:
            fetch = scene.start_read([1, 2, 3])

            def set_aside() -> bool:
                scene.store.watch(time.monotonic())
                return bool(scene.of(events.ColdGone))

            until(set_aside, "it is set aside")
            assert scene.done(fetch).codes == LOST * 3
            assert scene.look([1]) == [0]
        finally:
            bucket.process.send_signal(signal.SIGCONT)
        scene.wait(events.ColdReady, 2)
        until(lambda: scene.look([1, 2, 3]) == [1, 1, 1], "the index is read")
        assert scene.read([1, 2, 3]) == LOCAL * 3


def test_a_server_that_is_gone(bucket: Bucket, tmp_path: Path) -> None:
    with served(scene_at("x", tmp_path)) as scene:
        writes(scene, [1])
        bucket.process.kill()
        bucket.process.wait()
        assert set(scene.read([1])) <= {Code.LOST}
        scene.wait(events.ColdGone)
        assert scene.look([1]) == [0]
