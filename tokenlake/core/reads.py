"""Reading what a match leased: who holds it, where it lies, and bringing what is remote."""

from __future__ import annotations

from tokenlake.core.access import with_access
from tokenlake.core.context import Context
from tokenlake.core.fetch_calls import CopiesOf, FetchCall, FetchParts
from tokenlake.core.fetches import Fetches
from tokenlake.core.instructions import Answer
from tokenlake.core.packing import pack
from tokenlake.core.peers import Peers
from tokenlake.core.sessions import Process, Sessions
from tokenlake.core.touches import Touches
from tokenlake.hints import NO_ACCESS
from tokenlake.identity import LeaseId, NodeId
from tokenlake.store import Segment
from tokenlake.wire import Code
from tokenlake.wire import engine as wire
from tokenlake.wire.slots import split_keys

__all__ = ["Reads"]

MAX_RANGE = 1 << 16
"""Bound on the answer to a fetch of a lease that does not exist."""


class Reads:
    """Attach, Where, Release, Advise and Fetch of the local engines."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        peers: Peers,
        fetches: Fetches,
        touches: Touches,
        copies_of: CopiesOf,
    ) -> None:
        self._context = context
        self._touches = touches
        self._sessions = sessions
        self._parts = FetchParts(context, sessions, peers, fetches, copies_of)

    def attach(self, process: Process, request: wire.Attach) -> None:
        """Another process of the session holds the lease as well."""
        session = process.session
        lease = session.leases.get(LeaseId(request.lease))
        if lease is None:
            reply = wire.Matched(request.id, 0, 0, b"", b"", b"")
        else:
            held = bytes(lease.holders(index) > 0 for index in range(len(lease.keys)))
            lease.held[process.connection] = bytearray(held)
            codes = bytes(lease.code(index) for index in range(len(lease.keys)))
            packed = pack(lease.readable(0, len(codes)), session.shards, checksums=request.checksums)
            reply = wire.Matched(request.id, lease.id, len(codes), codes, *packed)
        self._context.emit(Answer(process.connection, reply))

    def where(self, process: Process, request: wire.Where) -> None:
        """Where the segments of a lease lie, from the first on up to one that is lost."""
        lease = process.session.leases.get(LeaseId(request.lease))
        nodes: dict[NodeId, int] = {}
        owners = bytearray()
        readable = lease.readable(0, len(lease.keys)) if lease is not None else []
        for segment, remote in zip(readable, lease.remotes, strict=True) if lease is not None else ():
            if segment is not None:
                owners.append(wire.HERE)
            elif remote is not None and (remote in nodes or len(nodes) < wire.HERE):
                owners.append(nodes.setdefault(remote, len(nodes)))
            else:
                break
        self._context.emit(Answer(process.connection, wire.Placed(request.id, tuple(nodes), bytes(owners))))

    def shipped(self, process: Process, request: wire.Shipped) -> None:
        """What is given back without having been fetched was of use all the same."""
        lease = process.session.leases.get(LeaseId(request.lease))
        if lease is not None:
            lease.shipped = max(lease.shipped, request.stop)

    def hint(self, process: Process, request: wire.Hint) -> None:
        """A word that came late."""
        tenant, hints = process.session.tenant, with_access(request.hints, NO_ACCESS)
        self._touches.hint(tenant, split_keys(request.keys), hints)
        lease = process.session.leases.get(LeaseId(request.lease))
        if lease is not None:
            # What is still to be read of it, and given back, goes by the newest word.
            lease.hints = hints if lease.hints is None else hints.merged_over(lease.hints)
            self._touches.hint(tenant, lease.keys, hints)

    def release(self, process: Process, request: wire.Release) -> None:
        """This process no longer looks at these."""
        for lease_id, start, stop in request.ranges:
            lease = process.session.leases.get(LeaseId(lease_id))
            if lease is not None:
                self._sessions.release(process.session, lease, process.connection, start, stop)

    def fetch(self, process: Process, request: wire.Fetch) -> None:
        """Answered when the last segment of the range is here or given up, at the latest at the deadline."""
        session = process.session
        lease = session.leases.get(LeaseId(request.lease))
        count = max(0, request.stop - request.start)
        if lease is None or request.start < 0 or request.stop > len(lease.keys):
            count = min(count, MAX_RANGE)
            gone: list[Segment | None] = [None] * count
            packed = pack(gone, session.shards, checksums=request.checksums)
            self._context.emit(
                Answer(process.connection, wire.Fetched(request.id, bytes([Code.LOST]) * count, *packed))
            )
            return
        FetchCall(self._parts, process, lease, request).start()
