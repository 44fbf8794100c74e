"""Messages: each survives encoding, damaged and malformed ones are refused."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.rules.wire_messages import DECODERS, MESSAGES, each_decoder, messages
from tokenlake.errors import ProtocolRefused
from tokenlake.wire import engine, peer
from tokenlake.wire.frames import decode, encode


@pytest.mark.parametrize(("decoder", "message"), MESSAGES)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_every_message_survives_encoding(
    decoder: msgspec.msgpack.Decoder[Any], message: type[msgspec.Struct], data: st.DataObject
) -> None:
    sent = data.draw(messages(message))
    received = decode(decoder, encode(sent))
    assert received == sent
    assert type(received) is message


def test_every_message_is_in_a_union_and_tags_differ() -> None:
    for module in (engine, peer):
        declared = {
            each
            for name in vars(module)
            if isinstance(each := getattr(module, name), type)
            and issubclass(each, msgspec.Struct)
            # A struct without a tag is no message but a part of messages.
            and each.__struct_config__.tag is not None
            and each.__module__ == module.__name__
        }
        known = {each for _, some in DECODERS.values() for each in some if each.__module__ == module.__name__}
        assert declared == known
        tags = [each.__struct_config__.tag for each in declared]
        assert len(set(tags)) == len(tags)


@each_decoder
@given(garbage=st.binary(max_size=60))
def test_garbage_is_refused_or_a_message(
    decoder: msgspec.msgpack.Decoder[Any], known: tuple[type[msgspec.Struct], ...], garbage: bytes
) -> None:
    with contextlib.suppress(ProtocolRefused):
        assert isinstance(decode(decoder, garbage), known)


@each_decoder
@settings(max_examples=examples(50))
@given(data=st.data())
def test_a_damaged_message_is_refused_or_a_message(
    decoder: msgspec.msgpack.Decoder[Any], known: tuple[type[msgspec.Struct], ...], data: st.DataObject
) -> None:
    damaged = bytearray(encode(data.draw(st.one_of(*map(messages, known)))))
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(1, len(damaged))) :]
    with contextlib.suppress(ProtocolRefused):
        assert isinstance(decode(decoder, bytes(damaged)), known)


@each_decoder
@pytest.mark.parametrize(
    "body",
    [b"", b"\x91" * 200_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x92\x09\xdd\xff\xff\xff\xff\x93"],
    ids=["empty", "deep", "4G items", "4G bytes", "4G ranges"],
)
def test_a_body_with_a_false_length_is_refused(
    decoder: msgspec.msgpack.Decoder[Any], known: tuple[type[msgspec.Struct], ...], body: bytes
) -> None:
    with pytest.raises(ProtocolRefused, match="does not know"):
        decode(decoder, body)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        *[
            (peer.peer_decoder, peer.MarkInFlight("t", bytes(32), value))
            for value in (math.nan, math.inf, -math.inf, -1.0, 1e10)
        ],
        (engine.request_decoder, engine.Match(1, b"", math.nan)),
        (engine.request_decoder, engine.Fetch(1, 1, -1, 2, 0.0)),
        (engine.request_decoder, engine.Fetch(1, 1, 0, 1 << 32, 0.0)),
        (engine.request_decoder, engine.Commit(1, 1, (-1,), 1, b"")),
        (engine.request_decoder, engine.Release(((1, 0, 1 << 40),))),
        (peer.peer_decoder, peer.Offer(1, "t", b"", (), 0, 1)),
        (peer.peer_decoder, peer.Offer(1, "t", b"", (), 64, 9)),
        (peer.peer_decoder, peer.Ping(1, (math.nan, 0.0, 0.0), 0.0)),
        *[
            (peer.peer_decoder, peer.Ping(1, (0.5, 0.0, retention_value), 0.0))
            for retention_value in (math.nan, math.inf, -1.0)
        ],
        (peer.peer_decoder, peer.Pong(1, (0.5, math.inf, 0.0), 0.0)),
        *[(peer.peer_decoder, peer.Pong(1, (0.5, 0.0, 0.0), load)) for load in (math.nan, math.inf, -1.0)],
    ],
    ids=lambda value: repr(value) if isinstance(value, msgspec.Struct) else "",
)
def test_a_number_out_of_bounds_is_refused(decoder: msgspec.msgpack.Decoder[Any], message: msgspec.Struct) -> None:
    with pytest.raises(ProtocolRefused, match="Expected"):
        decode(decoder, encode(message))
