"""The types of settings: a Python type with msgspec's constraints, and how its values are written as text."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tokenlake.config.values import (
    HEX,
    MASK,
    MAX_SOCKET_PATH,
    NAME_EXPECTED,
    Address,
    Disk,
    KvEventStream,
    Peer,
    Secret,
    Tenant,
    Uid,
    format_size,
    parse_address,
    parse_disk,
    parse_kv_events,
    parse_peer,
    parse_size,
)
from tokenlake.location import LOCATION_EXPECTED, Location, parse_location, shown_location

PAGE = 4096
HUGE_PAGE = 2 << 20
MAX_KV_EVENT_STREAMS = 16
_SECRETS = "one secret or a list, each of 32 to 128 hexadecimal digits (openssl rand -hex 32)"


class Form(NamedTuple):
    """How values of a type are written. `read` converts what a source gives, for TOML and flags a typed value and for
    the environment a text, into what `msgspec.convert` takes; it raises ValueError with a noun phrase that describes
    the accepted values, or without a message. `show` is its inverse, for people."""

    read: Callable[[Any], object] = lambda value: value
    show: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class Kind:
    """What the annotation of a field says of its values. `expected`: a noun phrase with unit and bounds."""

    type: Any
    expected: str
    form: Form

    @classmethod
    def of(cls, hint: Any) -> Kind:
        """The kind of an annotation. Its parts: a type that `msgspec.convert` knows; a `Meta` whose description is the
        noun phrase, to which its bounds are added; a `Form` for values that are not written as TOML does."""
        about = getattr(hint, "__metadata__", ())
        plain = hint.__origin__ if about else hint
        form = next((each for each in about if isinstance(each, Form)), None)
        meta = next((each for each in about if isinstance(each, Meta)), Meta())
        if types.NoneType in typing.get_args(plain):
            inner = cls.of(typing.get_args(plain)[0])
            read, show = inner.form
            either = Form(
                lambda value: None if value is None or value == "" else read(value),
                lambda value: "" if value is None else show(value),
            )
            return cls(hint, f"{inner.expected}, or nothing", either)
        if typing.get_origin(plain) is Literal:
            return cls(hint, f"one of {', '.join(typing.get_args(plain))}", form or Form())
        if plain is bool:
            return cls(hint, "true or false", Form(show=lambda value: str(value).lower()))
        expected = meta.description or "a whole number"
        if meta.ge is not None and meta.le is not None:
            show = form.show if form else "{:g}".format if plain is float else str
            expected += f" from {show(meta.ge)} to {show(meta.le)}"
            if meta.multiple_of:
                expected += f", a multiple of {show(meta.multiple_of)}"
        return cls(hint, expected, form or Form())

    def parse(self, value: object) -> Any:
        """The value of the setting. Raises ValueError with a noun phrase that describes the accepted values."""
        try:
            return msgspec.convert(self.form.read(value), self.type, strict=False, dec_hook=_custom)
        except msgspec.ValidationError as error:
            # The message names the field of a table, and shows no value but one of few words.
            raise ValueError(f"{self.expected}: {error}" if "$[" in str(error) else self.expected) from None
        except ValueError as error:
            raise ValueError(str(error) or self.expected) from None

    def show(self, value: Any) -> str:
        """The inverse of `parse`, for people."""
        return self.form.show(value)


def _custom(kind: type, value: object) -> object:
    if isinstance(value, Secret):
        return value
    if kind is not Secret or not isinstance(value, str) or not HEX.fullmatch(value):
        raise ValueError("Expected 32 to 128 hexadecimal digits")
    return Secret(bytes.fromhex(value))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _utf8(value: object) -> str:
    try:
        # A variable of the environment may hold bytes that are no text.
        _text(value).encode()
    except UnicodeEncodeError:
        raise ValueError from None
    return _text(value)


def _short(value: object) -> str:
    if len(_text(value).encode(errors="surrogateescape")) > MAX_SOCKET_PATH:
        raise ValueError
    return _text(value)


def _items(value: object) -> list[object]:
    """The items of a list, or of text that is split at commas; blank text is the empty list."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")] if value.strip() else []
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError


def _once(values: Iterable[object], what: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(f"each {what} once; given twice: {value}")
        seen.add(value)


def _shown(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def _addresses(value: object) -> list[Address]:
    found = [parse_address(item) for item in _items(value)]
    if not all(each.port for each in found):
        raise ValueError("a list of HOST:PORT with ports from 1 to 65535")
    _once(found, "endpoint")
    return found


def _peers(value: object) -> list[Peer]:
    found = [parse_peer(item) for item in _items(value)]
    _once((peer.name for peer in found), "peer's name")
    _once((str(Address(peer.host, peer.port)) for peer in found), "peer's address")
    if len({peer.memory is None for peer in found}) > 1:
        raise ValueError("a /SIZE for every peer or for none, because nodes must agree on their weights")
    return found


def _controls(value: object) -> list[str | Peer]:
    found = [
        item if isinstance(item, str) and item.startswith("/") else parse_peer(item, sized=False)
        for item in _items(value)
    ]
    _once(map(str, found), "control plane")
    return found


def _disks(value: object) -> list[Disk]:
    found = [parse_disk(item) for item in _items(value)]
    _once((disk.path for disk in found), "path")
    return found


def _uids(value: object) -> list[object]:
    found = _items(value)
    _once(map(str, found), "uid")
    return found


def _tables(value: object) -> list[object]:
    if not isinstance(value, list | tuple):
        raise ValueError
    return list(value)


def _tenants(value: object) -> list[object]:
    found = _tables(value)
    tables = [each for each in found if isinstance(each, dict)]
    _once((str(each.get("name")) for each in tables), "tenant's name")
    for name in ("uids", "tokens"):
        lists = [each[name] for each in tables if isinstance(each.get(name), list)]
        used = [str(item) for each in lists for item in each]
        if len(set(used)) < len(used):  # without `_once`, whose message would show the token
            raise ValueError(f"each of the {name} once, over all tenants")
    return found


def _kv_events(value: object) -> list[dict[str, Any]]:
    found = [parse_kv_events(each) for each in _tables(value)]
    _once((f"{each.get('tenant', 'default')}/{each.get('model')}" for each in found), "tenant and model")
    addresses = [each[name] for each in found for name in ("endpoint", "replay") if name in each]
    _once((str(each) for each in addresses if not isinstance(each, Address) or each.port), "address")
    return found


def _path(longest: int, pattern: str, expected: str) -> Meta:
    return Meta(max_length=longest, pattern=pattern, description=expected)


Seconds = Annotated[float, Meta(ge=0.1, le=3600, description="seconds")]
Share = Annotated[float, Meta(ge=0.01, le=1, description="a share of the slots")]
Size = Annotated[
    int,
    Meta(ge=64 << 10, le=1 << 50, multiple_of=PAGE, description="a size such as 64MiB, 1GiB or a number of bytes,"),
    Form(parse_size, format_size),
]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z", description=NAME_EXPECTED)]
Cluster = Annotated[
    str,
    Meta(
        pattern=r"\A[a-z0-9._-]{1,64}\Z",
        description="1 to 64 lowercase letters, digits, dots, underscores or hyphens",
    ),
]
"""Also the trust domain of the nodes' SPIFFE identities."""
Text = Annotated[str, Meta(min_length=1, description="a text in UTF-8"), Form(_utf8)]
Path = Annotated[str, _path(4095, r"\A[^\0]*\Z", "a path, or nothing")]
AbsolutePath = Annotated[str, _path(4095, r"\A(?:/[^\0]*)?\Z", "an absolute path, or nothing")]
SocketPath = Annotated[str, _path(MAX_SOCKET_PATH, r"\A[^\0]+\Z", "a path of 1 to 107 bytes"), Form(_short)]
OptionalSocketPath = Annotated[
    str, _path(MAX_SOCKET_PATH, r"\A[^\0]*\Z", "a path of at most 107 bytes, or nothing"), Form(_short)
]
AddressText = Annotated[
    str, Meta(description="HOST:PORT, or [IPv6]:PORT"), Form(lambda value: str(parse_address(value)))
]
OptionalAddress = Annotated[
    str,
    Meta(description="HOST:PORT, or [IPv6]:PORT, or nothing"),
    Form(lambda value: value and str(parse_address(value))),
]
Place = Annotated[
    Location,
    Meta(description=f"{LOCATION_EXPECTED}, or nothing"),
    Form(lambda value: parse_location(_text(value)), shown_location),
]
Endpoints = Annotated[tuple[Address, ...], Meta(description="a list of HOST:PORT"), Form(_addresses, _shown)]
Peers = Annotated[tuple[Peer, ...], Meta(description="a list of name=HOST:PORT[/SIZE]"), Form(_peers, _shown)]
Controls = Annotated[
    tuple[str | Peer, ...],
    Meta(description="a list of paths of sockets and of NODE=HOST:PORT"),
    Form(_controls, _shown),
]
Disks = Annotated[
    tuple[Disk, ...],
    Meta(description="a list of PATH[:SIZE], with absolute paths and sizes from 64MiB on"),
    Form(_disks, _shown),
]
ColdPlace = Annotated[
    str,
    _path(
        2000,
        r"\A(?:/[^\0]*|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](?:/[A-Za-z0-9!_.()-]+)*/?)?\Z",
        "the absolute path of a directory, s3://BUCKET/PREFIX, or nothing",
    ),
]
ColdSize = Annotated[
    int,
    Meta(ge=64 << 20, le=1 << 60, description="a size such as 500GiB, 10TiB or a number of bytes,"),
    Form(parse_size, format_size),
]
CollectorUrl = Annotated[
    str, _path(2000, r"\A(?:https?://[^\s/?#@]+(?:/[^\s?#]*)?)?\Z", "a URL http://HOST:PORT or https://..., or nothing")
]
"""Without a user and a password: such a secret is given by the variable `OTEL_EXPORTER_OTLP_HEADERS`."""
Uids = Annotated[tuple[Uid, ...], Meta(description="a list of user ids"), Form(_uids, _shown)]
OptionalUid = Annotated[int, Meta(ge=0, le=(1 << 32) - 2)] | None
Tenants = Annotated[
    tuple[Tenant, ...],
    Meta(description="an array of tables [[tenants]] in the configuration file"),
    Form(_tenants, lambda value: ", ".join(map(repr, value))),
]
KvEvents = Annotated[
    tuple[KvEventStream, ...],
    Meta(
        max_length=MAX_KV_EVENT_STREAMS,
        description=f"an array of tables [[kv_events]] in the configuration file, at most {MAX_KV_EVENT_STREAMS}",
    ),
    Form(_kv_events, _shown),
]
Password = Annotated[
    Secret,
    Meta(description="a text"),
    Form(lambda value: Secret(_text(value).encode(errors="surrogateescape")), lambda value: MASK if value else ""),
]
Secrets = Annotated[
    tuple[Secret, ...],
    Meta(description=_SECRETS),
    Form(_items, lambda value: ", ".join([MASK] * len(value))),
]
