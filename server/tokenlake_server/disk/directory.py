"""The directory of a device: its identity, the names of its files, and what they hold while no daemon uses them.

A directory whose files are of another version or cluster keeps them under other names, `aside-K-...`: no daemon uses
them, and none removes them.
"""

from __future__ import annotations

import contextlib
import logging
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tokenlake.disk.places import RECORD_BYTES
from tokenlake_server.disk.files import Files
from tokenlake_server.disk.table import BLOCK_BYTES, Records, Slab, read_slab, read_sound, scan
from tokenlake_server.start.standing_orders import FILE

log = logging.getLogger(__name__)

FORMAT = 2
"""Version of the format of all files in the directory."""
IDENTITY = "tokenlake-disk.json"
FRESH_IDENTITY = "tokenlake-disk.new"
_SLAB = re.compile(r"slab-([0-9]{5})")
_TABLE = re.compile(r"table-([0-9]{5})")
_ASIDE = re.compile(r"aside-([0-9]+)-(.+)")


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


def orders_names(files: Files) -> list[str]:
    """The names of the files with orders of operators."""
    return [name for name in files.names() if name == FILE]


def files_bytes(files: Files) -> int:
    """Bytes of all files of the tier, of those kept aside, and of the orders. Raises OSError."""
    return _bytes_of(files, own_names(files) + aside_names(files) + orders_names(files))


def aside_names(files: Files) -> list[str]:
    """The names of the files that were kept aside."""
    return sorted(name for name in files.names() if _ASIDE.fullmatch(name))


class SurveyedSlab(NamedTuple):
    """A slab as its table has it."""

    slab: Slab
    name: str
    """Name of its file."""
    stored: Records


def survey(files: Files) -> list[SurveyedSlab]:
    """The slabs of a directory, with their sound records; changes nothing. Raises OSError."""
    found = []
    for number in slab_numbers(files):
        name, table = slab_name(number), table_name(number)
        names = files.names()
        blocks = [content(files, table)[:BLOCK_BYTES]] if table in names else []
        if name in names:
            file = files.open(name)
            try:
                block = bytearray(BLOCK_BYTES)
                file.read(0, [memoryview(block)])
                blocks.append(bytes(block))
            finally:
                file.close()
        slab = next((each for each in (read_slab(number, block) for block in blocks) if each is not None), None)
        if slab is None or table not in names:
            continue
        file = files.open(table)
        try:
            places = max(0, file.size() - BLOCK_BYTES) // RECORD_BYTES
            found.append(SurveyedSlab(slab, name, scan(file, places).stored))
        finally:
            file.close()
    return found


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
        return f"the directory has no whole {IDENTITY}"
    if identity.format != FORMAT:
        return f"the directory has format {identity.format}, and this daemon writes format {FORMAT}"
    if identity.cluster != cluster:
        return f"the directory belongs to cluster '{identity.cluster}', and this node to cluster '{cluster}'"
    return ""


def keep_aside(files: Files, names: Sequence[str], reason: str) -> str:
    """Give files of another version or cluster other names. Returns a text that says why. Raises OSError."""
    matches = map(_ASIDE.fullmatch, aside_names(files))
    number = max((int(match[1]) for match in matches if match is not None), default=0) + 1
    for name in names:
        files.rename(name, f"aside-{number}-{name}")
    files.sync_names()
    return f"{reason}; its files are kept aside as aside-{number}-*"


def aside_bytes(files: Files) -> int:
    """Bytes of the files that were kept aside. Raises OSError."""
    return _bytes_of(files, aside_names(files))


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


def _bytes_of(files: Files, names: Sequence[str]) -> int:
    nbytes = 0
    for name in names:
        file = files.open(name)
        nbytes += file.size()
        file.close()
    return nbytes
