"""Files in memory that lose at a power failure what was not synced, and fail where a test says so."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence

SECTOR = 512


class PowerFailure(BaseException):
    """The power failed during this operation; all later operations of the same `MediumFiles` fail too."""


class Inode:
    """One file: its bytes as processes see them, and those on the device."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []
        """Unsynced changes: (offset, bytes), or (new size, None)."""

    def change(self, at: int, data: bytes | None) -> None:
        _apply(self.content, at, data)
        self.pending.append((at, data))

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, *change)
        self.pending.clear()

    def lose(self, chance: random.Random, kept: float) -> None:
        """Keep each unsynced sector, and each unsynced change of the size, with the probability `kept`."""
        for at, data in self.pending:
            if data is None:
                if chance.random() < kept:
                    _apply(self.durable, at, None)
                continue
            for start in range(0, len(data), SECTOR):
                if chance.random() < kept:
                    _apply(self.durable, at + start, data[start : start + SECTOR])
        self.pending.clear()
        self.content = bytearray(self.durable)


def _apply(content: bytearray, at: int, data: bytes | None) -> None:
    end = at if data is None else at + len(data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if data is None:
        del content[at:]
    else:
        content[at:end] = data


class Medium:
    """The device: it outlives power failures."""

    def __init__(self, nbytes: int = 1 << 40) -> None:
        self.nbytes = nbytes
        self.names: dict[str, Inode] = {}
        self.durable_names: dict[str, Inode] = {}
        self.pending_names: list[tuple[str, Inode | None]] = []
        """Unsynced changes of names, in order."""
        self.fuse = -1
        """Operations until the power fails; below 0: it does not."""
        self.trouble: Callable[[str, str], None] = lambda operation, name: None
        """Called before each operation with its name and that of the file; it may raise or block."""

    def name(self, name: str, inode: Inode | None) -> None:
        _rename(self.names, name, inode)
        self.pending_names.append((name, inode))

    def burn(self) -> bool:
        """Count an operation. True: the power fails during it."""
        self.fuse -= 1
        return self.fuse == -1

    def lose_power(self, chance: random.Random) -> None:
        """Keep what was synced, and some of what was not."""
        kept = chance.choice((0.0, 0.5, 0.9, 1.0))
        inodes = {id(inode): inode for inode in (*self.names.values(), *self.durable_names.values())}
        inodes |= {id(inode): inode for _, inode in self.pending_names if inode is not None}
        for inode in inodes.values():
            inode.lose(chance, kept)
        for change in self.pending_names[: chance.randint(0, len(self.pending_names))]:
            _rename(self.durable_names, *change)
        self.pending_names.clear()
        self.names = dict(self.durable_names)
        self.fuse = -1


def _rename(names: dict[str, Inode], name: str, inode: Inode | None) -> None:
    if inode is None:
        names.pop(name, None)
        return
    for other in [other for other, each in names.items() if each is inode]:
        del names[other]
    names[name] = inode


class MediumFiles:
    """The files of a `Medium`, for one run of a process."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._dead = False

    def operate(self, operation: str, name: str = "") -> bool:
        """Begin an operation. True: the power fails in the middle of it."""
        if self._dead:
            raise PowerFailure
        self._medium.trouble(operation, name)
        self._dead = self._medium.burn()
        return self._dead

    def names(self) -> list[str]:
        self._medium.trouble("names", "")
        return list(self._medium.names)

    def open(self, name: str, *, create: bool = False, direct: bool = False) -> MediumFile:
        if create:
            if name in self._medium.names:
                raise FileExistsError(errno.EEXIST, "exists", name)
            failing = self.operate("create", name)
            self._medium.name(name, Inode())
            if failing:
                raise PowerFailure
        if name not in self._medium.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return MediumFile(self, self._medium, name, self._medium.names[name])

    def rename(self, old: str, new: str) -> None:
        failing = self.operate("rename", old)
        self._medium.name(new, self._medium.names[old])
        if failing:
            raise PowerFailure

    def remove(self, name: str) -> None:
        failing = self.operate("remove", name)
        if name not in self._medium.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        self._medium.name(name, None)
        if failing:
            raise PowerFailure

    def sync_names(self) -> None:
        if self.operate("sync_names"):
            raise PowerFailure
        for name, inode in self._medium.pending_names:
            _rename(self._medium.durable_names, name, inode)
        self._medium.pending_names.clear()

    def free_bytes(self) -> int:
        self._medium.trouble("free_bytes", "")
        return max(0, self._medium.nbytes - sum(len(inode.content) for inode in self._medium.names.values()))

    def close(self) -> None:
        pass


class MediumFile:
    """An open file of `MediumFiles`."""

    def __init__(self, files: MediumFiles, medium: Medium, name: str, inode: Inode) -> None:
        self._files = files
        self._medium = medium
        self._name = name
        self._inode = inode

    def size(self) -> int:
        return len(self._inode.content)

    def read(self, at: int, buffers: Sequence[memoryview]) -> int:
        self._medium.trouble("read", self._name)
        start = at
        for buffer in buffers:
            part = self._inode.content[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(part)
        return at - start

    def write(self, at: int, buffers: Sequence[memoryview | bytes]) -> None:
        failing = self._files.operate("write", self._name)
        data = b"".join(buffers)
        self._require_room(at + len(data))
        self._inode.change(at, data)
        if failing:
            raise PowerFailure

    def allocate(self, end: int) -> None:
        if end > self.size():
            self._size(end)

    def truncate(self, end: int) -> None:
        if end < self.size():
            self._size(end)

    def _size(self, end: int) -> None:
        failing = self._files.operate("size", self._name)
        self._require_room(end)
        self._inode.change(end, None)
        if failing:
            raise PowerFailure

    def _require_room(self, end: int) -> None:
        if end - self.size() > self._files.free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        if self._files.operate("sync", self._name):
            raise PowerFailure
        self._inode.sync()

    def close(self) -> None:
        pass
