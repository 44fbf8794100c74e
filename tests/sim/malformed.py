"""Malformed events of every kind that no engine and no peer of the protocol causes, for the present state of a core.

Message types come from the unions of `tokenlake.wire`, so that a new one is sent too; each field that can be wrong is
wrong in one of the events, and the rest of it is right.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as types

from tokenlake.core import NodeCore, events
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, engine, peer

PEER_MESSAGES: tuple[type[Any], ...] = typing.get_args(peer.PeerMessage)
REQUESTS: tuple[type[Any], ...] = typing.get_args(engine.EngineRequest)
NOT_FOR_THE_RULES = (
    engine.Hello,
    engine.OpenRegion,
    engine.OpenQuery,
    engine.Unpublished,
    engine.Explain,
    engine.Traced,
    engine.Bye,
)
"""Requests that the daemon answers itself, or that are an event of their own."""
NEVER_MALFORMED = (
    *(
        engine.Attach,
        engine.Fetch,
        engine.Locate,
        engine.Abort,
        engine.Heartbeat,
        engine.ReconcileGrants,
        engine.Corrupt,
    ),
    *(peer.EvictionStatistics, peer.AdvertisingDone, peer.Ping),
)
"""Messages that the rules never refuse: the decoder has checked every field, and unknown ids are ignored."""

KEY = b"\1" * KEY_BYTES
STRANGER = "nobody"
_MORE = ("depths", "nodes", "rules", "ago_s")
"""Fields with an entry for each key, or each that has a certain code."""
_RIGHT: dict[type, dict[str, Any]] = {
    peer.LookupReply: {"codes": bytes([Code.MISSING])},
    peer.OfferReply: {"codes": bytes([Code.COMMITTED])},
    peer.Redundant: {"nodes": ("n0",)},
}


def legal(kind: type[Any], **fields: Any) -> Any:
    """A message about one segment, which means little but breaks no rule."""
    described = types.type_info(kind)
    assert isinstance(described, types.StructType)
    right = _RIGHT.get(kind, {})
    for field in described.fields:
        if field.name not in fields:
            fields[field.name] = right.get(field.name, _value(field))
    return kind(**fields)


def _value(field: types.Field) -> Any:
    match field.name:
        case "keys":
            return KEY
        case "node":
            return "n0"
        case "previous" | "redirect":
            return ""
        case "depths":
            return (0,)
    return _plain(field.type)


def _plain(of: types.Type) -> Any:
    match of:
        case types.BoolType():
            return False
        case types.IntType(ge=least):
            return least or 0
        case types.FloatType(ge=least):
            return float(least or 0.0)
        case types.StrType():
            return ""
        case types.BytesType(min_length=shortest):
            return bytes(shortest or 0)
        case types.TupleType(item_types=items):
            return tuple(map(_plain, items))
        case types.VarTupleType():
            return ()
        case types.UnionType(types=some) if any(isinstance(each, types.NoneType) for each in some):
            return None
        case types.StructType(cls=cls):
            return legal(cls)
    raise NotImplementedError(f"a message holds {of}; teach this module to make one")


def _broken(kind: type[Any], right: Any) -> Iterator[Any]:
    """`right` with each of its fields wrong in turn, where a decoder does not see that."""
    for name in right.__struct_fields__:
        value = getattr(right, name)
        wrong: list[Any] = []
        if name == "keys":
            wrong = [KEY[:-1], KEY + b"x"]
            if kind is peer.Offer:
                wrong += [b""]
            if kind in typing.get_args(peer.PeerMessage):
                wrong += [KEY * (peer.MAX_KEYS + 1)]
        elif name == "leases" and kind in (peer.ReleaseLease, peer.RenewLease):
            wrong = [(1,) * (peer.MAX_KEYS + 1)]
        elif name == "codes":
            wrong = [b"\xff", b"\0"]
        elif name in _MORE:
            more = 0 if name == "depths" else 1.0 if name == "ago_s" else "n0"
            wrong = [(*value, more)]
        elif name == "known_depth":
            wrong = [2]
        for each in wrong:
            yield msgspec.structs.replace(right, **{name: each})


@functools.cache
def _wrong_requests() -> tuple[Any, ...]:
    """Requests with a wrong field, and messages that are no requests."""
    return (
        *(broken for kind in REQUESTS for broken in _broken(kind, legal(kind))),
        *map(legal, (*NOT_FOR_THE_RULES, *PEER_MESSAGES, *typing.get_args(engine.EngineReply))),
        engine.Release(((1, 0, 1), (1, 5, 2))),
        engine.Prepare(1, KEY + KEY[::-1], (1 << 32) - 1),
        engine.Commit(1, 1, (0, 1), 3, bytes(31)),
        engine.Commit(1, 1, (0,), 1 << 31, bytes(8)),
        engine.Regrant(1, ((1, 1, 1, bytes(16)),), (), False),
        engine.Regrant(1, ((1, 1, 0, bytes(15)),), (), False),
        engine.Regrant(1, ((1, 1 << 20, 0, b""),), (), False),
        engine.Regrant(1, (), ((1, bytes(17)),), False),
        engine.Regrant(1, ((1, 100, 0, bytes(1600)),), ((1, bytes(640)),), False),
    )


@functools.cache
def _wrong_sayings() -> tuple[Any, ...]:
    """Peer messages with a wrong field, and messages that are no peer messages."""
    return (
        *(broken for kind in PEER_MESSAGES for broken in _broken(kind, legal(kind))),
        *map(legal, REQUESTS),
    )


@functools.cache
def _right_sayings() -> tuple[Any, ...]:
    return tuple(map(legal, PEER_MESSAGES))


def malformed(core: NodeCore, connection: int, node: str) -> Iterator[events.Event]:
    """`connection` has joined, `node` is another member."""
    yield from (events.Requested(connection, request) for request in _wrong_requests())
    yield from (events.PeerSent(node, saying) for saying in _wrong_sayings())
    for saying in _right_sayings():
        yield events.PeerSent(STRANGER, saying)
        yield events.PeerSent(core.config.node, saying)
    given = core._context._first_id
    yield events.Requested(connection, engine.Regrant(1, ((given, 1, 0, bytes(16)),), (), True))
    yield events.Requested(connection, engine.Regrant(1, (), ((given, bytes(16)),), True))
    yield from _wrong_replies(core)
    yield from _wrong_events(core, node)


def _wrong_replies(core: NodeCore) -> Iterator[events.Event]:
    """Replies to open requests of this node, of another type or for another number of keys."""
    for asked in core._peers:
        for call, waiting in asked.calls.items():
            message = waiting.request
            for kind in (peer.LookupReply, peer.OfferReply):
                count = len(getattr(message, "keys", b"")) // KEY_BYTES + 1
                codes = bytes([Code.MISSING if kind is peer.LookupReply else Code.COMMITTED]) * count
                yield events.PeerSent(asked.node, legal(kind, call=call, codes=codes))
            yield events.PeerSent(
                asked.node,
                legal(peer.ExplainMissingReply, call=call, rules=("",) * 99, nodes=("",) * 99, ago_s=(0.0,) * 99),
            )
            if not isinstance(message, peer.Ping):
                yield events.PeerSent(asked.node, legal(peer.Pong, call=call))


def _wrong_events(core: NodeCore, node: str) -> Iterator[events.Event]:
    for other in (STRANGER, core.config.node, ""):
        yield events.PeerUp(other, 1)
        yield events.PeerDown(other, 1)
        yield events.PullRequested(1, other, "red", KEY)
        yield events.PullRequested(1, node, "red", KEY * (peer.MAX_PULLED + 1))
    yield events.PullRequested(1, node, "red", KEY[:-1])
    for stream in core._serving._sends:
        yield events.PullRequested(stream, node, "red", KEY)
