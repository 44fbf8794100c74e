"""Types of the values of settings: sizes, addresses, peers, secrets, tenants."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

import msgspec

MASK = "***"
"""The text that is shown in place of a secret."""
SIZE_EXPECTED = "a size such as 64MiB, 1GiB or a number of bytes"

_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


class Address(NamedTuple):
    """An address to listen at or connect to. An IPv6 host has no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """True for a loopback address and for the name `localhost`; False for any other address or name."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Peer(msgspec.Struct, frozen=True):
    """Another node of the cluster, from the setting `peers`. `memory`: its weight in the ring, in bytes; None where all
    nodes have the same weight."""

    name: str
    host: str
    port: int
    memory: int | None = None

    def __str__(self) -> str:
        size = "" if self.memory is None else f"/{format_size(self.memory)}"
        return f"{self.name}={Address(self.host, self.port)}{size}"


class Disk(msgspec.Struct, frozen=True):
    """A device of the disk tier: an existing directory, and the most bytes that it may take; None: what is free."""

    path: str
    nbytes: int | None = None

    def __str__(self) -> str:
        return self.path if self.nbytes is None else f"{self.path}:{format_size(self.nbytes)}"


class Secret(bytes):
    """Bytes whose representation is masked; msgspec refuses to encode them."""

    def __repr__(self) -> str:
        return MASK if self else "none"

    __str__ = __repr__


class Tenant(msgspec.Struct, frozen=True):
    """A group of processes that share cache. A process belongs to a tenant by its uid or by a token that it sends.

    `secret` is the key of the tenant's hashes. The representation masks it and the tokens.
    """

    name: str
    secret: bytes
    uids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    quota: float = 1.0
    """Limit of the tenant's share of a node's memory."""

    def __repr__(self) -> str:
        uids = ",".join(map(str, self.uids))
        held = f"uids=({uids}), tokens={len(self.tokens)}, quota={self.quota:g}"
        return f"Tenant(name={self.name!r}, secret={MASK}, {held})"


class KvEventStream(msgspec.Struct, frozen=True):
    """A stream of KV events: the segments of one tenant and model on this node, for routers."""

    model: str
    """The name under which the engines of the tenant serve the model."""
    endpoint: Address | str | None = None
    """Where routers subscribe: the path of a Unix socket, or an address for TCP; None until the default is known."""
    replay: Address | str | None = None
    """Where routers ask for messages that they missed; None: nowhere."""
    tenant: str = "default"
    topic: str = ""
    block_tokens: int = 16
    """Tokens of a block of the routers."""
    medium: str = "CPU"
    encoding: str = "map"
    uids: tuple[int, ...] = ()
    """Users that may read the stream within this machine, beside the daemon's own and root."""

    @property
    def addresses(self) -> tuple[Address | str, ...]:
        """Where the daemon listens for routers."""
        return tuple(each for each in (self.endpoint, self.replay) if each is not None)

    @property
    def open_to_all(self) -> bool:
        """True if an address is not only of this machine, so that all who reach it read the stream."""
        return any(isinstance(each, Address) and not is_loopback(each.host) for each in self.addresses)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.model} at {self.endpoint}"


def parse_size(value: object) -> int:
    """Bytes from `64MiB`, `1GiB`, `4096` or an int: binary units, no fractions. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,18})([KMGT]iB)?", value)):
        return int(match[1]) * (_UNITS[match[2]] if match[2] else 1)
    other = re.fullmatch(r"[0-9.]{1,18}\s*([A-Za-z]{1,8})", value) if isinstance(value, str) else None
    if other is not None and other[1] not in _UNITS:
        raise ValueError(f"{SIZE_EXPECTED}: the unit {other[1]!r} is not known, write KiB, MiB, GiB or TiB")
    raise ValueError(SIZE_EXPECTED)


def format_size(size: int) -> str:
    """The shortest text from which `parse_size` returns the same number."""
    for unit, factor in _UNITS.items():
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_address(value: object) -> Address:
    """An address from `HOST:PORT` or `[IPv6]:PORT`, port 0 to 65535. Raises ValueError."""
    expected = "HOST:PORT"
    if not isinstance(value, str):
        raise ValueError(expected)
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", value)
    if match is None:
        raise ValueError(expected)
    if int(match[3]) > 65535:
        raise ValueError(f"{expected} with a port up to 65535")
    return Address(match[1] or match[2], int(match[3]))
