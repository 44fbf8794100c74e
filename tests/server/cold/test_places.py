"""What a directory and a bucket promise alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.cold.bucket import BUCKET, needs_s3, of_server, s3_server
from tokenlake_server.cold.base import Missing, Unfit, read_whole, write_whole
from tokenlake_server.cold.directory import DirectoryObjects
from tokenlake_server.cold.places import Place, open_place


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as bucket:
        yield bucket.variables


@pytest.fixture(params=["directory", pytest.param("s3", marks=needs_s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "directory":
        opened = open_place(str(tmp_path))
        yield opened
        opened.close()
        return
    with of_server(request.getfixturevalue("server")):
        yield open_place(f"s3://{BUCKET}/{request.node.name[:40].strip('[]').replace('[', '-')}")


def test_an_object_is_read_as_it_was_written(place: Place) -> None:
    for nbytes in (0, 1, 5000, 3 << 20):
        data = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)
        write_whole(place, "objects/ab/0123", data)
        assert bytes(read_whole(place, "objects/ab/0123", 1 << 23)) == data
        reader = place.read("objects/ab/0123")
        assert reader.nbytes == nbytes
        if nbytes > 4096:
            room = memoryview(bytearray(4096))
            reader.read(room)
            assert bytes(room) == data[:4096]
        reader.close()


def test_parts_are_one_object(place: Place) -> None:
    room = memoryview(bytearray(100))

    def parts() -> Iterator[memoryview]:
        for number in range(50):
            room[:] = bytes([number]) * 100
            yield room

    place.write("index/root", parts(), 5000)
    assert bytes(read_whole(place, "index/root", 5000)) == b"".join(bytes([number]) * 100 for number in range(50))


def test_an_exception_of_the_parts_writes_nothing(place: Place) -> None:
    def parts() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise KeyError("injected")

    with pytest.raises(KeyError):
        place.write("index/root", parts(), 8)
    with pytest.raises(Missing):
        place.read("index/root")
    assert list(place.list("index")) == []


def test_what_is_not_there(place: Place) -> None:
    with pytest.raises(Missing):
        place.read("objects/ab/0123")
    place.delete(["objects/ab/0123", "objects/cd/1"])
    assert list(place.list("objects/ab")) == []
    place.require()


def test_an_object_ends_where_it_ends(place: Place) -> None:
    write_whole(place, "objects/ab/0123", b"x" * 100)
    reader = place.read("objects/ab/0123")
    with pytest.raises(Unfit, match="ends before"):
        reader.read(memoryview(bytearray(101)))
    reader.close()
    with pytest.raises(Unfit, match="100 bytes; at most 99"):
        read_whole(place, "objects/ab/0123", 99)


def test_objects_are_listed_and_deleted(place: Place) -> None:
    paths = [f"index/journal/{number:04x}" for number in range(30)]
    for path in [*paths, "index/root", "index/table/1"]:
        write_whole(place, path, path.encode())
    listed = {each.path: each for each in place.list("index/journal")}
    assert sorted(listed) == paths
    assert all(each.nbytes == len(path) for path, each in listed.items())
    assert all(abs(each.modified_s - next(iter(listed.values())).modified_s) < 60 for each in listed.values())
    place.delete(paths[:20])
    assert sorted(each.path for each in place.list("index/journal")) == paths[20:]
    assert [each.path for each in place.list("index")] == ["index/root"]


def test_a_replaced_object_is_the_new_one(place: Place) -> None:
    write_whole(place, "index/root", b"old")
    write_whole(place, "index/root", b"the new one")
    assert bytes(read_whole(place, "index/root", 100)) == b"the new one"


def test_local_file_systems_show_new_files_at_once(tmp_path: Path) -> None:
    assert DirectoryObjects(tmp_path).late_s == 0
    assert DirectoryObjects(Path("/proc")).late_s == 60


@needs_s3
@pytest.mark.parametrize(
    "changes",
    [{"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, {"AWS_ENDPOINT_URL": "http://no-such-host.invalid:1"}],
)
def test_a_bucket_that_is_not_reached(server: dict[str, str], changes: dict[str, str]) -> None:
    with of_server(server | changes):
        place = open_place(f"s3://{BUCKET}")
        with pytest.raises(OSError) as raised:
            place.read("index/root")
        assert "a secret key" not in str(raised.value)


@needs_s3
def test_a_bucket_that_does_not_exist(server: dict[str, str]) -> None:
    with of_server(server), pytest.raises(OSError):
        write_whole(open_place("s3://no-such-bucket"), "index/root", b"x")
