"""Objects as files of a directory that several machines may share (POSIX, also NFS).

A file is written under a temporary name, synced, and renamed. No lock is trusted, and no listing is taken for complete.
Symbolic links are never followed, and what is no regular file is not opened for reading.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenlake_server.cold.base import MAX_LISTED, PARTIAL, Listed, Missing, Unfit

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A named pipe would let a plain open wait for ever."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs"})
"""File systems that show a new file to all their readers at once."""
LATE_S = 60.0
"""Time after which other machines see a new file: the longest for which NFS keeps a folder (`acdirmax`)."""
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)


class DirectoryObjects:
    """The objects in a directory. Folders have mode 0700 and files 0600."""

    poll_s = 2.0

    def __init__(self, path: Path) -> None:
        """Raises OSError where `path` is no directory."""
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._path = path
        self.late_s = 0.0 if file_system(self._root) in LOCAL else LATE_S

    def read(self, path: str) -> _FileReader:
        try:
            with self._folder(path) as (folder, name):
                fd = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno in _NOT_THERE:
                raise Missing(path) from None
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise Unfit("it is no regular file") from None
            raise
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise Unfit("it is no regular file")
        return _FileReader(fd, found.st_size)

    def write(self, path: str, parts: Iterator[memoryview], nbytes: int) -> None:
        with self._folder(path, make=True) as (folder, name):
            partial = f"{PARTIAL}{name}.{secrets.token_hex(8)}"
            fd = os.open(partial, _NEW, 0o600, dir_fd=folder)
            try:
                try:
                    for part in parts:
                        while part:
                            part = part[os.write(fd, part) :]
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=folder)
                raise

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                with self._folder(path) as (folder, name):
                    os.unlink(name, dir_fd=folder)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise

    def list(self, folder: str) -> Iterator[Listed]:
        try:
            with self._folder(f"{folder}/x") as (fd, _), os.scandir(fd) as entries:
                for count, entry in enumerate(entries):
                    if count >= MAX_LISTED:
                        return
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(found.st_mode):
                        yield Listed(f"{folder}/{entry.name}", found.st_size, found.st_mtime)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
            self.require()

    def require(self) -> None:
        if not os.path.samestat(os.fstat(self._root), os.stat(self._path)):
            raise OSError(errno.ESTALE, "another directory is at its path now")

    def close(self) -> None:
        """Release the directory."""
        os.close(self._root)

    @contextlib.contextmanager
    def _folder(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The folder of a path, open, and the last part of the path. Raises OSError."""
        *folders, name = path.split("/")
        fd = os.dup(self._root)
        try:
            for folder in folders:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, 0o700, dir_fd=fd)
                inner = os.open(folder, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd, name
        finally:
            os.close(fd)


def file_system(fd: int) -> str:
    """The kind of the file system of an open file, as the kernel names it; empty where that is not known."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            fields = line.split(" ")
            if len(fields) > 6 and fields[2] == number and "-" in fields:
                return fields[fields.index("-") + 1]
    return ""


class _FileReader:
    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self.nbytes = nbytes

    def read(self, room: memoryview) -> None:
        while room:
            got = os.readv(self._fd, [room])
            if not got:
                raise Unfit("it ends before it should")
            room = room[got:]

    def close(self) -> None:
        os.close(self._fd)
