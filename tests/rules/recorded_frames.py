"""Frames of each protocol version that nodes of this version may meet: `frames/version-N.txt`, one message a line.

A line has the decoder, the message, the body of its frame in hexadecimal, and its fields as JSON, the tag first.
`python -m tests.rules.recorded_frames` adds lines for messages of the present version that have none. Recorded lines
are never rewritten: other nodes send these bytes.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect as types

from tokenlake.wire import engine, peer, query, supervision
from tokenlake.wire.frames import encode
from tokenlake.wire.version import OLDEST_VERSION, PROTOCOL_VERSION

DIRECTORY = Path(__file__).parent / "frames"
DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (engine, peer, query, supervision)
    for name, value in vars(module).items()
    if isinstance(value, msgspec.msgpack.Decoder) and not name.startswith("_")
}
"""All decoders of frames, by module and name."""
HEXADECIMAL = "0123456789abcdef"


class Recorded(NamedTuple):
    """One line."""

    version: int
    decoder: str
    message: str
    body: bytes
    fields: list[Any]


def messages_of(decoder: str) -> tuple[type[msgspec.Struct], ...]:
    """The messages that a decoder takes."""
    known = DECODERS[decoder].type
    return typing.get_args(known) or (known,)


def fields_of(message: msgspec.Struct) -> list[Any]:
    """The fields of a message as JSON has them, the tag first."""
    fields: list[Any] = json.loads(msgspec.json.encode(message))
    return fields


def recorded() -> list[Recorded]:
    """The recorded frames of all versions that this version speaks."""
    return [
        Recorded(version, decoder, message, bytes.fromhex(body), json.loads(fields))
        for version in range(OLDEST_VERSION, PROTOCOL_VERSION + 1)
        for line in _path(version).read_text().splitlines()
        for decoder, message, body, fields in [line.split(" ", 3)]
    ]


def _path(version: int) -> Path:
    return DIRECTORY / f"version-{version}.txt"


def _sample(of: types.Type, at: int) -> Any:
    """A value of the type that is no default; `at` makes the values of neighbouring fields differ."""
    match of:
        case types.BoolType():
            return at % 2 == 0
        case types.IntType(le=most, lt=below):
            return min(3 + at, most if most is not None else 1 << 20, below - 1 if below is not None else 1 << 20)
        case types.FloatType(le=most):
            return min(0.25 + at, 1.0 if most is None else most)
        case types.StrType():
            return f"text {HEXADECIMAL[at % 16]}"
        case types.BytesType(min_length=shortest, max_length=longest):
            return bytes([at + 1]) * (shortest or min(32, longest or 32))
        case types.LiteralType(values=some):
            return some[-1]
        case types.UnionType(types=members):
            return _sample(next(each for each in members if not isinstance(each, types.NoneType)), at)
        case types.TupleType(item_types=items):
            return tuple(_sample(item, at + number) for number, item in enumerate(items))
        case types.VarTupleType(item_type=item):
            return (_sample(item, at), _sample(item, at + 1))
        case types.NamedTupleType(cls=named, fields=fields):
            return named(*[_sample(field.type, at + number) for number, field in enumerate(fields)])
        case types.StructType(cls=struct):
            return _made(struct)
    raise NotImplementedError(f"a message holds {of}; teach this script to make one")


SPECIAL = {"outlook": 1, "priority": -1}
"""Fields with few values, that no type bounds."""


def _made(message: type[msgspec.Struct]) -> msgspec.Struct:
    described = types.type_info(message)
    assert isinstance(described, types.StructType)
    values = {field.name: SPECIAL.get(field.name, _sample(field.type, at)) for at, field in enumerate(described.fields)}
    return message(**values)


def main() -> None:
    """Add the messages of the present version that have no line."""
    path = _path(PROTOCOL_VERSION)
    lines = path.read_text().splitlines() if path.exists() else []
    known = {tuple(line.split(" ", 2)[:2]) for line in lines}
    for decoder in DECODERS:
        for message in messages_of(decoder):
            if (decoder, message.__name__) not in known:
                made = _made(message)
                lines.append(f"{decoder} {message.__name__} {encode(made).hex()} {json.dumps(fields_of(made))}")
    path.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
