"""Wire: every message comes back as it was, frames survive any cut of the stream, garbage is refused by name."""

from __future__ import annotations

import contextlib
import math
import typing
from typing import Any

import msgspec
import msgspec.inspect as types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenlake.errors import ProtocolRefused
from tokenlake.hints import MAX_TTL_S, Hints
from tokenlake.identity import SegmentKey
from tokenlake.wire import HEADER_BYTES, PROTOCOL_VERSION, Code, FrameDecoder, agree, engine, pack_frame, peer
from tokenlake.wire.frames import decode, encode
from tokenlake.wire.slots import NO_SLOT_BYTES, SLOT_BYTES, SlotRef, join_keys, split_keys, unpack_slots
from tokenlake.wire.version import OLDEST_VERSION

DECODERS: dict[str, tuple[msgspec.msgpack.Decoder[Any], tuple[type[msgspec.Struct], ...]]] = {
    "engine requests": (engine.request_decoder, typing.get_args(engine.EngineRequest)),
    "engine replies": (engine.reply_decoder, typing.get_args(engine.EngineReply)),
    "peers": (peer.peer_decoder, typing.get_args(peer.PeerMessage)),
    "handshakes": (peer.handshake_decoder, typing.get_args(peer.Handshake)),
    "bulk requests": (peer.bulk_request_decoder, (peer.Pull,)),
    "bulk replies": (peer.pulled_decoder, (peer.Pulled,)),
}
MESSAGES = [
    pytest.param(decoder, message, id=message.__name__) for decoder, known in DECODERS.values() for message in known
]
each_decoder = pytest.mark.parametrize(("decoder", "known"), DECODERS.values(), ids=DECODERS)


def values(of: types.Type) -> st.SearchStrategy[Any]:
    """Any value that the declared type takes."""
    match of:
        case types.BoolType():
            return st.booleans()
        case types.IntType(ge=least, lt=below, le=most):
            highest = below - 1 if below is not None else most
            return st.integers(-(1 << 63) if least is None else least, (1 << 64) - 1 if highest is None else highest)
        case types.FloatType(ge=least, le=most):
            return st.floats(least, most, allow_nan=False, width=64)
        case types.StrType():
            return st.text(st.characters(codec="utf-8"), max_size=20)
        case types.BytesType(min_length=shortest, max_length=longest):
            return st.binary(min_size=shortest or 0, max_size=70 if longest is None else min(longest, 70))
        case types.LiteralType(values=some):
            return st.sampled_from(some)
        case types.NoneType():
            return st.none()
        case types.UnionType(types=members):
            return st.one_of(*map(values, members))
        case types.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case types.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=4).map(tuple)
        case types.StructType(cls=cls):
            return messages(cls)
    raise NotImplementedError(f"a message holds {of}; teach this test to make one")


PRINTABLE = st.characters(codec="utf-8").filter(str.isprintable)


def messages(message: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    described = types.type_info(message)
    assert isinstance(described, types.StructType)
    made = {field.name: values(field.type) for field in described.fields}
    if message is Hints:
        # Whoever makes another one hears of it at once.
        made |= dict.fromkeys(("category", "stop_reason"), st.text(PRINTABLE, max_size=20))
        made |= {"outlook": st.integers(0, 2), "priority": st.integers(-1, 1), "ttl_s": st.floats(0.0, MAX_TTL_S)}
        made["output_tokens"] = st.integers(-1, (1 << 32) - 1)
    return st.builds(message, **made)


any_message = st.one_of(*[messages(message) for _, known in DECODERS.values() for message in known])


@pytest.mark.parametrize(("decoder", "message"), MESSAGES)
@settings(max_examples=30)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(
    decoder: msgspec.msgpack.Decoder[Any], message: type[msgspec.Struct], data: st.DataObject
) -> None:
    sent = data.draw(messages(message))
    received = decode(decoder, encode(sent))
    assert received == sent
    assert type(received) is message


def test_no_message_is_missing_and_no_tag_is_taken_twice() -> None:
    for module in (engine, peer):
        declared = {
            each
            for name in module.__all__
            if isinstance(each := getattr(module, name), type)
            and issubclass(each, msgspec.Struct)
            # Without a tag it is a part of messages.
            and each.__struct_config__.tag is not None
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
@settings(max_examples=50)
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
def test_a_body_that_promises_too_much_is_refused(
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
        (peer.peer_decoder, peer.Ping(1, (math.nan, 0.0, 0.0), 0.0, 0)),
        *[
            (peer.peer_decoder, peer.Ping(1, (0.5, 0.0, retention_value), 0.0, 0))
            for retention_value in (math.nan, math.inf, -1.0)
        ],
        (peer.peer_decoder, peer.Pong(1, (0.5, math.inf, 0.0), 0.0, 0)),
        *[(peer.peer_decoder, peer.Pong(1, (0.5, 0.0, 0.0), load, 0)) for load in (math.nan, math.inf, -1.0)],
    ],
    ids=lambda value: repr(value) if isinstance(value, msgspec.Struct) else "",
)
def test_a_number_that_nobody_can_mean_is_refused(
    decoder: msgspec.msgpack.Decoder[Any], message: msgspec.Struct
) -> None:
    with pytest.raises(ProtocolRefused, match="Expected"):
        decode(decoder, encode(message))


@given(st.lists(any_message, max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_frames_survive_any_cut_of_the_stream(sent: list[msgspec.Struct], cuts: list[int]) -> None:
    stream = b"".join(map(pack_frame, sent))
    frames = FrameDecoder(4096)
    bounds = sorted({0, *(min(cut, len(stream)) for cut in cuts), len(stream)})
    bodies: list[bytes] = []
    for start, stop in zip(bounds, [*bounds[1:], len(stream)], strict=True):
        bodies += frames.feed(stream[start:stop])
    assert bodies == [encode(message) for message in sent]
    assert frames.rest() == b""


def test_frames_survive_single_bytes() -> None:
    stream = b"".join(map(pack_frame, [engine.Bye(), engine.Heartbeat(7), engine.Abort(3)]))
    frames = FrameDecoder(64)
    bodies = [body for byte in stream for body in frames.feed(bytes([byte]))]
    assert [decode(engine.request_decoder, body) for body in bodies] == [
        engine.Bye(),
        engine.Heartbeat(7),
        engine.Abort(3),
    ]


def test_the_rest_of_a_stream_can_be_taken_over_after_a_frame() -> None:
    # A bulk reply is one frame, then raw bytes that are no frames.
    frames = FrameDecoder(64)
    arrived = frames.feed(pack_frame(engine.Bye()) + b"payload")
    assert next(arrived) == encode(engine.Bye())
    assert frames.rest() == b"payload"


@pytest.mark.parametrize("size", [65, 1 << 20, (1 << 32) - 1])
def test_a_frame_over_the_bound_is_refused_by_name_and_not_read_on(size: int) -> None:
    frames = FrameDecoder(64)
    arrived = frames.feed(pack_frame(engine.Bye()) + size.to_bytes(HEADER_BYTES, "little") + b"x")
    assert decode(engine.request_decoder, next(arrived)) == engine.Bye()
    with pytest.raises(ProtocolRefused, match=f"a frame of {size} bytes; at most 64"):
        next(arrived)
    with pytest.raises(ProtocolRefused, match=f"a frame of {size} bytes"):
        list(frames.feed(pack_frame(engine.Bye())))


def test_a_frame_as_long_as_the_bound_is_accepted() -> None:
    message = engine.Match(1, bytes(1000), 0.02)
    assert list(FrameDecoder(len(encode(message))).feed(pack_frame(message))) == [encode(message)]


indices = st.integers(0, (1 << 32) - 1)


@given(st.lists(st.builds(SlotRef, indices, indices, st.integers(0, (1 << 64) - 1)), max_size=5))
def test_slots_come_back_as_they_were(slots: list[SlotRef]) -> None:
    packed = b"".join(slot.pack() for slot in slots)
    assert len(packed) == len(slots) * SLOT_BYTES
    assert unpack_slots(packed) == slots


def test_a_slot_is_little_endian_and_zeros_stand_for_none() -> None:
    assert SlotRef(1, 2, 3).pack().hex() == "01000000020000000300000000000000"
    assert unpack_slots(NO_SLOT_BYTES) == [SlotRef(0, 0, 0)]


@given(st.lists(st.binary(min_size=32, max_size=32).map(SegmentKey), max_size=5))
def test_keys_come_back_as_they_were(keys: list[SegmentKey]) -> None:
    assert split_keys(join_keys(keys)) == keys


@pytest.mark.parametrize("length", [1, 15, 17, 31, 33])
def test_packed_keys_and_slots_of_a_wrong_length_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"keys take {length} bytes"):
        split_keys(bytes(length))
    with pytest.raises(ValueError, match=f"slots take {length} bytes"):
        unpack_slots(bytes(length))


def test_a_code_fits_a_byte_and_refusals_are_those_from_32_on() -> None:
    assert all(0 < code < 256 for code in Code)
    answers = {code.name for code in Code if not code.refused}
    assert answers == {"LOCAL", "REMOTE", "PENDING", "MISSING", "UNKNOWN", "LOST", "ELSEWHERE"} | {
        "RESERVED", "EXISTS", "COMMITTED", "EXPIRED",
    }  # fmt: skip


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_highest_version_that_both_know_is_spoken(oldest: int, newest: int) -> None:
    mine = set(range(OLDEST_VERSION, PROTOCOL_VERSION + 1))
    both = mine & set(range(oldest, newest + 1))
    if both:
        assert agree(oldest, newest) == max(both)
    else:
        with pytest.raises(ProtocolRefused, match=f"versions {oldest} to {newest}, this side {OLDEST_VERSION} to"):
            agree(oldest, newest)
