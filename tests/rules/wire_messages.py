"""All messages with their decoders, and strategies that build them."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import msgspec.inspect as types
import pytest
from hypothesis import strategies as st

from tokenlake.hints import MAX_PIN_S, MAX_TTL_S, Hints
from tokenlake.wire import engine, peer

DECODERS: dict[str, tuple[msgspec.msgpack.Decoder[Any], tuple[type[msgspec.Struct], ...]]] = {
    "engine requests": (engine.request_decoder, typing.get_args(engine.EngineRequest)),
    "engine replies": (engine.reply_decoder, typing.get_args(engine.EngineReply)),
    "peers": (peer.peer_decoder, typing.get_args(peer.PeerMessage)),
    "control connections": (
        peer.control_decoder,
        (*typing.get_args(peer.PeerMessage), peer.ConnectionKey, peer.MemoryAgent, peer.Traced),
    ),
    "handshakes": (peer.handshake_decoder, typing.get_args(peer.Handshake)),
    "bulk requests": (peer.bulk_request_decoder, (peer.Pull,)),
    "bulk replies": (peer.pulled_decoder, (peer.Pulled,)),
    "bulk progress": (peer.taken_decoder, (peer.Taken,)),
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
        # `Hints` checks its values when it is made, so that only valid ones can be drawn.
        made |= dict.fromkeys(("category", "stop_reason", "account"), st.text(PRINTABLE, max_size=20))
        made |= {"outlook": st.integers(0, 2), "priority": st.integers(-1, 1), "ttl_s": st.floats(0.0, MAX_TTL_S)}
        made |= {"output_tokens": st.integers(-1, (1 << 32) - 1), "pin_s": st.floats(0.0, MAX_PIN_S)}
    return st.builds(message, **made)


any_message = st.one_of(*[messages(message) for _, known in DECODERS.values() for message in known])
