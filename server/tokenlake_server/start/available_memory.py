"""The memory that this machine and the cgroups of this process can still provide."""

from __future__ import annotations

from pathlib import Path

from tokenlake.config import format_size
from tokenlake.config.kinds import HUGE_PAGE
from tokenlake.errors import LimitReached
from tokenlake_server.start.cgroups import PROC, rooms

RESERVE_BYTES = 200 << 20
"""Bytes of the available memory that are kept for the daemon itself: interpreter, index, buffers."""
RECLAIMABLE = ("inactive_file", "slab_reclaimable")
"""Entries of a cgroup's `memory.stat`: the bytes of its use that the kernel frees when memory is needed."""
MEMORY_FILES = {
    "memory.max": "memory.current",
    "memory.high": "memory.current",
    "memory.limit_in_bytes": "memory.usage_in_bytes",
}
HUGE_PAGE_FILES = {
    "hugetlb.2MB.max": "hugetlb.2MB.current",
    "hugetlb.2MB.rsvd.max": "hugetlb.2MB.rsvd.current",
    "hugetlb.2MB.limit_in_bytes": "hugetlb.2MB.usage_in_bytes",
    "hugetlb.2MB.rsvd.limit_in_bytes": "hugetlb.2MB.rsvd.usage_in_bytes",
}


def available_bytes(proc: Path = PROC) -> tuple[int, str]:
    """The number of bytes that a daemon in place of this process could have in all, and the source of that limit: the
    least of MemAvailable and of the room in every cgroup, with what this process has allocated itself."""
    limits = [(_number(proc / "meminfo", "MemAvailable:", 1 << 52) << 10, "MemAvailable of /proc/meminfo")]
    for each in rooms("memory", MEMORY_FILES, proc):
        limits.append((each.amount + _reclaimable(each.directory), each.source))
    room, source = min(limits)
    return room + (_number(proc / "self" / "status", "RssAnon:", 0) << 10), source


def free_huge_pages(proc: Path = PROC) -> tuple[int, str]:
    """The number of huge pages of 2 MiB that this process may have, and the source of that limit: those that no process
    has, and the room in every cgroup."""
    limits = [(_number(proc / "meminfo", "HugePages_Free:", 0), "HugePages_Free of /proc/meminfo")]
    limits += [(room.amount // HUGE_PAGE, room.source) for room in rooms("hugetlb", HUGE_PAGE_FILES, proc)]
    return min(limits)


def require_memory(nbytes: int, huge_regions: int = 0, proc: Path = PROC) -> None:
    """Raise `LimitReached`, whose text has the cure behind a semicolon, when `nbytes` are not available: writing to
    them would call the OOM killer. `huge_regions`: the number of regions on huge pages; 0 for ordinary pages."""
    if huge_regions:
        # One page more for the header of each region.
        needed, (free, source) = -(-nbytes // HUGE_PAGE) + huge_regions, free_huge_pages(proc)
        if free < needed:
            raise LimitReached(
                f"setting 'huge_pages': 'memory' takes {needed} huge pages of 2 MiB, and {max(0, free)} are free "
                f"({source}); set them aside with `sysctl vm.nr_hugepages={needed}` as root (soon after a boot, while "
                "memory is not in pieces), raise the limit of the container (in a pod: `resources`), or set "
                "'huge_pages' to false"
            )
        return
    room, source = available_bytes(proc)
    if nbytes + RESERVE_BYTES > room:
        raise LimitReached(
            f"setting 'memory' asks for {format_size(nbytes)}, but only {room >> 20} MiB are available ({source}), "
            f"of which {RESERVE_BYTES >> 20} MiB are kept for the daemon; lower 'memory' to at most "
            f"{max(0, (room - RESERVE_BYTES) >> 20)}MiB, free memory, or give the machine or its cgroup more memory"
        )


def _number(file: Path, name: str, default: int) -> int:
    """The number in the line of a file that begins with `name`."""
    try:
        lines = (line.split() for line in file.read_text().splitlines())
        return next((int(words[1]) for words in lines if words[:1] == [name]), default)
    except (OSError, ValueError, IndexError):
        return default


def _reclaimable(directory: Path) -> int:
    """The use of a cgroup counts the page cache too, which the kernel reclaims before it calls the OOM killer."""
    try:
        lines = [line.split() for line in (directory / "memory.stat").read_text().splitlines()]
        entries = {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return 0
    if "total_inactive_file" in entries:
        return entries["total_inactive_file"]
    return sum(entries.get(name, 0) for name in RECLAIMABLE)
