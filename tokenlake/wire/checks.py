"""Checks of a message as a whole, after its decoder has checked each field by itself.

`check_request` takes the requests of a joined process that reach the rules; `check_peer_message` takes the messages of
a control connection between daemons. Both refuse a message of any other type, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenlake.keys import KEY_BYTES
from tokenlake.wire import engine, peer
from tokenlake.wire.codes import Code
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import SLOT_BYTES

MOST_DEPTH = (1 << 32) - 1
"""Maximum number of segments of a prompt. Messages carry it, in access records, as `fields.Index`, so that a peer
refuses a greater one."""
MOST_ITEMS = engine.MAX_KEYS
"""Maximum number of items of a lease: the segments of one match."""
KNOWN_CODES = bytes(Code)
_LOOKUP_CODES = bytes([Code.LOCAL, Code.ELSEWHERE, Code.DEFERRED, Code.PENDING, Code.MISSING, Code.UNKNOWN])
_ELSEWHERE = bytes([Code.ELSEWHERE])

REPLY_TO: dict[type, type] = {
    peer.Ping: peer.Pong,
    peer.Lookup: peer.LookupReply,
    peer.Offer: peer.OfferReply,
    peer.ExplainMissing: peer.ExplainMissingReply,
}
"""Type of the reply to each type of request between daemons."""


def check_request(message: Any) -> None:
    """Raises `ValueError` with the reason for a message that no client of this protocol sends."""
    check = _REQUESTS.get(type(message))
    if check is None:
        raise ValueError(f"{type(message).__name__} is not a request of a joined process")
    check(message)


def check_peer_message(message: Any) -> None:
    """Raises `ValueError` with the reason for a message that no peer of this protocol sends."""
    check = _SAID.get(type(message))
    if check is None:
        raise ValueError(f"{type(message).__name__} is not a message of a control connection between daemons")
    check(message)


def _nothing(message: Any) -> None:
    """The check of message types that need none, because their decoder checks all fields."""


def _keys(message: Any) -> None:
    if len(message.keys) % KEY_BYTES:
        raise ValueError(
            f"keys of a {type(message).__name__} take {len(message.keys)} bytes, which is no multiple of {KEY_BYTES}"
        )


def _peer_keys(message: Any) -> None:
    _keys(message)
    _at_most(message, len(message.keys) // KEY_BYTES, peer.MAX_KEYS, "segments")


def _leases(message: Any) -> None:
    _at_most(message, len(message.leases), peer.MAX_KEYS, "leases")


def _at_most(message: Any, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise ValueError(f"a {type(message).__name__} of {count} {what}; the limit is {limit}")


def _count(message: Any) -> int:
    _keys(message)
    return len(message.keys) // KEY_BYTES


def _codes(message: Any, known: bytes) -> None:
    if unknown := message.codes.translate(None, known):
        raise ValueError(f"code {unknown[0]} has no meaning in a {type(message).__name__}")


def _agree(message: Any, count: int, what: str, field: str) -> None:
    if len(getattr(message, field)) != count:
        raise ValueError(
            f"field {field!r} of a {type(message).__name__} has {len(getattr(message, field))} entries for "
            f"{count} {what}"
        )


# -- engines


def _changed(message: engine.Prepare | engine.Hint | engine.Unpin) -> None:
    _at_most(message, _count(message), engine.MAX_CHANGED, "segments")


def _prepare(message: engine.Prepare) -> None:
    _changed(message)
    if message.first + _count(message) > MOST_DEPTH:
        raise ValueError(f"a Prepare of segments from index {message.first} on ends beyond index {MOST_DEPTH - 1}")


def _prefetch(message: engine.Prefetch) -> None:
    _at_most(message, _count(message), engine.MAX_FETCHED, "segments")
    if message.first + _count(message) > MOST_DEPTH:
        raise ValueError(f"a Prefetch of segments from index {message.first} on ends beyond index {MOST_DEPTH - 1}")


def _commit(message: engine.Commit) -> None:
    if message.shards & (message.shards + (message.shards & -message.shards)):
        raise ValueError(f"a Commit of shards {message.shards:#b}, which are not consecutive")
    expected = CHECKSUM_BYTES * len(message.indices) * message.shards.bit_count()
    if len(message.checksums) != expected:
        raise ValueError(
            f"checksums of a Commit take {len(message.checksums)} bytes, not {expected} for {len(message.indices)} "
            f"segments and {message.shards.bit_count()} shards each"
        )


def _release(message: engine.Release) -> None:
    for lease, start, stop in message.ranges:
        if start > stop:
            raise ValueError(f"a Release of lease {lease} begins at {start} and ends at {stop}")
    _at_most(message, sum(stop - start for _, start, stop in message.ranges), engine.MAX_CHANGED, "segments")
    for lease, start, stop, _ in message.took:
        if start > stop:
            raise ValueError(f"a Release says that of lease {lease} tokens from {start} to {stop} were taken")


def _regrant(message: engine.Regrant) -> None:
    slots = 0
    for lease, items, first, packed in message.leases:
        count = _slots(message, packed)
        if first + count > items:
            raise ValueError(f"a Regrant of items {first} to {first + count} of lease {lease}, which has {items}")
        _at_most(message, items, MOST_ITEMS, "items of one lease")
        slots += count
    for _, packed in message.writes:
        slots += _slots(message, packed)
    _at_most(message, slots, engine.MAX_REGRANTED, "slots")


def _slots(message: Any, packed: bytes) -> int:
    if len(packed) % SLOT_BYTES:
        raise ValueError(
            f"slots of a {type(message).__name__} take {len(packed)} bytes, which is no multiple of {SLOT_BYTES}"
        )
    return len(packed) // SLOT_BYTES


_REQUESTS: dict[type, Callable[[Any], None]] = {
    engine.Match: _keys,
    engine.Attach: _nothing,
    engine.Fetch: _nothing,
    engine.Release: _release,
    engine.Locate: _nothing,
    engine.Hint: _changed,
    engine.Corrupt: _nothing,
    engine.Prefetch: _prefetch,
    engine.Unpin: _changed,
    engine.Prepare: _prepare,
    engine.Commit: _commit,
    engine.Abort: _nothing,
    engine.MarkInFlight: _keys,
    engine.ReconcileGrants: _nothing,
    engine.Regrant: _regrant,
    engine.Heartbeat: _nothing,
}


# -- peers


def _lookup_reply(message: peer.LookupReply) -> None:
    _codes(message, _LOOKUP_CODES)
    _agree(message, message.codes.count(_ELSEWHERE), "keys that are elsewhere", "nodes")
    if message.known_depth > len(message.codes):
        raise ValueError(f"a LookupReply has known_depth {message.known_depth} for {len(message.codes)} keys")
    if len(message.on_disk) not in (0, len(message.codes)):
        raise ValueError(f"a LookupReply has on_disk of {len(message.on_disk)} for {len(message.codes)} keys")


def _known_codes(message: peer.OfferReply) -> None:
    _codes(message, KNOWN_CODES)


def _wish(message: peer.Offer) -> None:
    count = _count(message)
    if not count:
        raise ValueError(f"a {type(message).__name__} of no segments")
    _at_most(message, count, peer.MAX_OFFERED, "segments")
    _agree(message, count, "segments", "depths")


def _redundant(message: peer.Redundant) -> None:
    _peer_keys(message)
    _agree(message, _count(message), "segments", "nodes")


def _told_why(message: peer.ExplainMissingReply) -> None:
    _agree(message, len(message.rules), "rules", "nodes")
    _agree(message, len(message.rules), "rules", "ago_s")


_SAID: dict[type, Callable[[Any], None]] = {
    peer.Lookup: _peer_keys,
    peer.LookupReply: _lookup_reply,
    peer.ReleaseLease: _leases,
    peer.RenewLease: _leases,
    peer.MarkInFlight: _peer_keys,
    peer.ClearInFlight: _peer_keys,
    peer.Offer: _wish,
    peer.OfferReply: _known_codes,
    peer.Owned: _peer_keys,
    peer.Redundant: _redundant,
    peer.Evicted: _peer_keys,
    peer.Unfound: _peer_keys,
    peer.Corrupt: _peer_keys,
    peer.ExplainMissing: _peer_keys,
    peer.EvictionStatistics: _nothing,
    peer.ExplainMissingReply: _told_why,
    peer.Touched: _peer_keys,
    peer.AdvertisingDone: _nothing,
    peer.Ping: _nothing,
    peer.Pong: _nothing,
}
