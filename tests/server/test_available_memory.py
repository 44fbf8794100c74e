"""The memory that a daemon may allocate, by the files of the kernel."""

from __future__ import annotations

from pathlib import Path

from tokenlake_server.available_memory import available_bytes

MIB = 1 << 20


def kernel(place: Path, current: int, *stat: str) -> tuple[Path, Path]:
    """The directories `/proc` and `/sys/fs/cgroup` of a process whose slice may use 1000 MiB."""
    proc, cgroup = place / "proc", place / "cgroup"
    own = cgroup / "engines.slice" / "daemon.service"
    (proc / "self").mkdir(parents=True)
    own.mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {4000 * 1024} kB\n")
    (proc / "self" / "cgroup").write_text("0::/engines.slice/daemon.service\n")
    (own / "memory.max").write_text("max\n")
    (own.parent / "memory.max").write_text(f"{1000 * MIB}\n")
    (own.parent / "memory.current").write_text(f"{current * MIB}\n")
    (own.parent / "memory.stat").write_text("".join(f"{line}\n" for line in stat))
    return proc, cgroup


def test_page_cache_is_available(tmp_path: Path) -> None:
    """An engine of the slice has read its weights: the files that it read fill the page cache."""
    cache = f"inactive_file {700 * MIB}", f"slab_reclaimable {50 * MIB}"
    proc, cgroup = kernel(tmp_path, 900, f"anon {100 * MIB}", f"active_file {40 * MIB}", *cache)
    room, source = available_bytes(proc, cgroup)
    assert room == 850 * MIB
    assert source == f"memory.max of cgroup {cgroup / 'engines.slice'}"


def test_memory_of_processes_is_not_available(tmp_path: Path) -> None:
    assert available_bytes(*kernel(tmp_path, 900, f"anon {900 * MIB}"))[0] == 100 * MIB


def test_a_cgroup_without_memory_stat(tmp_path: Path) -> None:
    proc, cgroup = kernel(tmp_path, 900)
    (cgroup / "engines.slice" / "memory.stat").unlink()
    assert available_bytes(proc, cgroup)[0] == 100 * MIB
