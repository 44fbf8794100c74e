"""The protocol of ZMQ: what a reader sends is read in any pieces, and never kept beyond one frame and one message."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenlake.errors import ProtocolRefused
from tokenlake_server.kv_events.zmtp import MAX_FRAME_BYTES, MAX_FRAMES, Incoming, message, opening

HELLO = opening("SUB")
KINDS = frozenset(("SUB",))
PING = b"\4\7\4PING\0\0"
SUBSCRIBE = b"\4\14\11SUBSCRIBEkv"


def taken(sent: bytes, cuts: list[int]) -> tuple[list[tuple[bytes, ...]], bytes, str]:
    """The messages, the answers and the refusal for some bytes that come in pieces."""
    incoming, answers = Incoming(KINDS), b""
    messages: list[tuple[bytes, ...]] = []
    places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    for start, stop in itertools.pairwise(places):
        try:
            found, answer = incoming.take(sent[start:stop])
        except ProtocolRefused as error:
            return messages, answers, str(error)
        messages += found
        answers += answer
    return messages, answers, ""


@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=MAX_FRAMES).map(tuple), max_size=5),
    st.lists(st.integers(0, 2000), max_size=8),
)
def test_messages_in_any_pieces(messages: list[tuple[bytes, ...]], cuts: list[int]) -> None:
    sent = HELLO + b"".join(map(message, messages))
    assert taken(sent, cuts) == (messages, b"", "")


@given(st.binary(max_size=600), st.lists(st.integers(0, 700), max_size=8), st.booleans())
@example(b"\2" + b"\xff" * 8, [], True)
@example(b"\1\0" * 20, [], True)
@example(b"\6\0\0\0\0\0\0\0\0", [], True)
def test_any_bytes_are_refused_or_read(sent: bytes, cuts: list[int], greeted: bool) -> None:
    """The same in any pieces, but for what comes in the piece that is refused. Never another error."""
    sent = (HELLO if greeted else b"") + sent
    whole, pieces = taken(sent, []), taken(sent, cuts)
    assert bool(whole[2]) == bool(pieces[2])
    if not whole[2]:
        assert whole == pieces


@given(st.lists(st.binary(max_size=64), max_size=60))
def test_what_is_kept_is_bounded(pieces: list[bytes]) -> None:
    incoming = Incoming(KINDS)
    incoming.take(HELLO)
    with contextlib.suppress(ProtocolRefused):
        for piece in pieces:
            incoming.take(piece)
            assert len(incoming._buffer) <= MAX_FRAME_BYTES + 9
            assert len(incoming._frames) <= MAX_FRAMES


def test_commands() -> None:
    """A PING is answered; the commands of ZMTP 3.1 mean what messages do in 3.0."""
    assert taken(HELLO + PING + SUBSCRIBE, []) == ([(b"\1kv",)], b"\4\5\4PONG", "")


STRANGE = {
    **{HELLO[:10] + bytes([version]) + HELLO[11:]: "ZMTP 3" for version in (0, 1, 2)},
    b"GET / HTTP/1.1\r\n\r\n": "it does not speak ZMTP 3",
    opening("PUB"): "a socket of the kind 'PUB'",
    HELLO.replace(b"NULL", b"PLAIN\0\0\0\0", 1)[: len(HELLO)]: "a security mechanism",
    HELLO + b"\2" + (1 << 40).to_bytes(8, "big"): "a frame of 1099511627776 bytes",
    HELLO + b"\1\1x" * 20: "more than 8 frames",
    HELLO + b"\xf0": "the flags 240",
    HELLO[:64] + b"\4\x06\x05READ": "no READY command",
}
"""By what is sent: a part of the refusal."""


@pytest.mark.parametrize("sent", STRANGE)
def test_what_no_reader_sends(sent: bytes) -> None:
    assert STRANGE[sent] in taken(sent + bytes(64), [])[2]
