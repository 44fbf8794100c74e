"""Types of the values of settings: sizes, addresses, peers, secrets, tenants."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

MASK = "***"
"""The text that is shown in place of a secret."""
NAME_EXPECTED = "1 to 64 letters, digits, dots, underscores or hyphens"
HEX = re.compile(r"(?:[0-9A-Fa-f]{2}){16,64}")
"""64 bytes is the longest key of blake2b; a secret of less than 16 bytes could be found by trying."""
MAX_SOCKET_PATH = 107
"""Bytes that Linux allows in the address of a Unix socket."""
LEAST_DISK_BYTES = 64 << 20

Uid = Annotated[int, Meta(ge=0, le=(1 << 32) - 2)]
_Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")]
_SIZE = "a size such as 64MiB, 1GiB or a number of bytes"
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


def is_own_address(host: str) -> bool:
    """True for an IP address that a single interface may have: no host name, and not the address of all interfaces."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_unspecified
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


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of processes that share cache. A process belongs to a tenant by its uid or by a token that it sends.

    `secret` is the key of the tenant's hashes. The representation masks it and the tokens.
    """

    name: _Name
    secret: Secret
    uids: tuple[Uid, ...] = ()
    tokens: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    quota: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Limit of the tenant's share of a node's memory."""
    salt_quota: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Limit of the share of the tenant's memory at a node that the requests with one salt may have."""

    def __repr__(self) -> str:
        uids = ",".join(map(str, self.uids))
        held = f"uids=({uids}), tokens={len(self.tokens)}, quota={self.quota:g}"
        return f"Tenant(name={self.name!r}, secret={MASK}, {held})"


class KvEventStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream of KV events: the segments of one tenant and model on this node, for routers."""

    model: Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f]{1,256}\Z")]
    """The name under which the engines of the tenant serve the model."""
    endpoint: Address | str | None = None
    """Where routers subscribe: the path of a Unix socket, or an address for TCP; None until the default is known."""
    replay: Address | str | None = None
    """Where routers ask for messages that they missed; None: nowhere."""
    tenant: _Name = "default"
    topic: Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f]{0,512}\Z")] = ""
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 16)] = 16
    """Tokens of a block of the routers."""
    medium: Literal["CPU", "EXTERNAL"] = "CPU"
    """As routers call it: memory of the host, or a pool outside the engine."""
    encoding: Literal["map", "array"] = "map"
    uids: tuple[Uid, ...] = ()
    """Users that may read the stream within this machine, beside the daemon's own and root."""
    beyond_loopback: bool = False
    """Addresses may be such that all who reach them read the stream."""

    def __post_init__(self) -> None:
        if self.open_to_all and not self.beyond_loopback:
            raise ValueError(
                "a Unix socket or a loopback address, or also 'beyond_loopback = true': the events contain the tokens "
                "of prompts, and everyone who reaches the address can read them"
            )

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
        raise ValueError(f"{_SIZE}: the unit {other[1]!r} is not known, write KiB, MiB, GiB or TiB")
    raise ValueError(_SIZE)


def format_size(size: int) -> str:
    """The shortest text from which `parse_size` returns the same number."""
    for unit, factor in _UNITS.items():
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_address(value: object) -> Address:
    """An address from `HOST:PORT` or `[IPv6]:PORT`, port 0 to 65535. Raises ValueError."""
    expected = "HOST:PORT, or [IPv6]:PORT"
    if not isinstance(value, str):
        raise ValueError(expected)
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", value)
    if match is None:
        raise ValueError(expected)
    if int(match[3]) > 65535:
        raise ValueError(f"{expected} with a port up to 65535")
    return Address(match[1] or match[2], int(match[3]))


def parse_peer(value: object, *, sized: bool = True) -> Peer:
    """A node from `name=HOST:PORT[/SIZE]`, without `/SIZE` unless `sized`. Raises ValueError."""
    expected = f"NODE=HOST:PORT{'[/SIZE]' if sized else ''} for each, not {value!r}"
    match = re.fullmatch(r"([A-Za-z0-9._-]{1,64})=([^/]+)(?:/(.+))?", value) if isinstance(value, str) else None
    try:
        address = parse_address(match and match[2])
        memory = parse_size(match[3]) if match and match[3] else None
    except ValueError:
        raise ValueError(expected) from None
    if match is None or address.port == 0 or memory == 0 or (memory and not sized):
        raise ValueError(f"{expected}: port and size must not be 0")
    return Peer(match[1], address.host, address.port, memory)


def parse_disk(value: object) -> Disk:
    """A device from `PATH[:SIZE]`. Raises ValueError without a message."""
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ValueError
    path, _, size = value.rpartition(":")
    if not path:
        return Disk(value)
    if (nbytes := parse_size(size)) < LEAST_DISK_BYTES:
        raise ValueError
    return Disk(path, nbytes)


def parse_kv_events(table: Any) -> dict[str, Any]:
    """A table of `kv_events` with its addresses read: `ipc:///PATH`, a path, or `IP:PORT`. Raises ValueError."""
    if not isinstance(table, dict):
        raise ValueError
    return table | {name: _kv_address(name, table[name]) for name in ("endpoint", "replay") if name in table}


def _kv_address(name: str, value: object) -> Address | str:
    if isinstance(value, str) and (at := value.removeprefix("ipc://")).startswith("/"):
        if len(at.encode(errors="surrogateescape")) > MAX_SOCKET_PATH or "\0" in at:
            raise ValueError(f"a path of at most {MAX_SOCKET_PATH} bytes as {name!r} of kv_events")
        return at
    try:
        found = parse_address(value.removeprefix("tcp://") if isinstance(value, str) else value)
        ipaddress.ip_address(found.host)
    except ValueError:
        raise ValueError(f"ipc:///PATH or IP:PORT as {name!r} of kv_events, not {value!r}") from None
    return found
