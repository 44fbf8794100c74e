"""The kinds of settings: how a value is checked, converted and shown.

A `Kind` accepts values from every source: TOML and flags give typed values, the environment gives text. A value that is
not accepted raises ValueError; its message is a noun phrase that describes the accepted values.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tokenlake.config.values import (
    MASK,
    SIZE_EXPECTED,
    Address,
    Disk,
    KvEventStream,
    Peer,
    Secret,
    Tenant,
    format_size,
    is_loopback,
    parse_address,
    parse_size,
)
from tokenlake.location import LOCATION_EXPECTED, Location, parse_location, shown_location

__all__ = [
    "HUGE_PAGE",
    "PAGE",
    "Kind",
    "address",
    "endpoints",
    "cluster",
    "controls",
    "disks",
    "is_loopback",
    "is_own_address",
    "kv_events",
    "loopback",
    "name",
    "one_of",
    "optional",
    "password",
    "path",
    "peers",
    "location",
    "real",
    "secrets",
    "size",
    "tenants",
    "text",
    "truth",
    "uids",
    "whole",
]

PAGE = 4096
HUGE_PAGE = 2 << 20

LEAST_DISK_BYTES = 64 << 20
MAX_KV_EVENT_STREAMS = 16
MAX_SOCKET_PATH = 107
KV_EVENT_MEDIA = ("CPU", "EXTERNAL")
"""Media of KV events, as routers call them: memory of the host, and a pool outside the engine."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME_EXPECTED = "1 to 64 letters, digits, dots, underscores or hyphens"
_CLUSTER = re.compile(r"[a-z0-9._-]{1,64}")
_SECRET_EXPECTED = "32 to 128 hexadecimal digits (openssl rand -hex 32)"


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of one setting.

    `expected`: a noun phrase that describes all accepted values, with unit and bounds. `parse` converts a value and
    raises ValueError with `expected` or with a more detailed phrase. `show` is the inverse, for people."""

    expected: str
    parse: Callable[[object], object]
    show: Callable[[Any], str] = str


def size(low: int, high: int, multiple: int = 1) -> Kind:
    """Returns the kind of a number of bytes within [low, high] that is a multiple of `multiple`."""
    step = f", a multiple of {format_size(multiple)}" if multiple > 1 else ""
    expected = f"{SIZE_EXPECTED}, between {format_size(low)} and {format_size(high)}{step}"

    def parse(value: object) -> int:
        number = parse_size(value)
        if not low <= number <= high or number % multiple:
            raise ValueError(expected)
        return number

    return Kind(expected, parse, format_size)


def whole(low: int, high: int) -> Kind:
    """Returns the kind of a whole number within [low, high]."""
    expected = f"a whole number from {low} to {high}"

    def parse(value: object) -> int:
        number = _whole(value)
        if number is None or not low <= number <= high:
            raise ValueError(expected)
        return number

    return Kind(expected, parse)


def real(low: float, high: float, unit: str) -> Kind:
    """Returns the kind of a finite number within [low, high]. `unit`: the noun by which errors describe it, such as
    `seconds`."""
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

    return Kind(expected, parse)


def truth() -> Kind:
    """Returns the kind of a truth value: true or false; in the environment also 1 or 0."""
    words = {"true": True, "1": True, "false": False, "0": False}

    def parse(value: object) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        raise ValueError("true or false")

    return Kind("true or false", parse, lambda value: "true" if value else "false")


def name() -> Kind:
    """Returns the kind of a node's name."""

    def parse(value: object) -> str:
        return _name(value, _NAME_EXPECTED)

    return Kind(_NAME_EXPECTED, parse)


def location() -> Kind:
    """Returns the kind of a node's location (`tokenlake.location`), which may be empty."""
    expected = f"{LOCATION_EXPECTED}, or nothing"

    def parse(value: object) -> Location:
        if not isinstance(value, str):
            raise ValueError(expected)
        try:
            return parse_location(value)
        except ValueError:
            raise ValueError(expected) from None

    return Kind(expected, parse, shown_location)


def cluster() -> Kind:
    """Returns the kind of a cluster's name, which is also the trust domain of its nodes' SPIFFE identities."""
    expected = "1 to 64 lowercase letters, digits, dots, underscores or hyphens"

    def parse(value: object) -> str:
        if not isinstance(value, str) or not _CLUSTER.fullmatch(value):
            raise ValueError(expected)
        return value

    return Kind(expected, parse)


def path(expected: str, *, longest: int = 4095, absolute: bool = False, optional: bool = False) -> Kind:
    """Returns the kind of a path of at most `longest` bytes. The empty path is accepted only if `optional`."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or "\0" in value or not (value or optional):
            raise ValueError(expected)
        # A path from the environment may hold bytes that are not UTF-8.
        too_long = len(value.encode(errors="surrogateescape")) > longest
        if too_long or (value and absolute and not value.startswith("/")):
            raise ValueError(expected)
        return value

    return Kind(expected, parse)


def text() -> Kind:
    """The kind of a setting whose value is any text of at least one character."""
    expected = "a text in UTF-8"

    def parse(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError(expected)
        try:
            # A variable of the environment may hold bytes that are no text.
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(expected) from None
        return value

    return Kind(expected, parse)


def optional(kind: Kind) -> Kind:
    """A value of `kind`, or no value, which is given as the empty text or None, read as None and shown as the empty
    text."""
    expected = f"{kind.expected}, or nothing"

    def parse(value: object) -> object:
        if value is None or value == "":
            return None
        try:
            return kind.parse(value)
        except ValueError:
            raise ValueError(expected) from None

    return Kind(expected, parse, lambda value: "" if value is None else kind.show(value))


def one_of(*words: str) -> Kind:
    """Returns the kind of a value that is one of `words`."""
    expected = f"one of {', '.join(words)}"

    def parse(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise ValueError(expected)

    return Kind(expected, parse)


def address(*, optional: bool = False) -> Kind:
    """Returns the kind of `HOST:PORT`, with an IPv6 address in brackets. Empty is accepted only if `optional`."""
    expected = "HOST:PORT, or [IPv6]:PORT" + (", or nothing" if optional else "")

    def parse(value: object) -> str:
        if optional and value == "":
            return ""
        try:
            return str(parse_address(value))
        except ValueError:
            raise ValueError(expected) from None

    return Kind(expected, parse)


def loopback(*, optional: bool = False) -> Kind:
    """`HOST:PORT` on a loopback address, for pages that every process that reaches them may read. Empty is accepted
    only if `optional`."""

    def parse(value: object) -> str:
        if optional and value == "":
            return ""
        address = parse_address(value)
        if not is_loopback(address.host):
            raise ValueError("a loopback address (127.0.0.1, localhost or [::1])")
        return str(address)

    expected = "HOST:PORT of this machine: 127.0.0.1, localhost or [::1]"
    return Kind(f"{expected}, or nothing" if optional else expected, parse)


def endpoints() -> Kind:
    """A list of `HOST:PORT`, each once, of servers on any machine."""
    expected = "a list of HOST:PORT"

    def parse(value: object) -> tuple[Address, ...]:
        try:
            found = tuple(parse_address(item) for item in _items(value, expected))
        except ValueError:
            raise ValueError(expected) from None
        if any(not each.port for each in found):
            raise ValueError(f"{expected} with ports from 1 to 65535")
        _require_unique(map(str, found), "each endpoint once; given twice:")
        return found

    return Kind(expected, parse, lambda value: ",".join(map(str, value)))


def is_own_address(host: str) -> bool:
    """True for an IP address that a single interface may have: no host name, and not the address of all interfaces."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def peers() -> Kind:
    """The kind of a setting whose value lists nodes as `name=host:port[/SIZE]`, where SIZE is a node's memory: each
    name and each address once, and sizes for all entries or for none."""
    expected = "a list of name=HOST:PORT[/SIZE]"

    def parse(value: object) -> tuple[Peer, ...]:
        found = tuple(_peer(item) for item in _items(value, expected))
        _require_unique((peer.name for peer in found), "each peer's name once; given twice:")
        addresses = (str(Address(peer.host, peer.port)) for peer in found)
        _require_unique(addresses, "each peer's address once; given twice:")
        if len({peer.memory is None for peer in found}) > 1:
            raise ValueError("a /SIZE for every peer or for none, because nodes must agree on their weights")
        return found

    return Kind(expected, parse, lambda value: ",".join(map(str, value)))


def controls() -> Kind:
    """The kind of a setting whose value lists control planes of daemons: paths of sockets, and `NODE=HOST:PORT`."""
    expected = "a list of paths of sockets and of NODE=HOST:PORT"

    def parse(value: object) -> tuple[str | Peer, ...]:
        found: list[str | Peer] = []
        for item in _items(value, expected):
            if isinstance(item, str) and item.startswith("/"):
                found.append(item)
                continue
            peer = _peer(item)
            if peer.memory is not None:
                raise ValueError(expected)
            found.append(peer)
        _require_unique(map(str, found), "each control plane once; given twice:")
        return tuple(found)

    return Kind(expected, parse, lambda value: ",".join(map(str, value)))


def disks() -> Kind:
    """A list of `PATH[:SIZE]`: absolute paths of directories, each once."""
    expected = "a list of PATH[:SIZE], with absolute paths and sizes from 64MiB on"

    def parse(value: object) -> tuple[Disk, ...]:
        found = tuple(_disk(item, expected) for item in _items(value, expected))
        _require_unique((disk.path for disk in found), "each path once; given twice:")
        return found

    return Kind(expected, parse, lambda value: ",".join(map(str, value)))


def uids() -> Kind:
    """Returns the kind of a list of user ids."""
    return Kind("a list of user ids", _uids, lambda value: ",".join(map(str, value)))


def tenants() -> Kind:
    """An array of tables {name, secret, uids, tokens, quota} with each name, uid and token once; from TOML only."""
    expected = "an array of tables [[tenants]] in the configuration file"

    def parse(value: object) -> tuple[Tenant, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(expected)
        found = tuple(_tenant(item) for item in value)
        _require_unique((tenant.name for tenant in found), "each tenant's name once; given twice:")
        _require_unique((uid for tenant in found for uid in tenant.uids), "each uid once; given twice:")
        tokens = [token for tenant in found for token in tenant.tokens]
        if len(set(tokens)) != len(tokens):  # without `_require_unique`, whose message would show the token
            raise ValueError("each token once, over all tenants")
        return found

    return Kind(expected, parse, lambda value: ", ".join(map(repr, value)))


def kv_events() -> Kind:
    """An array of tables, one for each stream of KV events; from TOML only."""
    expected = "an array of tables [[kv_events]] in the configuration file"

    def parse(value: object) -> tuple[KvEventStream, ...]:
        if not isinstance(value, list | tuple) or len(value) > MAX_KV_EVENT_STREAMS:
            raise ValueError(f"{expected}, at most {MAX_KV_EVENT_STREAMS}")
        found = tuple(_kv_event_stream(item) for item in value)
        _require_unique((f"{each.tenant}/{each.model}" for each in found), "each tenant and model once; given twice:")
        addresses = [address for each in found for address in each.addresses]
        fixed = (str(each) for each in addresses if not isinstance(each, Address) or each.port)
        _require_unique(fixed, "each address once; given twice:")
        return found

    return Kind(expected, parse, lambda value: ", ".join(map(str, value)))


def password() -> Kind:
    """A text, shown masked; the empty text for none."""
    expected = "a text"

    def parse(value: object) -> Secret:
        if not isinstance(value, str):
            raise ValueError(expected)
        return Secret(value.encode(errors="surrogateescape"))

    return Kind(expected, parse, lambda value: MASK if value else "")


def secrets() -> Kind:
    """One secret of 16 to 64 bytes in hexadecimal or a list of them, shown masked."""
    expected = f"one secret or a list, each of {_SECRET_EXPECTED}"

    def parse(value: object) -> tuple[Secret, ...]:
        return tuple(Secret(_secret(item, expected)) for item in _items(value, expected))

    return Kind(expected, parse, lambda value: ", ".join([MASK] * len(value)))


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
    if address.port == 0 or memory == 0:
        raise ValueError(f"{expected}: port and size must not be 0")
    return Peer(_name(match[1], f"a peer's name of {_NAME_EXPECTED}"), address.host, address.port, memory)


def _disk(item: object, expected: str) -> Disk:
    if not isinstance(item, str) or not item.startswith("/") or "\0" in item:
        raise ValueError(expected)
    path, _, size = item.rpartition(":")
    if not path:
        return Disk(item)
    try:
        nbytes = parse_size(size)
    except ValueError:
        raise ValueError(expected) from None
    if nbytes < LEAST_DISK_BYTES:
        raise ValueError(expected)
    return Disk(path, nbytes)


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
    secret = _secret(item["secret"], f"{_SECRET_EXPECTED} as the secret of tenant {tenant!r}")
    quota = item.get("quota", 1.0)
    if not isinstance(quota, int | float) or isinstance(quota, bool) or not 0 < quota <= 1:
        raise ValueError(f"a share of memory above 0, at most 1, as the quota of tenant {tenant!r}, not {quota!r}")
    return Tenant(tenant, secret, _uids(item.get("uids", [])), tuple(tokens), float(quota))


def _kv_event_stream(item: object) -> KvEventStream:
    fields = (
        *("model", "endpoint", "replay", "tenant", "topic", "block_tokens", "medium", "encoding", "uids"),
        "beyond_loopback",
    )
    if not isinstance(item, dict) or "model" not in item:
        raise ValueError("kv_events with a model each")
    if unknown := sorted(item.keys() - set(fields)):
        raise ValueError(f"kv_events with the fields {', '.join(fields)} only, not {unknown[0]!r}")
    for name, longest in (("model", 256), ("topic", 512)):
        text = item.get(name, "-")
        if not isinstance(text, str) or not 0 < len(text) <= longest or not text.isprintable():
            raise ValueError(f"a text of 1 to {longest} printable characters as {name!r} of kv_events")
    blocks = item.get("block_tokens", 16)
    if not isinstance(blocks, int) or isinstance(blocks, bool) or not 1 <= blocks <= 1 << 16:
        raise ValueError(f"1 to {1 << 16} tokens as 'block_tokens' of kv_events, not {blocks!r}")
    for name, known in (("medium", KV_EVENT_MEDIA), ("encoding", ("map", "array")), ("beyond_loopback", (False, True))):
        if item.get(name, known[0]) not in known:
            raise ValueError(f"one of {', '.join(map(str, known))} as {name!r} of kv_events, not {item[name]!r}")
    return KvEventStream(
        item["model"],
        _kv_event_address("endpoint", item),
        _kv_event_address("replay", item),
        _name(item.get("tenant", "default"), f"a tenant's name of {_NAME_EXPECTED}"),
        item.get("topic", ""),
        blocks,
        item.get("medium", KV_EVENT_MEDIA[0]),
        item.get("encoding", "map"),
        _uids(item.get("uids", [])),
    )


def _kv_event_address(name: str, item: dict[str, object]) -> Address | str | None:
    if name not in item:
        return None
    value = item[name]
    if isinstance(value, str) and (at := value.removeprefix("ipc://")).startswith("/"):
        if len(at.encode(errors="surrogateescape")) > MAX_SOCKET_PATH or "\0" in at:
            raise ValueError(f"a path of at most {MAX_SOCKET_PATH} bytes as {name!r} of kv_events")
        return at
    try:
        found = parse_address(value.removeprefix("tcp://") if isinstance(value, str) else value)
        ipaddress.ip_address(found.host)
    except ValueError:
        raise ValueError(f"ipc:///PATH or IP:PORT as {name!r} of kv_events, not {value!r}") from None
    if not is_loopback(found.host) and item.get("beyond_loopback") is not True:
        raise ValueError(
            f"a Unix socket or a loopback address as {name!r} of kv_events, or also 'beyond_loopback = true': the "
            "events contain the tokens of prompts, and everyone who reaches the address can read them"
        )
    return found


def _secret(value: object, expected: str) -> bytes:
    # 64 bytes is the longest key of blake2b; a secret of less than 16 bytes could be found by trying.
    if not isinstance(value, str) or not re.fullmatch(r"(?:[0-9A-Fa-f]{2}){16,64}", value):
        raise ValueError(expected)
    return bytes.fromhex(value)


def _uids(value: object) -> tuple[int, ...]:
    numbers = [_whole(item) for item in _items(value, "a list of user ids")]
    found = tuple(number for number in numbers if number is not None and 0 <= number < 2**32 - 1)
    if len(found) != len(numbers):
        raise ValueError("a list of user ids")
    _require_unique(found, "each uid once; given twice:")
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
    """The items of a list, or of text that is split at commas; blank text is the empty list. For another type raises
    ValueError with the message `expected`."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")] if value.strip() else []
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError(expected)


def _require_unique(values: Iterable[object], message: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{message} {value}")
        seen.add(value)
