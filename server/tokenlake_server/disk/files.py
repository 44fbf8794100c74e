"""The operations on files that the disk tier uses, and their implementation on a directory.

The tests have another implementation, in which a power failure discards all writes that were not synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

LOCK = "lock"
"""Name of the file that a daemon locks, so that no other process writes to the directory."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a file system, or of the quota of its user, that has no space left."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def no_space(error: OSError) -> bool:
    """True for an error that says that there is no space left."""
    return error.errno in NO_SPACE


class DirectoryInUse(Exception):
    """Another process has locked the directory; the message names the process where it is known."""


class File(Protocol):
    """An open file. Several threads may read and write different parts of it at the same time. All methods raise
    OSError."""

    def size(self) -> int:
        """Bytes of the file."""

    def read(self, at: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers, one behind the other, with the bytes from the offset `at` on. Returns the number of bytes,
        which is less than asked only at the end of the file."""

    def write(self, at: int, buffers: Sequence[memoryview | bytes]) -> None:
        """Write all bytes of the buffers, one behind the other, from the offset `at` on."""

    def allocate(self, end: int) -> None:
        """Let the file have at least `end` bytes, and give it the space for them where the file system can. Raises
        OSError with ENOSPC where there is none left."""

    def truncate(self, end: int) -> None:
        """Cut the file off behind its first `end` bytes."""

    def sync(self) -> None:
        """Return when all bytes that were written before are on the device."""

    def close(self) -> None:
        """Close the file. Its unsynced bytes may be lost."""


class Files(Protocol):
    """The files of one directory. All methods raise OSError."""

    def names(self) -> list[str]:
        """The names of all files."""

    def open(self, name: str, *, create: bool = False, direct: bool = False) -> File:
        """Open a file for reading and writing. `create`: a new one, which must not exist. `direct`: its bytes bypass
        the kernel's cache; offsets, lengths and memory are then multiples of 4096."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name; a file of that name is replaced."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def sync_names(self) -> None:
        """Return when all new, changed and removed names are on the device."""

    def free_bytes(self) -> int:
        """Bytes that new files may take."""

    def close(self) -> None:
        """Release the directory."""


class DirectoryFiles:
    """The files of a directory of this machine, with mode 0600."""

    def __init__(self, path: Path, *, lock: bool = True) -> None:
        """`lock`: take the lock of the directory, which is kept until `close`. Raises `DirectoryInUse`, and OSError
        where `path` is no directory of this user's."""
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._lock = -1
        self.direct = True
        """False where the file system does not support direct I/O, so that the kernel caches all bytes."""
        if lock:
            try:
                self._lock = self._take_lock()
            except BaseException:
                os.close(self._fd)
                raise

    def _take_lock(self) -> int:
        fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise OSError(errno.EINVAL, f"the file {LOCK!r} is a link to a file elsewhere, or no file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process = os.read(fd, 32).decode(errors="replace").strip()
            os.close(fd)
            raise DirectoryInUse(f"process {process}" if process.isdigit() else "another process") from None
        except BaseException:
            os.close(fd)
            raise
        # For people only: on a file system without space the lock is taken all the same.
        with contextlib.suppress(OSError):
            own = f"{os.getpid()}\n".encode()
            os.pwrite(fd, own, 0)
            os.ftruncate(fd, len(own))
        return fd

    def names(self) -> list[str]:
        """See `Files`."""
        return [name for name in os.listdir(self._fd) if name != LOCK]

    def open(self, name: str, *, create: bool = False, direct: bool = False) -> File:
        """See `Files`."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        if direct and self.direct:
            try:
                return _OpenFile(os.open(name, flags | os.O_DIRECT, 0o600, dir_fd=self._fd))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system has no direct I/O. The kernel may have made the file all the same.
                self.direct = False
                flags &= ~os.O_EXCL
        return _OpenFile(os.open(name, flags, 0o600, dir_fd=self._fd))

    def rename(self, old: str, new: str) -> None:
        """See `Files`."""
        os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """See `Files`."""
        os.unlink(name, dir_fd=self._fd)

    def sync_names(self) -> None:
        """See `Files`."""
        os.fsync(self._fd)

    def free_bytes(self) -> int:
        """See `Files`."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """See `Files`."""
        if self._lock >= 0:
            os.close(self._lock)
        os.close(self._fd)


class _OpenFile:
    """An open file of a `DirectoryFiles`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, at: int, buffers: Sequence[memoryview]) -> int:
        return _all(os.preadv, self._fd, at, list(buffers))

    def write(self, at: int, buffers: Sequence[memoryview | bytes]) -> None:
        views = [memoryview(each) for each in buffers]
        total = sum(map(len, views))
        if _all(os.pwritev, self._fd, at, views) != total:
            raise OSError(errno.EIO, "the device took no more bytes")

    def allocate(self, end: int) -> None:
        size = self.size()
        if size >= end:
            return
        if _libc.fallocate(self._fd, 0, size, end - size):
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, os.strerror(code))
            os.ftruncate(self._fd, end)

    def truncate(self, end: int) -> None:
        if self.size() > end:
            os.ftruncate(self._fd, end)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _all(call: _Vectored, fd: int, at: int, views: list[memoryview]) -> int:
    """Call `preadv` or `pwritev` until all views are done, or one call returns 0. Returns the number of bytes."""
    done = 0
    while views:
        count = call(fd, views, at + done)
        if not count:
            break
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
    return done


class _Vectored(Protocol):
    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...
