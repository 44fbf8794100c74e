"""The limits of the cgroups of a process, of version 1 and of version 2, in a container or not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Room(NamedTuple):
    """What the processes of a cgroup may still take."""

    amount: int
    """The limit less the use, in the unit of the files; negative where the use is above the limit."""
    source: str
    """The file of the limit and its cgroup."""
    directory: Path


def rooms(controller: str, files: Mapping[str, str], proc: Path = PROC, process: int | str = "self") -> Iterator[Room]:
    """Yield the room below each limit of the cgroups of a process and of the cgroups above that it sees.

    `files`: the names of the file of the use, by the file of its limit, for both versions; a file that a cgroup does
    not have, or that says "max", is no limit. `process`: a directory of `proc`."""
    for directory in _groups(controller, proc / str(process)):
        for limit, use in files.items():
            try:
                most, now = (directory / limit).read_text().strip(), (directory / use).read_text()
                if most != "max":
                    yield Room(int(most) - int(now), f"{limit} of cgroup {directory}", directory)
            except (OSError, ValueError):
                continue


def _groups(controller: str, process: Path) -> Iterator[Path]:
    """Yield the directories of the cgroups that a process is in, and of those above, in each hierarchy that may have
    the controller."""
    mounts = list(_mounts(process))
    for line in _lines(process / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # The hierarchy of version 2 has the number 0, and no list of controllers.
        wanted = ("cgroup2", "") if number == "0" else ("cgroup", controller)
        if wanted[1] not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.kind == wanted[0] and (not wanted[1] or controller in mount.options):
                yield from _upwards(path, mount)
                break


class _Mount(NamedTuple):
    root: str
    """The cgroup that `directory` shows."""
    directory: Path
    kind: str
    options: list[str]


def _mounts(process: Path) -> Iterator[_Mount]:
    """Yield the mounts of a process, from the fields of proc_pid_mountinfo(5)."""
    for line in _lines(process / "mountinfo"):
        own, _, rest = line.partition(" - ")
        fields, kind = own.split(" "), rest.split(" ")
        if len(fields) > 4 and len(kind) == 3:
            yield _Mount(_plain(fields[3]), Path(_plain(fields[4])), kind[0], kind[2].split(","))


def _upwards(path: str, mount: _Mount) -> Iterator[Path]:
    """Yield the directory of the cgroup `path` and of those above it, as far as the mount shows them. In a container it
    may show the container's own cgroup, or all of them."""
    top, inside = mount.directory, Path(path)
    inside = inside.relative_to(mount.root) if inside.is_relative_to(mount.root) else Path()
    group = top / inside
    if ".." in inside.parts or not group.is_dir():
        group = top
    yield group
    while group != top:
        group = group.parent
        yield group


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _plain(field: str) -> str:
    """A path of mountinfo, in which spaces are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
