"""Messages: each survives encoding, and numbers out of bounds are refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.rules.wire_messages import DECODERS, MESSAGES, messages
from tokenlake.errors import ProtocolRefused
from tokenlake.layout import MAX_SHARDS
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


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (engine.request_decoder, engine.Match(1, b"", math.nan)),
        (engine.request_decoder, engine.Fetch(1, 1, -1, 2, 0.0)),
        (engine.request_decoder, engine.Fetch(1, 1, 0, 1 << 32, 0.0)),
        (engine.request_decoder, engine.Commit(1, 1, (-1,), 1, b"")),
        (engine.request_decoder, engine.Release(((1, 0, 1 << 40),))),
        (peer.peer_decoder, peer.Offer(1, "t", b"", (), 0, 1)),
        (peer.peer_decoder, peer.Offer(1, "t", b"", (), 64, MAX_SHARDS + 1)),
        (peer.peer_decoder, peer.Ping(1, (0.5, math.inf, 0.0), 0.0)),
    ],
    ids=lambda value: repr(value) if isinstance(value, msgspec.Struct) else "",
)
def test_a_number_out_of_bounds_is_refused(decoder: msgspec.msgpack.Decoder[Any], message: msgspec.Struct) -> None:
    with pytest.raises(ProtocolRefused, match="Expected"):
        decode(decoder, encode(message))
