"""A stream of frames and raw bytes, read one frame at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.errors import ProtocolRefused
from tokenlake.wire import FrameDecoder
from tokenlake.wire.frames import HEADER_BYTES

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


def test_a_frame_over_the_bound_is_refused() -> None:
    decoder = FrameDecoder(BOUND)
    decoder.add((BOUND + 1).to_bytes(HEADER_BYTES, "little"))
    with pytest.raises(ProtocolRefused, match=f"at most {BOUND}"):
        decoder.next_frame()
    with pytest.raises(ProtocolRefused, match=f"at most {BOUND}"):
        _ = decoder.missing
