"""The memory that this machine and the cgroups of this process can still provide."""

from __future__ import annotations

from pathlib import Path

from tokenlake.config import format_size
from tokenlake.config.kinds import HUGE_PAGE
from tokenlake.errors import LimitReached

__all__ = ["available_bytes", "free_huge_pages", "huge_pages_of", "require_memory"]

RESERVE_BYTES = 64 << 20
"""Bytes of the available memory that are kept for the daemon itself: interpreter, index, buffers."""
RECLAIMABLE = ("inactive_file", "slab_reclaimable")
"""Entries of a cgroup's `memory.stat`: the bytes of `memory.current` that the kernel frees when memory is needed."""


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """The number of bytes that are available, and the source of that limit: the least of MemAvailable and of the room
    in every cgroup of this process."""
    limits = [(_mem_available(proc), "MemAvailable of /proc/meminfo")]
    own = _own_cgroup(proc)
    if own is not None:
        group = cgroup / own.lstrip("/")
        for directory in [group, *group.parents]:
            room = _cgroup_room(directory)
            if room is not None:
                limits.append((room, f"memory.max of cgroup {directory}"))
            if directory == cgroup:
                break
    return min(limits)


def free_huge_pages(proc: Path = Path("/proc")) -> int:
    """The number of huge pages of 2 MiB that no process has."""
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1])
    return 0


def huge_pages_of(nbytes: int, regions: int) -> int:
    """The number of huge pages that an arena of `nbytes` takes: one more for the header of each region."""
    return -(-nbytes // HUGE_PAGE) + regions


def require_memory(nbytes: int, huge_regions: int = 0) -> None:
    """Raise `LimitReached` when `nbytes` are not available: writing to them would call the OOM killer. `huge_regions`:
    the number of regions on huge pages; 0 for ordinary pages."""
    if huge_regions:
        needed, free = huge_pages_of(nbytes, huge_regions), free_huge_pages()
        if free < needed:
            raise LimitReached(
                f"setting 'huge_pages': 'memory' takes {needed} huge pages of 2 MiB, and {free} are free; set them "
                f"aside with `sysctl vm.nr_hugepages={needed}` as root, or set 'huge_pages' to false"
            )
        return
    room, source = available_bytes()
    if nbytes + RESERVE_BYTES > room:
        raise LimitReached(
            f"setting 'memory' asks for {format_size(nbytes)}, but only {room >> 20} MiB are available ({source}), "
            f"of which {RESERVE_BYTES >> 20} MiB are kept for the daemon; lower 'memory' or free memory"
        )


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _own_cgroup(proc: Path) -> str | None:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), None)


def _cgroup_room(directory: Path) -> int | None:
    """The bytes that the processes of a cgroup (version 2) may still allocate, or None for a group without a limit.
    `memory.current` counts the page cache too, which the kernel reclaims before it calls the OOM killer."""
    try:
        limit = (directory / "memory.max").read_text().strip()
        if limit == "max":
            return None
        room = int(limit) - int((directory / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return room + _reclaimable(directory)


def _reclaimable(directory: Path) -> int:
    try:
        lines = [line.split() for line in (directory / "memory.stat").read_text().splitlines()]
        return sum(int(value) for name, value in lines if name in RECLAIMABLE)
    except (OSError, ValueError):
        return 0
