"""The memory that a daemon may allocate, by the files of the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kernel_files import kernel_files
from tokenlake.errors import LimitReached
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


def test_page_cache_is_available(tmp_path: Path) -> None:
    """An engine of the slice has read its weights: the files that it read fill the page cache."""
    cache = f"inactive_file {700 * MIB}", f"slab_reclaimable {50 * MIB}"
    proc, group = slice_of(tmp_path, 900, f"anon {100 * MIB}", f"active_file {40 * MIB}", *cache)
    assert available_bytes(proc) == (850 * MIB, f"memory.max of cgroup {group}")


def test_memory_of_processes_is_not_available(tmp_path: Path) -> None:
    assert available_bytes(slice_of(tmp_path, 900, f"anon {900 * MIB}")[0])[0] == 100 * MIB


def test_memory_that_the_process_has_counts_for_it(tmp_path: Path) -> None:
    proc, _ = slice_of(tmp_path, 900)
    (proc / "self" / "status").write_text("Name: tokenlake\nRssAnon:\t  51200 kB\n")
    assert available_bytes(proc)[0] == 150 * MIB


def test_a_cgroup_without_memory_stat(tmp_path: Path) -> None:
    proc, group = slice_of(tmp_path, 900)
    (group / "memory.stat").unlink()
    assert available_bytes(proc)[0] == 100 * MIB


def test_memory_high_is_a_limit(tmp_path: Path) -> None:
    """Above it the kernel slows a process down until it seems to hang."""
    proc, group = slice_of(tmp_path, 900, limit="memory.high")
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


def test_a_mount_whose_path_has_a_space(tmp_path: Path) -> None:
    proc, _ = slice_of(tmp_path / "my disk", 900)
    assert available_bytes(proc)[0] == 100 * MIB


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
