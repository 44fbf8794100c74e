"""How the values of settings are read and shown: sizes, numbers, addresses, peers and tenants.

A `Kind` reads a value as any of the sources gives it: TOML and flags their own types, the environment only
text. A value that does not fit raises ValueError, whose message is the noun phrase of what was expected.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

__all__ = ["Address", "Kind", "Peer", "Secret", "Tenant", "format_size", "parse_address", "parse_size"]

PAGE = 4096
HUGE_PAGE = 2 << 20
MASK = "***"

_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME_EXPECTED = "1 to 64 letters, digits, dots, underscores or hyphens"
_SIZE_EXPECTED = "a size such as 64MiB, 1GiB or a number of bytes"


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


@dataclass(frozen=True, slots=True)
class Kind:
    """How one setting is read and shown."""

    parse: Callable[[object], object]
    show: Callable[[Any], str] = str


def parse_size(value: object) -> int:
    """Bytes of `64MiB`, `1GiB`, `4096` or an int. Binary units only, no fractions."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,18})([KMGT]iB)?", value)):
        return int(match[1]) * (_UNITS[match[2]] if match[2] else 1)
    raise ValueError(_SIZE_EXPECTED)


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


def size(low: int, high: int, multiple: int = 1) -> Kind:
    """Bytes within [low, high]; a multiple of `multiple`."""
    step = f", a multiple of {format_size(multiple)}" if multiple > 1 else ""
    expected = f"{_SIZE_EXPECTED}, between {format_size(low)} and {format_size(high)}{step}"

    def parse(value: object) -> int:
        number = parse_size(value)
        if not low <= number <= high or number % multiple:
            raise ValueError(expected)
        return number

    return Kind(parse, format_size)


def whole(low: int, high: int) -> Kind:
    """A whole number within [low, high]."""
    expected = f"a whole number from {low} to {high}"

    def parse(value: object) -> int:
        number = _whole(value)
        if number is None or not low <= number <= high:
            raise ValueError(expected)
        return number

    return Kind(parse)


def real(low: float, high: float, unit: str) -> Kind:
    """A finite number within [low, high]; `unit` names it in the message."""
    expected = f"{unit} from {low:g} to {high:g}"

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(expected)
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise ValueError(expected) from None
        if not math.isfinite(number) or not low <= number <= high:
            raise ValueError(expected)
        return number

    return Kind(parse)


def truth() -> Kind:
    """true or false; as text also 1 or 0."""
    words = {"true": True, "1": True, "false": False, "0": False}

    def parse(value: object) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        raise ValueError("true or false")

    return Kind(parse, lambda value: "true" if value else "false")


def name() -> Kind:
    """The name of a node."""

    def parse(value: object) -> str:
        return _name(value, _NAME_EXPECTED)

    return Kind(parse)


def path(expected: str, *, longest: int = 4095, absolute: bool = False, optional: bool = False) -> Kind:
    """A path of at most `longest` bytes; the empty one only if `optional`."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or "\0" in value or not (value or optional):
            raise ValueError(expected)
        # A path from the environment may hold bytes that are no text.
        too_long = len(value.encode(errors="surrogateescape")) > longest
        if too_long or (value and absolute and not value.startswith("/")):
            raise ValueError(expected)
        return value

    return Kind(parse)


def one_of(*words: str) -> Kind:
    """One of these."""

    def parse(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise ValueError(f"one of {', '.join(words)}")

    return Kind(parse)


def failpoint() -> Kind:
    """Where a daemon ends itself; it knows the edges' names."""

    def parse(value: object) -> str:
        if isinstance(value, str) and re.fullmatch(r"([a-z]+\.[a-z]+(:[1-9][0-9]{0,8})?)?", value):
            return value
        raise ValueError("EDGE or EDGE:N, for tests only, or nothing")

    return Kind(parse)


def loopback(*, optional: bool = False) -> Kind:
    """`HOST:PORT` of this machine only: the sockets are not encrypted yet. Empty only if `optional`."""

    def parse(value: object) -> str:
        if optional and value == "":
            return ""
        address = parse_address(value)
        _require_loopback(address.host)
        return str(address)

    return Kind(parse)


def peers() -> Kind:
    """`name=host:port[/SIZE]`, each name and each address once; sizes for all or for none."""

    def parse(value: object) -> tuple[Peer, ...]:
        found = tuple(_peer(item) for item in _items(value, "a list of name=HOST:PORT[/SIZE]"))
        _require_unique((peer.name for peer in found), "each peer's name once; twice there is")
        addresses = (str(Address(peer.host, peer.port)) for peer in found)
        _require_unique(addresses, "each peer's address once; twice there is")
        if len({peer.memory is None for peer in found}) > 1:
            raise ValueError("a /SIZE for every peer or for none, because nodes must agree on their weights")
        return found

    return Kind(parse, lambda value: ",".join(map(str, value)))


def uids() -> Kind:
    """User ids."""
    return Kind(_uids, lambda value: ",".join(map(str, value)))


def tenants() -> Kind:
    """An array of tables {name, secret, uids, tokens, quota}, each name, uid and token once; only TOML holds it."""

    def parse(value: object) -> tuple[Tenant, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError("an array of tables [[tenants]] in the configuration file")
        found = tuple(_tenant(item) for item in value)
        _require_unique((tenant.name for tenant in found), "each tenant's name once; twice there is")
        _require_unique((uid for tenant in found for uid in tenant.uids), "each uid once; twice there is")
        tokens = [token for tenant in found for token in tenant.tokens]
        if len(set(tokens)) != len(tokens):  # the message must not show the token
            raise ValueError("each token once, over all tenants")
        return found

    return Kind(parse, lambda value: ", ".join(map(repr, value)))


def secret() -> Kind:
    """16 to 64 bytes in hexadecimal, shown masked; the empty text for none."""

    def parse(value: object) -> Secret:
        return Secret() if value == "" else Secret(_secret(value, "16 to 64 bytes in hexadecimal"))

    return Kind(parse, lambda value: MASK if value else "")


def _peer(item: object) -> Peer:
    expected = f"name=HOST:PORT[/SIZE] for each peer, not {item!r}"
    match = re.fullmatch(r"([^=]+)=([^/]+)(?:/(.+))?", item) if isinstance(item, str) else None
    if match is None:
        raise ValueError(expected)
    try:
        address = parse_address(match[2])
        memory = parse_size(match[3]) if match[3] else None
    except ValueError:
        raise ValueError(expected) from None
    _require_loopback(address.host)
    if address.port == 0 or memory == 0:
        raise ValueError(f"{expected}: port and size must not be 0")
    return Peer(_name(match[1], f"a peer's name of {_NAME_EXPECTED}"), address.host, address.port, memory)


def _tenant(item: object) -> Tenant:
    fields = ("name", "secret", "uids", "tokens", "quota")
    if not isinstance(item, dict) or not {"name", "secret"} <= item.keys():
        raise ValueError("tenants with a name and a secret each")
    if unknown := sorted(item.keys() - set(fields)):
        raise ValueError(f"tenants with the fields {', '.join(fields)} only, not {unknown[0]!r}")
    tenant = _name(item["name"], f"a tenant's name of {_NAME_EXPECTED}")
    tokens = item.get("tokens", [])
    if not isinstance(tokens, list) or not all(isinstance(token, str) and token for token in tokens):
        raise ValueError(f"a list of non-empty texts as tokens of tenant {tenant!r}")
    secret = _secret(item["secret"], f"16 to 64 bytes in hexadecimal as the secret of tenant {tenant!r}")
    quota = item.get("quota", 1.0)
    if not isinstance(quota, int | float) or isinstance(quota, bool) or not 0 < quota <= 1:
        raise ValueError(f"a share of memory above 0, at most 1, as the quota of tenant {tenant!r}, not {quota!r}")
    return Tenant(tenant, secret, _uids(item.get("uids", [])), tuple(tokens), float(quota))


def _secret(value: object, expected: str) -> bytes:
    # 64 bytes is the longest key of blake2b; below 16 a secret can be searched for.
    if not isinstance(value, str) or not re.fullmatch(r"(?:[0-9A-Fa-f]{2}){16,64}", value):
        raise ValueError(expected)
    return bytes.fromhex(value)


def _uids(value: object) -> tuple[int, ...]:
    numbers = [_whole(item) for item in _items(value, "a list of user ids")]
    found = tuple(number for number in numbers if number is not None and 0 <= number < 2**32 - 1)
    if len(found) != len(numbers):
        raise ValueError("a list of user ids")
    _require_unique(found, "each uid once; twice there is")
    return found


def _whole(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    return None


def _name(value: object, expected: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(expected)
    return value


def _items(value: object, expected: str) -> list[object]:
    """A list as it is, or text cut at its commas; blank text is the empty list."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")] if value.strip() else []
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError(expected)


def _require_loopback(host: str) -> None:
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ValueError("a loopback address (127.0.0.1, localhost or [::1]): there is no TLS for others yet")


def _require_unique(values: Iterable[object], message: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{message} {value}")
        seen.add(value)
