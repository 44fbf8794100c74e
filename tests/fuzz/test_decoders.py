"""Each decoder takes any bytes: it returns a message of its protocol or raises `ProtocolRefused`, in bounded memory."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import pkgutil
import tracemalloc
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenlake.wire
from tests.fuzz.hostile import broken, hostile, pieces
from tests.profiles import examples
from tokenlake.config import Secret
from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.wire import HEADER_BYTES, FrameDecoder, engine, peer
from tokenlake.wire.frames import decode, encode
from tokenlake_server.peers.handshake import Acceptor, Dialler, PeerIdentity

MAX_FRAME = 1000
PEAK_BYTES = 64 << 10


def decoders() -> dict[str, msgspec.msgpack.Decoder[Any]]:
    """All decoders of `tokenlake.wire`, by module and name."""
    modules = [
        importlib.import_module(f"tokenlake.wire.{each.name}") for each in pkgutil.iter_modules(tokenlake.wire.__path__)
    ]
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, msgspec.msgpack.Decoder)
    }


DECODERS = decoders()
each_decoder = pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)


def kinds(decoder: msgspec.msgpack.Decoder[Any]) -> tuple[type[msgspec.Struct], ...]:
    """The messages that a decoder knows."""
    return typing.get_args(decoder.type) or (decoder.type,)


def test_all_decoders_are_found() -> None:
    assert {"engine.request_decoder", "engine.reply_decoder", "peer.peer_decoder", "peer.handshake_decoder"} <= set(
        DECODERS
    )
    assert len(DECODERS) >= 6


@each_decoder
@given(data=st.data())
@settings(max_examples=examples(150))
def test_a_broken_body_is_refused_or_a_message(decoder: msgspec.msgpack.Decoder[Any], data: st.DataObject) -> None:
    known = kinds(decoder)
    with contextlib.suppress(ProtocolRefused):
        assert isinstance(decode(decoder, data.draw(broken(known))), known)


@each_decoder
@given(data=st.data())
@settings(max_examples=examples(50))
def test_a_hostile_message_is_within_the_protocol(decoder: msgspec.msgpack.Decoder[Any], data: st.DataObject) -> None:
    """The messages that the other tests deliver to the rules could have come over the wire."""
    message = data.draw(st.sampled_from(kinds(decoder)).flatmap(hostile))
    assert decode(decoder, encode(message)) == message


PROMISES = [
    prefix + header + tail
    for prefix, header, tail in itertools.product(
        [b"", b"\x93", b"\x93\x07", b"\x95\x04\x01\xa3red", b"\x96\x0b\x01\xa3red\xc4\x00"],
        [
            *(
                kind + size
                for kind in (b"\xc6", b"\xdb", b"\xdd", b"\xdf")
                for size in (b"\x7f\xff\xff\xff", b"\xff" * 4)
            ),
            b"\xc9\xff\xff\xff\xff\x01",
            b"\xdd\x00\x0f\xff\xff",
        ],
        [b"", b"\x01" * 64],
    )
]


@each_decoder
def test_a_length_that_promises_much_takes_no_memory(decoder: msgspec.msgpack.Decoder[Any]) -> None:
    tracemalloc.start()
    try:
        for body in PROMISES:
            with contextlib.suppress(ProtocolRefused):
                decode(decoder, body)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()


@given(
    bodies=st.lists(st.binary(max_size=MAX_FRAME + 1), max_size=6),
    sizes=st.lists(st.one_of(st.none(), st.integers(0, (1 << 32) - 1)), max_size=6),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=12),
)
@settings(max_examples=examples(300))
def test_a_stream_of_frames_holds_one_frame_at_most(
    bodies: list[bytes], sizes: list[int | None], cuts: list[int]
) -> None:
    """`sizes` replace the true lengths in some headers."""
    stream = b"".join(
        (len(body) if size is None else size).to_bytes(HEADER_BYTES, "little") + body
        for body, size in itertools.zip_longest(bodies, sizes[: len(bodies)])
    )
    frames = FrameDecoder(MAX_FRAME)
    read = 0
    try:
        for piece in pieces(stream, cuts):
            for body in frames.feed(piece):
                assert len(body) <= MAX_FRAME
                read += HEADER_BYTES + len(body)
            assert len(frames.rest()) < HEADER_BYTES + MAX_FRAME
    except ProtocolRefused:
        # The header alone led to the refusal: the decoder waited for no byte of the frame.
        assert int.from_bytes(stream[read : read + HEADER_BYTES], "little") > MAX_FRAME
    else:
        assert read + len(frames.rest()) == len(stream)


def identity(node: str, secret: bytes) -> PeerIdentity:
    return PeerIdentity(node, 1, (Secret(secret),))


handshakes = st.lists(st.sampled_from(kinds(peer.handshake_decoder)).flatmap(hostile), min_size=1, max_size=4)


@given(hello=hostile(peer.PeerHello), proof=hostile(peer.PeerProof))
@settings(max_examples=examples(200))
def test_nobody_without_the_secret_is_believed_when_he_dials(hello: peer.PeerHello, proof: peer.PeerProof) -> None:
    with contextlib.suppress(TokenLakeError):
        acceptor = Acceptor(identity("n0", b"s" * 32), hello, bytes(32))
        acceptor.check(proof)
        pytest.fail("believed")


@given(challenge=hostile(peer.PeerChallenge), node=st.sampled_from(["n1", "", "x" * 64]))
@settings(max_examples=examples(200))
def test_nobody_without_the_secret_is_believed(challenge: peer.PeerChallenge, node: str) -> None:
    dialler = Dialler(identity("n0", b"s" * 32), node, bytes(32), "control")
    with contextlib.suppress(TokenLakeError):
        dialler.answer(challenge)
        pytest.fail("believed")
    assert dialler.incarnation is None


@given(hello=hostile(peer.PeerHello), data=st.data())
@settings(max_examples=examples(200))
def test_a_proof_fits_what_was_said_and_nothing_else(hello: peer.PeerHello, data: st.DataObject) -> None:
    """Another process changes the proof on the way."""
    secret = b"s" * 32
    hello = msgspec.structs.replace(hello, cluster="tokenlake")
    try:
        acceptor = Acceptor(identity("n0", secret), hello, bytes(32))
    except TokenLakeError:
        return
    from tokenlake_server.peers.handshake import dialler_proof

    proof = dialler_proof(secret, hello, acceptor.challenge)
    said = peer.PeerProof(data.draw(st.one_of(st.just(proof), st.binary(min_size=32, max_size=32))))
    try:
        acceptor.check(said)
    except TokenLakeError as error:
        assert type(error).__name__ == ("CredentialRefused" if said.proof != proof else "RingRefused")
    else:
        assert said.proof == proof
        assert hello.node != "n0"


def test_requests_without_an_id_are_those_that_are_not_answered() -> None:
    """The daemon counts each request with an id as unanswered, so that each of them must have an answer."""
    without = {kind for kind in kinds(engine.request_decoder) if "id" not in kind.__struct_fields__}
    assert engine.Release in without
    assert engine.Abort in without
    assert engine.Bye in without
