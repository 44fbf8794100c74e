"""The types of values that are no numbers or texts: sizes, addresses, peers, secrets, tenants."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

__all__ = ["MASK", "SIZE_EXPECTED", "Address", "Peer", "Secret", "Tenant", "format_size", "parse_address", "parse_size"]

MASK = "***"
"""Shown in place of a secret."""
SIZE_EXPECTED = "a size such as 64MiB, 1GiB or a number of bytes"

_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


class Address(NamedTuple):
    """Where to listen or connect; an IPv6 host stands without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Peer(msgspec.Struct, frozen=True):
    """Another node. `memory` is its weight in the ring in bytes; None: all nodes weigh the same."""

    name: str
    host: str
    port: int
    memory: int | None = None

    def __str__(self) -> str:
        size = "" if self.memory is None else f"/{format_size(self.memory)}"
        return f"{self.name}={Address(self.host, self.port)}{size}"


class Secret(bytes):
    """Bytes that appear in no representation; msgspec refuses to encode them."""

    def __repr__(self) -> str:
        return MASK if self else "none"

    __str__ = __repr__


class Tenant(msgspec.Struct, frozen=True):
    """Who may see each other's cache. A connection belongs to it by its uid or by a token it shows.

    `secret` keys the tenant's hashes; it and the tokens appear in no representation.
    """

    name: str
    secret: bytes
    uids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    quota: float = 1.0
    """Share of a node's memory that it may have."""

    def __repr__(self) -> str:
        uids = ",".join(map(str, self.uids))
        held = f"uids=({uids}), tokens={len(self.tokens)}, quota={self.quota:g}"
        return f"Tenant(name={self.name!r}, secret={MASK}, {held})"


def parse_size(value: object) -> int:
    """Bytes of `64MiB`, `1GiB`, `4096` or an int. Binary units only, no fractions."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,18})([KMGT]iB)?", value)):
        return int(match[1]) * (_UNITS[match[2]] if match[2] else 1)
    raise ValueError(SIZE_EXPECTED)


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads back exactly."""
    for unit, factor in _UNITS.items():
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_address(value: object) -> Address:
    """`HOST:PORT` or `[IPv6]:PORT`, port 0 to 65535."""
    expected = "HOST:PORT"
    if not isinstance(value, str):
        raise ValueError(expected)
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", value)
    if match is None:
        raise ValueError(expected)
    if int(match[3]) > 65535:
        raise ValueError(f"{expected} with a port up to 65535")
    return Address(match[1] or match[2], int(match[3]))
