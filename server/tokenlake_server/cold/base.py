"""The operations on a place with objects that the cold tier uses: a directory (`directory.py`), a bucket (`s3.py`).

A path has parts of lower-case letters, digits, dots and hyphens, divided by slashes. The tier itself makes all paths
that it opens, or checks them (`is_path`): names that others wrote are never followed elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

_PATH = re.compile(r"[a-z0-9][a-z0-9.-]{0,99}(?:/[a-z0-9][a-z0-9.-]{0,99}){0,3}")
MAX_LISTED = 1 << 20
"""Limit of the objects that one listing gives; further ones are left out."""


class Missing(Exception):
    """There is no object of this path."""


class Unfit(Exception):
    """An object is not what it should be: too large, cut off, damaged, or of another kind. The message says how."""


class Listed(NamedTuple):
    """One object of a listing."""

    path: str
    nbytes: int
    modified_s: float
    """By the clock of the place, in seconds since 1970."""


class Reader(Protocol):
    """An object that is open for reading, from its begin to its end. Used by one thread."""

    nbytes: int
    """Bytes of the object."""

    def read(self, room: memoryview) -> None:
        """Fill `room` with the next bytes. Raises `Unfit` where the object ends before, and OSError."""

    def close(self) -> None:
        """Stop reading."""


class Objects(Protocol):
    """A place with objects. Several threads may use it. A call may take as long as the place does, also for ever; all
    raise OSError where the place fails."""

    def read(self, path: str) -> Reader:
        """Open an object. Raises `Missing`, `Unfit` and OSError."""

    def write(self, path: str, parts: Iterator[memoryview], nbytes: int) -> None:
        """Write an object of `nbytes`, whole or not at all; one of the same path is replaced. A part is valid until the
        next one is taken. An exception of `parts` passes through, and nothing is written then."""

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; those that are not there are no error."""

    def list(self, folder: str) -> Iterator[Listed]:
        """The objects directly in a folder, at most `MAX_LISTED`, in any order; none where there is no such folder. A
        directory also names what writers left half-written, whose last part begins with `PARTIAL`."""

    def require(self) -> None:
        """Raises OSError where the place is not there any more."""


PARTIAL = "."
"""First character of the names of files that are being written."""


def is_path(path: str) -> bool:
    """True for a path that the tier may open."""
    return _PATH.fullmatch(path) is not None


def read_whole(objects: Objects, path: str, most: int) -> memoryview:
    """The bytes of an object of at most `most` bytes. Raises `Missing`, `Unfit` and OSError."""
    reader = objects.read(path)
    try:
        if reader.nbytes > most:
            raise Unfit(f"it has {reader.nbytes} bytes; at most {most} expected")
        room = memoryview(bytearray(reader.nbytes))
        reader.read(room)
        return room
    finally:
        reader.close()


def write_whole(objects: Objects, path: str, data: bytes | memoryview) -> None:
    """Write an object. Raises OSError."""
    objects.write(path, iter((memoryview(data),)), len(data))
