"""Requests of an engine that take the loop for long are cut into pieces, each of them a request that takes less.

Only requests without a reply are cut: the pieces of a `Release` and of a `ReconcileGrants` give back the same items,
and those of a `Hint` name the same segments. The driver passes in one piece at a time and serves other connections in
between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenlake.core.engines.grants import PIECE
from tokenlake.core.engines.sessions import Sessions
from tokenlake.identity import ConnectionId, LeaseId, SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import engine
from tokenlake.wire.engine import MAX_KEYS
from tokenlake.wire.slots import join_keys

LongRequest = engine.Release | engine.Hint | engine.ReconcileGrants
LONG = (engine.Release, engine.Hint, engine.ReconcileGrants)
"""The types of the requests that are cut into pieces if they are long."""

RANGES = 32
"""Ranges of one piece of a `Release`."""


class Pieces:
    """Cuts requests of the engines of this node. Changes nothing."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def cut(self, connection: ConnectionId, message: LongRequest) -> Iterator[engine.EngineRequest]:
        """Yields the pieces of a request, in the order in which they are to be handled. The lengths of the leases that
        it names are looked up when the pieces are asked for. A request that needs no cut, or that no correct client
        sends, is its only piece."""
        match message:
            case engine.Release():
                yield from self._release(connection, message)
            case engine.Hint():
                yield from self._hint(connection, message)
            case engine.ReconcileGrants():
                yield from self._reconcile(connection, message)

    def _keys(self, connection: ConnectionId, lease: int) -> Sequence[SegmentKey] | None:
        """The keys of a lease of the session of `connection`; None where there is no such lease."""
        process = self._sessions.process(connection)
        held = process.session.leases.get(LeaseId(lease)) if process is not None else None
        return held.keys if held is not None else None

    def _release(self, connection: ConnectionId, message: engine.Release) -> Iterator[engine.EngineRequest]:
        if any(start > stop for _, start, stop in message.ranges):
            yield message
            return
        piece: list[tuple[int, int, int]] = []
        room, rest = PIECE, (message.took, message.uncounted)
        for lease, start, stop in message.ranges:
            keys = self._keys(connection, lease)
            if keys is None:
                continue
            stop = min(stop, len(keys))
            # The deepest items first: the eviction policy then keeps the beginning of the prompt longest. A lease
            # without items has one range, with which it ends.
            while start < stop or not (keys or start):
                first = max(start, stop - room)
                piece.append((lease, first, stop))
                room -= stop - first
                stop, start = first, start if keys else 1
                if not room or len(piece) == RANGES:
                    yield engine.Release(tuple(piece), message.read, *rest)
                    piece, room, rest = [], PIECE, ((), ())
        if piece:
            yield engine.Release(tuple(piece), message.read, *rest)

    def _hint(self, connection: ConnectionId, message: engine.Hint) -> Iterator[engine.EngineRequest]:
        leased = self._keys(connection, message.lease) or ()
        if len(message.keys) % KEY_BYTES or len(message.keys) // KEY_BYTES + len(leased) <= PIECE:
            yield message
            return
        for keys in (message.keys, join_keys(leased) if len(leased) > PIECE else b""):
            for at in range(0, len(keys), PIECE * KEY_BYTES):
                yield engine.Hint(keys[at : at + PIECE * KEY_BYTES], message.hints)
        yield engine.Hint(b"", message.hints, message.lease)

    def _reconcile(self, connection: ConnectionId, message: engine.ReconcileGrants) -> Iterator[engine.EngineRequest]:
        process = self._sessions.process(connection)
        known = {*message.leases, *message.writes}
        grants = process.session if process is not None else None
        leases = [lease for lease in grants.leases if lease not in known] if grants is not None else []
        writes = [write for write in grants.writes if write not in known] if grants is not None else []
        # The pieces give back all items of each lease; an item that another process holds as well stays leased.
        for lease in leases:
            yield from self._release(connection, engine.Release(((lease, 0, MAX_KEYS),)))
        for write in writes:
            yield engine.Abort(write)
        yield message
