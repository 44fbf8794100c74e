"""The directory of a device: its identity, and the names of its files."""

from __future__ import annotations

import contextlib
import logging
import re
import zlib

import msgspec

from tokenlake_server.disk.files import Files
from tokenlake_server.disk.table import BLOCK_BYTES, read_sound
from tokenlake_server.start.standing_orders import FILE

log = logging.getLogger(__name__)

FORMAT = 2
"""Version of the format of all files in the directory."""
IDENTITY = "tokenlake-disk.json"
FRESH_IDENTITY = "tokenlake-disk.new"
_SLAB = re.compile(r"slab-([0-9]{5})")
_TABLE = re.compile(r"table-([0-9]{5})")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a directory and the format of its files, in a file of their own. Another format may have other
    fields than `format`. A daemon uses a directory of its format and its cluster."""

    format: int
    cluster: str = ""
    node: str = ""
    device: str = ""
    """A random name of the directory, for people."""
    encrypted: bool = False


_DECODER = msgspec.json.Decoder(Identity)
"""Made once: msgspec ends the process where two threads are the first to use a type at the same time."""


def read_identity(files: Files) -> Identity | None:
    """The identity of a directory; None where it has none, or one with two damaged copies. Raises OSError."""
    if IDENTITY not in files.names():
        return None
    data = content(files, IDENTITY)
    for copy in (data[:BLOCK_BYTES], data[BLOCK_BYTES:]):
        body, _, rest = copy.rstrip(b"\0").partition(b"\n")
        if rest == f"{zlib.crc32(body):08x}\n".encode():
            return _decoded(body)
    # Another format has no copies.
    found = _decoded(data)
    return found if found is not None and found.format != FORMAT else None


def _decoded(data: bytes) -> Identity | None:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return _DECODER.decode(data)
    return None


def pack_identity(identity: Identity) -> bytes:
    """The content of the file with an identity."""
    body = msgspec.json.encode(identity)
    copy = body + f"\n{zlib.crc32(body):08x}\n".encode()
    return copy.ljust(BLOCK_BYTES, b"\0") * 2


def content(files: Files, name: str) -> bytes:
    """The bytes of a file, up to the first that cannot be read. Raises OSError."""
    file = files.open(name)
    try:
        data = bytearray(file.size())
        count = read_sound(file, 0, memoryview(data))
    finally:
        file.close()
    return bytes(data[:count])


def own_names(files: Files) -> list[str]:
    """The names of the files of the tier that are in use, the identity last: a crash while they are renamed or removed
    one after the other leaves a directory that is treated in the same way again. Without the orders."""
    patterns = (_SLAB, _TABLE)
    names = files.names()
    own = [name for name in names if name == FRESH_IDENTITY or any(each.fullmatch(name) for each in patterns)]
    return sorted(own) + [name for name in names if name == IDENTITY]


def files_bytes(files: Files) -> int:
    """Bytes of all files of the tier, and of the orders. Raises OSError."""
    nbytes = 0
    for name in own_names(files) + [name for name in files.names() if name == FILE]:
        file = files.open(name)
        nbytes += file.size()
        file.close()
    return nbytes


def slab_numbers(files: Files) -> list[int]:
    """The numbers of the slabs of which a directory has the file or the table."""
    matches = [_SLAB.fullmatch(name) or _TABLE.fullmatch(name) for name in files.names()]
    return sorted({int(match[1]) for match in matches if match is not None})


def slab_name(number: int) -> str:
    """The name of a slab's file."""
    return f"slab-{number:05}"


def table_name(number: int) -> str:
    """The name of its table."""
    return f"table-{number:05}"


def refusal_of(identity: Identity | None, cluster: str) -> str:
    """The reason why a daemon of this cluster must not use the files of a directory; empty if it may."""
    if identity is None:
        return f"it has segments, and no whole {IDENTITY}"
    if identity.format != FORMAT:
        return f"its files have format {identity.format}, and this daemon writes format {FORMAT}"
    if identity.cluster != cluster:
        return f"its segments belong to cluster '{identity.cluster}', and this node to cluster '{cluster}'"
    return ""


def write_identity(files: Files, identity: Identity) -> None:
    """Give a directory an identity, all at once. Raises OSError."""
    if FRESH_IDENTITY in files.names():
        files.remove(FRESH_IDENTITY)
    _write(files, FRESH_IDENTITY, identity, create=True)
    files.rename(FRESH_IDENTITY, IDENTITY)
    files.sync_names()


def repair_identity(files: Files, identity: Identity) -> None:
    """Write both copies of the identity again where one of them is damaged. Raises OSError."""
    if content(files, IDENTITY) != pack_identity(identity):
        log.warning("one of the two copies of %s was damaged, and is written anew", IDENTITY)
        _write(files, IDENTITY, identity)


def _write(files: Files, name: str, identity: Identity, *, create: bool = False) -> None:
    file = files.open(name, create=create)
    try:
        file.write(0, [pack_identity(identity)])
        file.sync()
    finally:
        file.close()
