"""Files of the kernel that say the limits of a process, for a machine with cgroups of version 1 or 2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CONTROLLERS = "memory,pids,hugetlb"


def kernel_files(place: Path, version: int, group: str, files: Mapping[str, int | str], root: str = "/") -> Path:
    """Make `place/proc` and `place/cgroup`, the mount of all controllers, and return the former.

    `group`: the cgroup of the process as `/proc/self/cgroup` says it. `root`: the cgroup that the mount shows. `files`:
    the content of each file, by its path below the mount."""
    own, mount = place / "proc" / "self", place / "cgroup"
    own.mkdir(parents=True)
    mount.mkdir()
    (own.parent / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {4000 * 1024} kB\nHugePages_Free: 3\n")
    line = f"7:{CONTROLLERS}:{group}\n" if version == 1 else f"0::{group}\n"
    (own / "cgroup").write_text(line)
    kind, options = ("cgroup", f"rw,{CONTROLLERS}") if version == 1 else ("cgroup2", "rw")
    escaped = str(mount).replace(" ", "\\040")
    (own / "mountinfo").write_text(
        "23 1 0:1 / / rw shared:1 - overlay overlay rw,lowerdir=/a\n"
        f"40 23 0:37 {root} {escaped} rw,relatime - {kind} {kind} {options}\n"
    )
    for name, content in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(f"{content}\n")
    return own.parent
