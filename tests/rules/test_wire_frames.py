"""Frames: cut out of a stream wherever it breaks; one over the bound is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules.wire_messages import any_message
from tokenlake.errors import ProtocolRefused
from tokenlake.wire import HEADER_BYTES, FrameDecoder, engine, pack_frame
from tokenlake.wire.frames import decode, encode


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


def test_the_bytes_after_a_frame_remain() -> None:
    # A bulk reply is one frame, then raw bytes that are no frames.
    frames = FrameDecoder(64)
    arrived = frames.feed(pack_frame(engine.Bye()) + b"payload")
    assert next(arrived) == encode(engine.Bye())
    assert frames.rest() == b"payload"


@pytest.mark.parametrize("size", [65, 1 << 20, (1 << 32) - 1])
def test_a_frame_over_the_bound_ends_the_stream(size: int) -> None:
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
