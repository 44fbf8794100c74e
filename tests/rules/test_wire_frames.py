"""Frames and raw bytes: cut out of a stream wherever it breaks; a frame over the bound is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.errors import ProtocolRefused
from tokenlake.wire import HEADER_BYTES, FrameDecoder, engine, pack_frame
from tokenlake.wire.frames import decode, encode

BOUND = 300


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER_BYTES, "little") + body


@given(
    st.lists(st.tuples(st.binary(max_size=BOUND), st.binary(max_size=BOUND)), max_size=6),
    st.lists(st.integers(1, 200), min_size=1, max_size=8),
)
def test_frames_and_raw_bytes_in_pieces(messages: list[tuple[bytes, bytes]], sizes: list[int]) -> None:
    stream = b"".join(frame(body) + payload for body, payload in messages)
    decoder = FrameDecoder(BOUND)
    at = turn = 0

    def receive() -> None:
        nonlocal at, turn
        size = sizes[turn % len(sizes)]
        decoder.add(stream[at : at + size])
        at, turn = at + size, turn + 1

    for body, payload in messages:
        while (got := decoder.next_frame()) is None:
            receive()
        assert got == body
        target = memoryview(bytearray(len(payload)))
        filled = decoder.take(target)
        while filled < len(target):
            receive()
            filled += decoder.take(target[filled:])
        assert target == payload
    assert decoder.next_frame() is None
    assert decoder.rest() == b""


@given(st.binary(max_size=BOUND), st.binary(max_size=20), st.integers(1, 50))
def test_missing_bytes_end_with_the_frame(body: bytes, behind: bytes, most: int) -> None:
    stream = frame(body) + behind
    decoder = FrameDecoder(BOUND)
    at = 0
    while (got := decoder.next_frame()) is None:
        size = min(decoder.missing, most)
        assert size > 0
        decoder.add(stream[at : at + size])
        at += size
    assert (got, stream[at:]) == (body, behind)


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
