"""A device's directory: versions, clusters, keys, slabs, and verified reads."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.server.disk import scene
from tests.server.disk.medium import Inode, Medium, MediumFiles
from tests.server.disk.scene import Entry, bytes_of, checksums_of, commit, entries, entry, put
from tokenlake.layout import MAX_SHARDS
from tokenlake_server.disk import segments
from tokenlake_server.disk.directory import IDENTITY, pack_identity, read_identity
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.files import DirectoryFiles, DirectoryInUse, Files
from tokenlake_server.disk.segments import Mismatch, SegmentIO, aligned_memory
from tokenlake_server.disk.store import DiskStore, Unusable

OLD, NEW = b"o" * 32, bytes(range(100, 116))


def opened(files: Files, keys: DiskKeys | None = None, cluster: str = "c") -> tuple[DiskStore, list[Entry]]:
    store = DiskStore(files)
    found = [each for part in store.open(cluster, "node", keys or DiskKeys()) for each in entries(part)]
    return store, found


def filled(files: Files, *keys: bytes, count: int = 3, slot_bytes: int = 4096) -> None:
    store, _ = opened(files, DiskKeys(keys))
    written = [entry(number, number, slot_bytes=slot_bytes) for number in range(count)]
    for each in written:
        put(store, SegmentIO(store.keys), each)
    commit(store, written)
    store.close()


def read(store: DiskStore, each: Entry) -> bytes:
    segment = aligned_memory(each.slot_bytes)
    stored = store.read(SegmentIO(store.keys), each.where, segment)
    assert stored.checksums == checksums_of(segment)
    return bytes(segment)


@pytest.mark.parametrize("keys", [(), (NEW,)])
@pytest.mark.parametrize("slot_bytes", [1000, 4096, 3 << 20, (1 << 20) + 2])
def test_the_same_bytes_after_a_restart(tmp_path: Path, keys: tuple[bytes, ...], slot_bytes: int) -> None:
    filled(DirectoryFiles(tmp_path), *keys, slot_bytes=slot_bytes)
    store, found = opened(DirectoryFiles(tmp_path), DiskKeys(keys))
    assert len(found) == 3
    for each in found:
        assert read(store, each) == bytes_of(each.key, slot_bytes)
    store.close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_content_comes_back() -> None:
    medium = Medium()
    for keys in (DiskKeys(), DiskKeys([NEW])):
        store, _ = opened(MediumFiles(medium), keys)
        io = SegmentIO(keys)
        put(store, io, entry(1, 1), b"tokens")
        put(store, io, entry(2, 2), b"t" * 5000)
        assert store.read(io, entry(1, 1).where, aligned_memory(4096)).content == b"tokens"
        assert store.read(io, entry(2, 2).where, aligned_memory(4096)).content == b""


@pytest.mark.parametrize("keys", [DiskKeys(), DiskKeys([NEW])], ids=["plain", "encrypted"])
def test_the_header_has_room_for_64_shards(keys: DiskKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the tags of as many chunks as a segment may have, and the content of 256 tokens."""
    monkeypatch.setattr(segments, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(scene, "SHARDS", MAX_SHARDS)
    store, _ = opened(MediumFiles(Medium()), keys)
    each, segment, content = entry(1, 1, slot_bytes=4096 * segments.MAX_CHUNKS), aligned_memory(4096 * 64), bytes(1536)
    put(store, SegmentIO(keys), each, content)
    stored = store.read(SegmentIO(keys), each.where, segment)
    assert bytes(segment) == bytes_of(each.key, each.slot_bytes)
    assert (stored.checksums, stored.content) == (checksums_of(segment), content)
    commit(store, [each])
    assert [record.where for part in store.open("c", "node", keys) for record in entries(part)] == [each.where]


@pytest.mark.parametrize(
    "other",
    [
        entry(1, 0, generation=2),
        entry(2, 0),
        entry(1, 1),
        entry(1, 50),
        entry(1, 0, tenant="other"),
        entry(1, 0, slot_bytes=8192),
    ],
)
def test_a_read_of_another_segment_is_a_miss(other: Entry) -> None:
    store, _ = opened(MediumFiles(Medium()))
    put(store, SegmentIO(store.keys), entry(1, 0))
    put(store, SegmentIO(store.keys), entry(2, 1))
    with pytest.raises(Mismatch):
        read(store, other)


@pytest.mark.parametrize("keys", [(), (NEW,)])
def test_any_changed_byte_is_a_miss(keys: tuple[bytes, ...]) -> None:
    medium = Medium()
    filled(MediumFiles(medium), *keys, count=1, slot_bytes=1000)
    store, (found,) = opened(MediumFiles(medium), DiskKeys(keys))
    assert read(store, found) == bytes_of(found.key, 1000)
    content = medium.names["slab-00000"].content
    for at in (*range(4096, 8192, 13), 8189, 8191, *range(8192, 8192 + 1000, 7), 8192 + 999):
        content[at] ^= 0x40
        with pytest.raises(Mismatch):
            read(store, found)
        content[at] ^= 0x40
    assert read(store, found) == bytes_of(found.key, 1000)


def test_nothing_is_in_plain_sight_with_keys(tmp_path: Path) -> None:
    files = DirectoryFiles(tmp_path)
    store, _ = opened(files, DiskKeys([NEW]))
    put(store, SegmentIO(store.keys), entry(1, 0), b"the tokens of a prompt")
    commit(store, [entry(1, 0)])
    store.close()
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    plain = bytes_of(entry(1, 0).key, 4096)
    assert plain[:16] not in data
    assert checksums_of(plain)[:8] not in data
    assert b"the tokens" not in data
    assert NEW not in data


def test_a_new_key_is_for_new_segments() -> None:
    medium = Medium()
    filled(MediumFiles(medium), OLD)
    store, found = opened(MediumFiles(medium), DiskKeys([NEW, OLD]))
    assert len(found) == 3
    put(store, SegmentIO(store.keys), entry(9, 9))
    commit(store, [entry(9, 9)])
    for each in (*found, entry(9, 9)):
        assert read(store, each) == bytes_of(each.key, 4096)
    store.close()
    store, found = opened(MediumFiles(medium), DiskKeys([NEW]))
    assert [each.slot for each in found] == [9]
    assert store.unreadable == 3


def test_encrypted_segments_are_refused_without_keys() -> None:
    medium = Medium()
    filled(MediumFiles(medium), OLD)
    with pytest.raises(Unusable, match="'disk_keys' is empty"):
        opened(MediumFiles(medium))
    assert len(opened(MediumFiles(medium), DiskKeys([OLD]))[1]) == 3


def test_plain_segments_are_removed_when_keys_are_given() -> None:
    medium = Medium()
    filled(MediumFiles(medium))
    _store, found = opened(MediumFiles(medium), DiskKeys([NEW]))
    assert not found
    assert "slab-00000" not in medium.names


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 1}, "format 1, and this daemon writes format 2"),
        ({"cluster": "other"}, "belong to cluster 'other', and this node to cluster 'c'"),
        (None, "no whole tokenlake-disk.json"),
    ],
)
def test_another_version_or_cluster_is_refused(change: dict[str, object] | None, reason: str) -> None:
    medium = Medium()
    filled(MediumFiles(medium))
    identity = medium.names[IDENTITY]
    right, found = bytes(identity.content), read_identity(MediumFiles(medium))
    assert found is not None
    identity.content[:] = b"{" if change is None else pack_identity(msgspec.structs.replace(found, **change))
    with pytest.raises(Unusable, match=reason):
        opened(MediumFiles(medium))
    identity.content[:] = right
    assert len(opened(MediumFiles(medium))[1]) == 3


RECORD_2 = 4096 + 2 * 128


@pytest.mark.parametrize("keys", [(), (NEW,)])
@pytest.mark.parametrize(
    ("name", "at"),
    [("table-00000", RECORD_2 + at) for at in range(0, 128, 9)]
    + [("table-00000", 3), ("table-00000", 20), ("slab-00000", 20), (IDENTITY, 20), (IDENTITY, 4100)],
)
def test_one_changed_bit_costs_one_record(name: str, at: int, keys: tuple[bytes, ...]) -> None:
    medium = Medium()
    filled(MediumFiles(medium), *keys, count=5)
    medium.names[name].content[at] ^= 4
    lost = int(at >= RECORD_2 and name != IDENTITY)
    for expected in (lost, 0):  # then the damage is repaired
        store, found = opened(MediumFiles(medium), DiskKeys(keys))
        assert {each.slot for each in found} == set(range(5)) - ({2} if lost else set())
        for each in found:
            assert read(store, each) == bytes_of(each.key, 4096)
        assert store.lost == expected
        store.close()


def test_a_device_that_missed_an_eviction_is_emptied() -> None:
    """Also one whose keys are away."""
    medium = Medium()
    filled(MediumFiles(medium), NEW)
    store = DiskStore(MediumFiles(medium))
    assert not list(store.open("c", "node", DiskKeys(), empty=True))
    assert sorted(medium.names) == [IDENTITY]


@pytest.mark.parametrize(
    "damage",
    [
        lambda names: names.pop("slab-00000"),
        lambda names: names["slab-00000"].content.__delitem__(slice(4096, None)),
        lambda names: [names[name].content.__setitem__(12, 0xFF) for name in ("slab-00000", "table-00000")],
        lambda names: names["table-00000"].content.__delitem__(slice(RECORD_2 + 3 * 128 - 5, None)),
    ],
    ids=["no slab", "cut off", "no identity", "a cut table"],
)
def test_lost_segments_are_counted(damage: Callable[[dict[str, Inode]], object]) -> None:
    medium = Medium()
    filled(MediumFiles(medium), count=5)
    damage(medium.names)
    store, found = opened(MediumFiles(medium))
    assert len(found) + store.lost == 5
    assert store.lost >= 1
    store.close()
    store, again = opened(MediumFiles(medium))
    assert (len(again), store.lost) == (len(found), 0)


def test_a_trimmed_slab_is_smaller(tmp_path: Path) -> None:
    filled(DirectoryFiles(tmp_path), count=8)
    store, found = opened(DirectoryFiles(tmp_path))
    store.will_trim("default", 4096, 2)
    store.trim("default", 4096, 2)
    assert os.stat(tmp_path / "slab-00000").st_size == 4096 + 2 * 8192
    store.close()
    store, found = opened(DirectoryFiles(tmp_path))
    assert [each.slot for each in found] == [0, 1]
    put(store, SegmentIO(store.keys), entry(5, 5))
    assert read(store, entry(5, 5)) == bytes_of(entry(5, 5).key, 4096)
    store.close()


def test_the_directory_is_locked(tmp_path: Path) -> None:
    files = DirectoryFiles(tmp_path)
    with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}"):
        DirectoryFiles(tmp_path)
    files.close()
    DirectoryFiles(tmp_path).close()


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_lock_that_is_a_link_is_refused(link: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """The daemon writes its process id into the lock."""
    victim, directory = tmp_path / "victim", tmp_path / "disk"
    victim.write_text("precious")
    directory.mkdir()
    link(victim, directory / "lock")
    with pytest.raises(OSError, match=r"symbolic links|a link to a file elsewhere"):
        DirectoryFiles(directory)
    assert victim.read_text() == "precious"
