"""The objects of the index: journals and tables with the names of segments, and the root that says which tables count.

A journal is what one writer did within some seconds; a table is what many journals say together. Both have the same
form: names in order, each once, with the kind of the object and a time::

    | magic | digest of the rest | bytes of the head | head | names, 8 bytes | kinds, 2 bytes | minutes, 4 bytes |

The digest finds damage. It does not keep a writer of the place from lying: a wrong index costs misses, never bytes,
because every object proves itself.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from tokenlake_server.cold.base import Unfit, is_path
from tokenlake_server.cold.names import Shorts
from tokenlake_server.cold.sealed import MOST_SLOT_BYTES

ENTRY_BYTES = 14
MAX_JOURNAL = 1 << 16
"""Most entries of a journal."""
MAX_ENTRIES = 32 << 20
"""Most entries of a table, and of all tables together: 448 MiB of memory."""
MAX_KINDS = 4096
MAX_HEAD = 256 << 10
MAX_ROOT = 4 << 20
REMOVED = 0xFFFF
"""Kind of a name whose object was removed."""
ERASED = 0xFFFE
"""Kind of a name whose object an operator evicted: one that turns up without a later entry is removed."""
UNKNOWN = 0xFFFD
_MAGIC = b"tlindex1"
_ROOT_MAGIC = b"tlroot01"
_DIGEST_BYTES = 16
_LENGTH = struct.Struct("<I")
_START = len(_MAGIC) + _DIGEST_BYTES

Minute = int
"""Minutes since 1970 by the clock of the place, which all its writers read."""


class Kind(NamedTuple):
    """What objects have in common."""

    tag: int
    """Of their tenant."""
    slot_bytes: int


class Entries(NamedTuple):
    """Names with their kinds and times; arrays of equal length, in order of the names."""

    shorts: Shorts
    kinds: NDArray[np.uint16]
    minutes: NDArray[np.uint32]
    """Of the last use, or of the removal."""

    @classmethod
    def of(cls, changes: Mapping[int, tuple[int, Minute]]) -> Entries:
        """From (kind, minute) by name."""
        shorts = np.fromiter(changes, np.uint64, len(changes))
        kinds = np.fromiter((kind for kind, _ in changes.values()), np.uint16, len(changes))
        minutes = np.fromiter((minute for _, minute in changes.values()), np.uint32, len(changes))
        order = np.argsort(shorts)
        return cls(shorts[order], kinds[order], minutes[order])

    def cut(self, start: int, stop: int) -> Entries:
        """Consecutive ones of the entries."""
        return Entries(self.shorts[start:stop], self.kinds[start:stop], self.minutes[start:stop])

    def take(self, where: NDArray[np.bool_] | NDArray[np.intp]) -> Entries:
        """Some of the entries, which keep their order."""
        return Entries(self.shorts[where], self.kinds[where], self.minutes[where])


NO_ENTRIES = Entries(np.zeros(0, np.uint64), np.zeros(0, np.uint16), np.zeros(0, np.uint32))


class Kinds:
    """The kinds that this process knows, by number. Numbers are never reused."""

    def __init__(self) -> None:
        self._numbers: dict[Kind, int] = {}
        self.all: list[Kind] = []

    def number(self, kind: Kind) -> int:
        """The number of a kind. Raises `Unfit` where there are too many."""
        number = self._numbers.get(kind)
        if number is None:
            if len(self.all) >= MAX_KINDS:
                raise Unfit(f"the index has more than {MAX_KINDS} kinds of objects")
            number = self._numbers[kind] = len(self.all)
            self.all.append(kind)
        return number

    def known(self, kind: Kind) -> int:
        """The number of a kind, or `UNKNOWN`, which no entry has."""
        return self._numbers.get(kind, UNKNOWN)


class _Head(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=0, le=MAX_ENTRIES)]
    writer: Annotated[str, Meta(max_length=64)]
    kinds: Annotated[
        list[tuple[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)], Annotated[int, Meta(ge=1, le=MOST_SLOT_BYTES)]]],
        Meta(max_length=MAX_KINDS),
    ]


class Part(NamedTuple):
    """A journal or a table."""

    writer: str
    entries: Entries


def most_bytes(entries: int) -> int:
    """Most bytes of a journal or table with so many entries."""
    return _START + _LENGTH.size + MAX_HEAD + entries * ENTRY_BYTES


def pack_part(part: Part, kinds: Kinds) -> list[memoryview]:
    """The parts of the object of a journal or table."""
    entries = part.entries
    used = np.unique(entries.kinds[entries.kinds < ERASED])
    local = np.full(1 << 16, REMOVED, np.uint16)
    local[used] = np.arange(len(used), dtype=np.uint16)
    local[ERASED] = ERASED
    named = [tuple(kinds.all[number]) for number in used.tolist()]
    head = msgspec.msgpack.encode(_Head(len(entries.shorts), part.writer, named))
    body = [
        memoryview(_LENGTH.pack(len(head)) + head),
        *(
            memoryview(np.ascontiguousarray(column, form).view(np.uint8).data)
            for column, form in ((entries.shorts, "<u8"), (local[entries.kinds], "<u2"), (entries.minutes, "<u4"))
            if len(column)
        ),
    ]
    return [memoryview(_MAGIC + _digest(*body)), *body]


def read_part(data: memoryview, kinds: Kinds) -> Part:
    """A journal or table from its object. Raises `Unfit`."""
    body = data[_START:]
    if bytes(data[: len(_MAGIC)]) != _MAGIC or len(body) < _LENGTH.size:
        raise Unfit("it is no part of an index")
    if bytes(data[len(_MAGIC) : _START]) != _digest(body):
        raise Unfit("it is damaged")
    (length,) = _LENGTH.unpack_from(body)
    at = _LENGTH.size + length
    try:
        head = msgspec.msgpack.decode(body[_LENGTH.size : at], type=_Head)
    except msgspec.MsgspecError as error:
        raise Unfit(f"its head is not right: {error}") from None
    if len(body) != at + head.count * ENTRY_BYTES:
        raise Unfit("it has another number of entries than its head says")
    shorts = np.frombuffer(body, "<u8", head.count, at)
    numbers = np.frombuffer(body, "<u2", head.count, at + 8 * head.count)
    minutes = np.frombuffer(body, "<u4", head.count, at + 10 * head.count)
    if head.count > 1 and not bool((shorts[1:] > shorts[:-1]).all()):
        raise Unfit("its names are not in order")
    named = numbers < ERASED
    if head.count and named.any() and int(numbers[named].max()) >= len(head.kinds):
        raise Unfit("it has an entry of no kind")
    # Copies, whose parts are aligned, and which do not keep the whole object.
    table = np.full(1 << 16, REMOVED, np.uint16)
    for local, (tag, slot_bytes) in enumerate(head.kinds):
        table[local] = kinds.number(Kind(tag, slot_bytes))
    table[ERASED] = ERASED
    return Part(head.writer, Entries(shorts.astype(np.uint64), table[numbers], minutes.astype(np.uint32)))


class TableName(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A table of the root."""

    path: Annotated[str, Meta(max_length=200)]
    count: Annotated[int, Meta(ge=0, le=MAX_ENTRIES)]


class Root(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The tables that count, the newest first, and the journals whose entries they have."""

    sequence: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    tables: Annotated[tuple[TableName, ...], Meta(max_length=64)] = ()
    merged: Annotated[dict[str, Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]], Meta(max_length=1 << 15)] = {}
    """By the path of a journal, the minute of its merge."""
    merger: Annotated[str, Meta(max_length=64)] = ""


def pack_root(root: Root) -> bytes:
    """The root as an object."""
    body = msgspec.msgpack.encode(root)
    return _ROOT_MAGIC + _digest(body) + body


def read_root(data: memoryview) -> Root:
    """The root from its object. Raises `Unfit`."""
    body = data[_START:]
    if bytes(data[: len(_ROOT_MAGIC)]) != _ROOT_MAGIC:
        raise Unfit("it is no root of an index")
    if bytes(data[len(_ROOT_MAGIC) : _START]) != _digest(body):
        raise Unfit("it is damaged")
    try:
        root = msgspec.msgpack.decode(body, type=Root)
    except msgspec.MsgspecError as error:
        raise Unfit(f"it is not right: {error}") from None
    if not all(is_path(path) for path in (*root.merged, *(table.path for table in root.tables))):
        raise Unfit("it names a path that no writer makes")
    return root


def places_in(entries: Entries, shorts: Shorts) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """For each name the place where it is in `entries` or would be inserted, and whether it is there."""
    at = np.searchsorted(entries.shorts, shorts)
    if not len(entries.shorts):
        return at, np.zeros(len(shorts), bool)
    return at, np.asarray(entries.shorts[np.minimum(at, len(entries.shorts) - 1)] == shorts)


def combined(parts: Sequence[Entries]) -> Entries:
    """The entries of several parts, the newest part first: of each name that of the last minute, of equal ones a
    removal before an object, and then that of the newest part."""
    whole = NO_ENTRIES
    for older in parts:
        whole = _over(whole, older)
    return whole


def _over(newer: Entries, older: Entries) -> Entries:
    """The entries of two parts. In time that is linear in their length: the older one may have millions."""
    if not len(newer.shorts) or not len(older.shorts):
        return newer if len(newer.shorts) else older
    at, there = places_in(older, newer.shorts)
    both = at[there]
    wins = newer.minutes[there] > older.minutes[both]
    same = newer.minutes[there] == older.minutes[both]
    wins |= same & ((newer.kinds[there] >= ERASED) | (older.kinds[both] < ERASED))
    kinds, minutes = older.kinds.copy(), older.minutes.copy()
    kinds[both[wins]] = newer.kinds[there][wins]
    minutes[both[wins]] = newer.minutes[there][wins]
    new = ~there
    return Entries(
        np.insert(older.shorts, at[new], newer.shorts[new]),
        np.insert(kinds, at[new], newer.kinds[new]),
        np.insert(minutes, at[new], newer.minutes[new]),
    )


def objects_of(entries: Entries) -> NDArray[np.bool_]:
    """Which of the entries name an object."""
    return np.asarray(entries.kinds < ERASED)


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
