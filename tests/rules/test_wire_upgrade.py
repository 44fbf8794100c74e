"""A cluster is upgraded one node at a time: the frames of the versions before are understood, and a version that adds a
field to every message understands this one and is understood by it."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest

from tests.rules.next_version import ADDED, installed
from tests.rules.recorded_frames import DECODERS, Recorded, fields_of, messages_of, recorded
from tokenlake.wire.frames import decode, encode

WHAT_TO_DO = (
    "Nodes that run now send and expect these bytes. A field is added only at the end of a message, with a default. "
    "For any other change raise PROTOCOL_VERSION, and OLDEST_VERSION if this version cannot serve nodes of the one "
    "before (tokenlake/wire/version.py). Do not change the recorded frames"
)


@pytest.fixture(scope="module")
def next_version() -> Iterator[dict[str, ModuleType]]:
    with installed() as modules:
        yield modules


@pytest.mark.parametrize("frame", recorded(), ids=lambda frame: f"{frame.version}-{frame.decoder}-{frame.message}")
def test_a_recorded_frame_has_the_same_meaning(frame: Recorded) -> None:
    try:
        message = decode(DECODERS[frame.decoder], frame.body)
    except Exception as error:
        pytest.fail(f"a {frame.message} of version {frame.version} is refused: {error}. {WHAT_TO_DO}")
    assert type(message).__name__ == frame.message, WHAT_TO_DO
    assert begins(fields_of(message), frame.fields), f"{frame.message}: {fields_of(message)}. {WHAT_TO_DO}"


def test_every_message_is_recorded() -> None:
    declared = {(decoder, message.__name__) for decoder in DECODERS for message in messages_of(decoder)}
    lacking = declared - {(frame.decoder, frame.message) for frame in recorded()}
    assert not lacking, f"run `python -m tests.rules.recorded_frames` and commit its lines for {sorted(lacking)}"


@pytest.mark.parametrize("frame", recorded(), ids=lambda frame: f"{frame.version}-{frame.decoder}-{frame.message}")
def test_a_version_with_one_field_more(frame: Recorded, next_version: dict[str, ModuleType]) -> None:
    """A version with one field more is understood and understands."""
    newer = decode(next_decoder(next_version, frame.decoder), frame.body)
    assert newer.added == ADDED
    message = decode(DECODERS[frame.decoder], frame.body)
    understood = decode(DECODERS[frame.decoder], encode(newer))
    assert understood == message
    assert "added" not in message.__struct_fields__


def next_decoder(modules: dict[str, ModuleType], name: str) -> msgspec.msgpack.Decoder[Any]:
    module, _, decoder = name.partition(".")
    found: msgspec.msgpack.Decoder[Any] = getattr(modules[f"tokenlake.wire.{module}"], decoder)
    return found


def begins(found: Any, expected: Any) -> bool:
    """Whether a value is the expected one; each list, also within others, may be longer than the expected one."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) >= len(expected) and all(map(begins, found, expected))
    return bool(found == expected)
