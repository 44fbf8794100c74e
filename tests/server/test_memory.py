"""The memory that a daemon may allocate, by the files of the kernel, and that of its regions."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kernel_files import kernel_files
from tokenlake.errors import LimitReached
from tokenlake.memory.region import PAGE, RegionShape
from tokenlake.wire.slots import SlotRef
from tokenlake_server.engines.arena import Arena, Region
from tokenlake_server.start.available_memory import available_bytes, free_huge_pages
from tokenlake_server.start.cgroups import rooms

MIB = 1 << 20
SLICE = "engines.slice"


def slice_of(place: Path, current: int, *stat: str, limit: str = "memory.max") -> tuple[Path, Path]:
    """The directory `/proc` and the cgroup of a process whose slice may use 1000 MiB."""
    files: Mapping[str, int | str] = {
        f"{SLICE}/daemon.service/memory.max": "max",
        f"{SLICE}/{limit}": 1000 * MIB,
        f"{SLICE}/memory.current": current * MIB,
        f"{SLICE}/memory.stat": "\n".join(stat),
    }
    return kernel_files(place, 2, f"/{SLICE}/daemon.service", files), place / "cgroup" / SLICE


@pytest.mark.parametrize(
    ("stat", "available"),
    [
        # An engine of the slice has read its weights: the files that it read fill the page cache.
        (f"inactive_file {700 * MIB}\nslab_reclaimable {50 * MIB}\nactive_file {40 * MIB}", 850),
        (f"anon {900 * MIB}", 100),
        (None, 100),
    ],
    ids=["page cache", "memory of processes", "no memory.stat"],
)
def test_what_the_page_cache_has_is_available(tmp_path: Path, stat: str | None, available: int) -> None:
    proc, group = slice_of(tmp_path, 900, stat or "")
    if stat is None:
        (group / "memory.stat").unlink()
    assert available_bytes(proc) == (available * MIB, f"memory.max of cgroup {group}")


def test_memory_that_the_process_has_counts_for_it(tmp_path: Path) -> None:
    proc, _ = slice_of(tmp_path, 900)
    (proc / "self" / "status").write_text("Name: tokenlake\nRssAnon:\t  51200 kB\n")
    assert available_bytes(proc)[0] == 150 * MIB


def test_memory_high_is_a_limit(tmp_path: Path) -> None:
    """Above it the kernel slows a process down until it seems to hang. The path of the mount has a space."""
    proc, group = slice_of(tmp_path / "my disk", 900, limit="memory.high")
    assert available_bytes(proc) == (100 * MIB, f"memory.high of cgroup {group}")


V1: Mapping[str, int | str] = {
    "docker/0af3/memory.limit_in_bytes": 1000 * MIB,
    "docker/0af3/memory.usage_in_bytes": 900 * MIB,
    "docker/0af3/memory.stat": f"inactive_file 0\ntotal_inactive_file {500 * MIB}",
    "docker/memory.limit_in_bytes": (1 << 63) - 4096,
    "docker/memory.usage_in_bytes": 2000 * MIB,
}


def test_cgroups_of_version_1(tmp_path: Path) -> None:
    proc = kernel_files(tmp_path, 1, "/docker/0af3", V1)
    group = tmp_path / "cgroup" / "docker" / "0af3"
    assert available_bytes(proc) == (600 * MIB, f"memory.limit_in_bytes of cgroup {group}")


@pytest.mark.parametrize("path", ["/docker/0af3", "/", "/../other"], ids=["host's", "namespace", "outside"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_cgroup(tmp_path: Path, version: int, path: str) -> None:
    """The mount shows the cgroup of the container, whose path the process sees with or without a namespace."""
    files: Mapping[str, int | str] = (
        {"memory.max": 1000 * MIB, "memory.current": 900 * MIB}
        if version == 2
        else {"memory.limit_in_bytes": 1000 * MIB, "memory.usage_in_bytes": 900 * MIB}
    )
    root = "/docker/0af3" if path.startswith("/docker") else "/"
    assert available_bytes(kernel_files(tmp_path, version, path, files, root=root))[0] == 100 * MIB


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (1, {"pod/hugetlb.2MB.limit_in_bytes": 64 * MIB, "pod/hugetlb.2MB.usage_in_bytes": 4 * MIB}),
        (2, {"pod/hugetlb.2MB.max": 64 * MIB, "pod/hugetlb.2MB.current": 4 * MIB}),
        (2, {"pod/hugetlb.2MB.rsvd.max": 64 * MIB, "pod/hugetlb.2MB.rsvd.current": 4 * MIB}),
    ],
    ids=["v1", "v2", "reserved"],
)
def test_huge_pages_of_a_pod(tmp_path: Path, version: int, files: dict[str, int | str]) -> None:
    proc = kernel_files(tmp_path, version, "/pod", files)
    (proc / "meminfo").write_text("HugePages_Free:   4096\n")
    free, source = free_huge_pages(proc)
    assert free == 30
    assert source.startswith("hugetlb.2MB.")


@pytest.mark.parametrize("version", [1, 2])
def test_processes_of_a_pod(tmp_path: Path, version: int) -> None:
    """The pod has no limit, and the one above it has."""
    files: Mapping[str, int | str] = {"pods/a/pids.max": "max", "pods/pids.max": 100, "pods/pids.current": 90}
    proc = kernel_files(tmp_path, version, "/pods/a", files)
    assert [room.amount for room in rooms("pids", {"pids.max": "pids.current"}, proc)] == [10]


@pytest.mark.parametrize(
    "broken", ["", "0::/pod\n", "garbage", "9:memory\n", "0::/pod\n5:memory:/pod\n"], ids=["empty", *"abcd"]
)
def test_files_that_say_nothing(tmp_path: Path, broken: str) -> None:
    proc = kernel_files(tmp_path, 2, "/pod", {})
    (proc / "self" / "cgroup").write_text(broken)
    for mounts in ("", "31 23 0:28 / /sys/fs/cgroup rw\n", "x\n"):
        (proc / "self" / "mountinfo").write_text(mounts)
        assert available_bytes(proc) == (4000 * MIB, "MemAvailable of /proc/meminfo")


def test_what_is_refused_names_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """150 MiB are left beside `memory`, and the daemon needs 200."""
    from tokenlake_server.start import available_memory

    proc = kernel_files(tmp_path, 2, "/pod", {"pod/memory.max": 1150 * MIB, "pod/memory.current": 0})
    found = available_bytes(proc)
    monkeypatch.setattr(available_memory, "available_bytes", lambda proc: found)
    with pytest.raises(LimitReached, match=r"only 1150 MiB are available \(memory\.max of cgroup .*/pod\)"):
        available_memory.require_memory(1000 * MIB)
    available_memory.require_memory(950 * MIB)


def test_freed_pages_read_as_zeros() -> None:
    region = Region(0, 4 * PAGE, huge_pages=False)
    region.view[:] = b"\1" * len(region.view)
    region.free_pages([(PAGE, 2 * PAGE)])
    assert [region.view[number * PAGE] for number in range(4)] == [0, 1, 0, 0]
    region.close()


def allocated(region: Region) -> int:
    """Bytes that the kernel has allocated for the region."""
    return os.fstat(region.fd).st_blocks * 512


@pytest.mark.parametrize("slot_bytes", [64, 10_000, 3 << 20, 5 << 20, 8 << 20])
def test_a_region_has_memory_for_its_slots_alone(slot_bytes: int) -> None:
    """All of it is allocated before an engine writes, and the rest of the region is given back."""
    arena = Arena()
    arena.make(3, 8 << 20)
    shape = RegionShape(RegionShape(8 << 20, slot_bytes).fitted(), slot_bytes)
    region = arena.region(3)
    region.cut(shape.region_bytes, slot_bytes)
    region.trim()
    assert allocated(region) == shape.file_bytes
    last = SlotRef(3, shape.slots - 1, 7)
    (view,) = arena.slots([last], slot_bytes)
    view[:] = b"\2" * slot_bytes
    arena.stamp([last])
    assert allocated(region) == shape.file_bytes
    view.release()
    arena.end(3)
    with pytest.raises(KeyError):
        arena.region(3)
    arena.close()


def test_an_arena_that_stops_makes_no_region() -> None:
    arena = Arena()
    arena.stop()
    arena.make(0, 8 << 20)
    with pytest.raises(KeyError):
        arena.region(0)


def test_memory_that_is_not_taken_back_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel frees no page of a memfd that is sealed against writes."""
    region = Region(7, PAGE, huge_pages=False)
    fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.dup2(fd, region.fd, inheritable=False)
    os.close(fd)
    with caplog.at_level(logging.ERROR):
        region.free_pages()
    assert f"{2 * PAGE} bytes of region 7 are still allocated: Operation not permitted" in caplog.text
    region.close()
