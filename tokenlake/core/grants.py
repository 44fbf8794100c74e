"""Leases and writes: the slots that the engines of this node may use, and the processes that hold them.

A deadline hides a segment and does not free its slot. When a write expires, its segments leave the index, and each slot
stays pinned until every process that may still write into it gave it back or is dead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tokenlake.core.access import RecentMatches, Touches
from tokenlake.core.context import Context
from tokenlake.core.explain import Trail
from tokenlake.core.peers import Peers
from tokenlake.core.timers import Timer
from tokenlake.hints import Hints
from tokenlake.identity import ConnectionId, LeaseId, NodeId, SegmentKey, TenantId, WriteId
from tokenlake.metrics import Metric
from tokenlake.store import Segment, State
from tokenlake.wire import Code, peer
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import NO_SLOT_BYTES

__all__ = ["Grants", "Lease", "SessionGrants", "Write", "pack"]

T = TypeVar("T")

SHIPPED = Metric("tokenlake_shipped_tokens_total", "Tokens found at another node and attended to there")
SKIPPED = Metric(
    "tokenlake_skipped_by_cost_tokens_total", "Tokens found at another node and released without being fetched"
)


class Lease:
    """The result of one match. An item is a segment pinned here, or leased at another node.

    Each process that holds the lease gives back its items by range. The pin of an item ends when the last process gave
    it back.
    """

    def __init__(
        self,
        lease: LeaseId,
        keys: list[SegmentKey],
        connection: ConnectionId,
        hints: Hints,
        segments: Sequence[Segment | None],
        remotes: Sequence[NodeId | None] = (),
        remote_leases: Iterable[tuple[NodeId, int]] = (),
    ) -> None:
        """`remotes` is empty where every item is local."""
        self.id = lease
        self.keys = keys
        self.segments = list(segments)
        """Per item, the local segment, pinned."""
        self.remotes: list[NodeId | None] = list(remotes) or [None] * len(keys)
        """Per item, the node from which it can still be fetched."""
        self.coming: dict[int, int] = {}
        """Items that are being fetched, and the number of fetches that wait for each."""
        self.remote_leases = list(remote_leases)
        """The leases at other nodes that keep the remote items there."""
        self.hints = hints
        """Those of the request; they go with every read of an item."""
        self.trail: Trail | None = None
        """The record of the request for `Explain`; None for a request without a name."""
        self.shipped = 0
        """Items, from the first on, over which an engine computed attention in place."""
        self.held: dict[ConnectionId, bytearray] = {connection: bytearray(b"\1" * len(keys))}
        """Per process, one byte for each item: 1 while it holds the item."""

    def attach(self, connection: ConnectionId) -> None:
        """Another process of the session holds the items that are still held."""
        self.held[connection] = bytearray(self.is_held(index) for index in range(len(self.keys)))

    def mark_shipped(self, stop: int) -> None:
        """An engine computed attention in place over the items before `stop`."""
        self.shipped = max(self.shipped, stop)

    def add_hints(self, hints: Hints) -> None:
        """Newer hints of the request."""
        self.hints = hints.merged_over(self.hints)

    def is_held(self, index: int) -> bool:
        """Does a process hold this item?"""
        return any(flags[index] for flags in self.held.values())

    def code(self, index: int) -> Code:
        """LOCAL, REMOTE or LOST: the present state of an item."""
        segment = self.segments[index]
        if segment is not None:
            return Code.LOCAL if segment.state is State.READY else Code.LOST
        return Code.REMOTE if self.remotes[index] is not None else Code.LOST

    def readable(self, start: int, stop: int) -> list[Segment | None]:
        """The local segments of a range; None for a remote item, and for a copy that was dropped for a wrong checksum
        (its slot stays pinned until it is given back)."""
        ready = State.READY
        return [s if s is not None and s.state is ready else None for s in self.segments[start:stop]]


class Write:
    """One reservation of slots. A segment stays pinned until it is committed, or until every process that may write
    into its slot gave it back."""

    def __init__(self, write: WriteId, tenant: TenantId, connection: ConnectionId) -> None:
        self.id = write
        self.tenant = tenant
        self.open: dict[int, Segment] = {}
        """Reserved and not committed segments, by index into the keys of the prepare."""
        self.held: dict[ConnectionId, dict[int, None]] = {connection: {}}
        """Per process, the open segments that it may still write."""
        self.filled: dict[ConnectionId, dict[int, None]] = {}
        """Per process, the open segments of which it committed its shards; it does not write them again."""
        self.expired = False
        self.timer: Timer | None = None
        self.request = ""
        """Name of the request, for the logs."""


class SessionGrants:
    """The leases and writes of one session, and the counts that bound them. Only `Grants` changes them."""

    def __init__(self, tenant: TenantId, slot_bytes: int, segment_tokens: int) -> None:
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.segment_tokens = segment_tokens
        self.leases: dict[LeaseId, Lease] = {}
        self.writes: dict[WriteId, Write] = {}
        self.leased = 0
        """Items of its leases, local and remote."""
        self.pinned = 0
        """Local items of its leases."""
        self.coming = 0
        """Slots of this node for items that are being fetched."""
        self.reserved = 0
        """Open segments of its writes."""
        self.recent = RecentMatches()
        """The access records of its latest matches, for the stores that follow them."""

    def move(self, old: ConnectionId, new: ConnectionId) -> None:
        """What a process held over its connection `old` it holds over `new`."""
        for lease in self.leases.values():
            _move(lease.held, old, new)
        for write in self.writes.values():
            _move(write.held, old, new)
            _move(write.filled, old, new)

    def pins(self) -> Iterator[Segment]:
        """A segment per pin that the leases and writes hold; for integrity checks."""
        for lease in self.leases.values():
            yield from (segment for segment in lease.segments if segment is not None)
        for write in self.writes.values():
            yield from write.open.values()

    def check_integrity(self) -> None:
        """AssertionError when the counts differ from what the leases and writes hold."""
        leases, writes = self.leases.values(), self.writes.values()
        held = sum(lease.is_held(index) for lease in leases for index in range(len(lease.keys)))
        assert self.leased == held, f"{self.leased} items are counted as leased, {held} are held"
        here = sum(segment is not None for lease in leases for segment in lease.segments)
        assert self.pinned == here, f"{self.pinned} slots are counted as leased, {here} are held"
        assert self.coming >= 0
        assert self.reserved == sum(len(write.open) for write in writes)
        for write in writes:
            indices = {index for each in write.held.values() for index in each}
            assert write.open
            assert indices == set(write.open), f"write {write.id}: {indices} of {list(write.open)}"
            expected = State.GONE if write.expired else State.RESERVED
            for segment in write.open.values():
                assert segment.pins > 0
                assert segment.state is expected, f"{segment} of write {write.id}"


class Grants:
    """Gives out leases and writes, bounds them per session, and takes them back."""

    def __init__(
        self,
        context: Context,
        peers: Peers,
        touches: Touches,
        withdraw: Callable[[TenantId, Sequence[SegmentKey]], None],
    ) -> None:
        """`withdraw`: tells the directory nodes of segments that no process of this node writes them any more."""
        self._context = context
        self._peers = peers
        self._touches = touches
        self._withdraw = withdraw

    # -- bounds

    def fetch_room(self, session: SessionGrants) -> int:
        """How many more slots the session may lease by fetching: half of the slots that its matches leave. So a session
        whose local items fill its share can still fetch the remote ones."""
        limit = self._share(session, (1 + self._context.config.session_lease_share) / 2)
        return max(0, limit - session.pinned - session.coming)

    def may_lease(self, session: SessionGrants, found: Sequence[Segment | None], processes: int) -> int:
        """How many items of a match the session may lease, from the first on. `found`: the segment of each item, None
        where it is at another node. `processes`: how many processes the session has.

        A remote item takes no slot of this node until it is fetched, and its node bounds its own leases. A single
        process reads a prompt longer than its share in windows: it gives back each before it fetches the next. With
        several processes the one that matched holds all items until the last process has read them, so every item
        counts at once.
        """
        share = self._share(session, self._context.config.session_lease_share)
        if processes > 1:
            return max(0, min(len(found), share - session.leased))
        # The shares of all nodes together, if these are equal: a bound on the entries kept here.
        limit = max(0, min(len(found), share * len(self._context.ring.members) - session.leased))
        room = max(0, share - session.pinned - session.coming)
        if limit - found[:limit].count(None) <= room:
            return limit
        here = (index for index, segment in enumerate(found) if segment is not None)
        return next(itertools.islice(here, room, None))

    def reserve_room(self, session: SessionGrants) -> int:
        """How many more slots the session may reserve."""
        return self._share(session, self._context.config.session_reserve_share) - session.reserved

    def _share(self, session: SessionGrants, share: float) -> int:
        pool = self._context.store.pool(session.tenant, session.slot_bytes)
        return max(2, int(share * self._context.store.capacity(pool.id))) if pool is not None else 0

    # -- leases

    def add_lease(self, session: SessionGrants, lease: Lease) -> None:
        """The lease takes over one pin of each of its segments from the caller."""
        session.leases[lease.id] = lease
        session.leased += len(lease.keys)
        session.pinned += len(lease.segments) - lease.segments.count(None)

    def item_expected(self, session: SessionGrants, lease: Lease, index: int) -> None:
        """A fetch of a remote item begins. The item counts as one slot, however many fetches wait for it."""
        session.coming += index not in lease.coming
        lease.coming[index] = lease.coming.get(index, 0) + 1

    def item_settled(self, session: SessionGrants, lease: Lease, index: int) -> None:
        """A fetch of an item ended."""
        lease.coming[index] -= 1
        if not lease.coming[index]:
            del lease.coming[index]
            session.coming -= 1

    def item_arrived(self, session: SessionGrants, lease: Lease, index: int, segment: Segment) -> None:
        """A fetched item is local now; the lease takes over the caller's pin."""
        lease.segments[index] = segment
        lease.remotes[index] = None
        session.pinned += 1

    def item_lost(self, lease: Lease, index: int) -> None:
        """A remote item can be fetched from no node."""
        lease.remotes[index] = None

    def release(
        self, session: SessionGrants, connection: ConnectionId, ranges: Iterable[tuple[Lease, int, int]]
    ) -> None:
        """The process gives back the items of each range (lease, start, stop) that it holds."""
        ended: dict[NodeId, list[int]] = {}
        for lease, start, stop in ranges:
            if self._release(session, connection, lease, start, stop):
                for node, number in lease.remote_leases:
                    ended.setdefault(node, []).append(number)
        for node, numbers in ended.items():
            self._peers.tell(node, peer.ReleaseLease(tuple(numbers)))

    def _release(self, session: SessionGrants, connection: ConnectionId, lease: Lease, start: int, stop: int) -> bool:
        """Did the lease end?"""
        flags = lease.held.get(connection)
        if flags is None:
            return False
        stop = min(stop, len(flags))
        start = min(start, stop)
        given = flags[start:stop]
        flags[start:stop] = bytes(stop - start)
        if len(lease.held) == 1:
            # Items of the range that this process does not hold have left the lease before.
            self._drop(session, lease, start, stop, given.count(1))
        else:
            for index in range(stop - 1, start - 1, -1):
                if given[index - start] and not lease.is_held(index):
                    self._drop(session, lease, index, index + 1, 1)
        if not any(flags):
            del lease.held[connection]
        if lease.held:
            return False
        del session.leases[lease.id]
        if stop - start < len(lease.keys):
            # The parts may have come back parents first: touch the prompt once more as a whole, deepest segment first.
            found = self._context.ready(session.tenant, lease.keys)
            self._touches.read([segment for segment in found if segment is not None], lease.hints)
        return True

    def _drop(self, session: SessionGrants, lease: Lease, start: int, stop: int, count: int) -> None:
        """No process holds the `count` items any more that are left in a range."""
        session.leased -= count
        dropped = [segment for segment in lease.segments[start:stop] if segment is not None]
        session.pinned -= len(dropped)
        boundary = max(start, min(stop, lease.shipped))
        for metric, first, last in ((SHIPPED, start, boundary), (SKIPPED, boundary, stop)):
            unfetched = last - first - lease.remotes[first:last].count(None)
            self._context.counters.add(metric, unfetched * session.segment_tokens)
        if lease.trail is not None:
            shipped = boundary - start - lease.remotes[start:boundary].count(None)
            lease.trail.given_back(len(dropped), shipped, lease.remotes[boundary:stop])
        lease.segments[start:stop] = [None] * (stop - start)
        lease.remotes[start:stop] = [None] * (stop - start)
        self._context.store.unpin(*dropped)
        # Their pins kept them from eviction until now, so their age for the eviction policy begins now.
        self._touches.read(dropped, lease.hints)

    # -- writes

    def add_write(self, session: SessionGrants, write: Write) -> None:
        """The write takes over the pin that `SegmentStore.reserve` set on each of its RESERVED segments."""
        session.writes[write.id] = write
        session.reserved += len(write.open)
        for held in write.held.values():
            held.update(dict.fromkeys(write.open))
        write.timer = self._context.after(self._context.config.reservation_s, lambda: self.expire(session, write))

    def attach(self, write: Write, connection: ConnectionId) -> None:
        """Another process of the session writes into the slots as well."""
        write.held[connection] = dict.fromkeys(write.open)

    def filled(self, write: Write, connection: ConnectionId, index: int) -> None:
        """The process committed its shards of a segment of which other shards are missing."""
        write.filled.setdefault(connection, {})[index] = None

    def committed(self, session: SessionGrants, write: Write, index: int) -> None:
        """The segment at `index` is published: the write's pin ends."""
        for held in write.held.values():
            held.pop(index, None)
        self._close(session, write, index)

    def expire(self, session: SessionGrants, write: Write) -> None:
        """The deadline passed: the open segments leave the index. Their slots stay pinned for the processes that may
        still write into them."""
        if write.expired:
            return
        write.expired = True
        for segment in write.open.values():
            self._context.store.discard(segment, self._context.now)
        self._withdraw(write.tenant, [segment.key for segment in write.open.values()])
        for connection, indices in write.filled.items():
            self.give_back(session, write, connection, indices)

    def give_back(
        self, session: SessionGrants, write: Write, connection: ConnectionId, indices: Iterable[int] | None = None
    ) -> None:
        """The process will not write into the slots at `indices` any more, into none of the write where that is None.
        An open segment is discarded when the last process gave it back."""
        held = write.held.get(connection, {})
        withdrawn: list[SegmentKey] = []
        for index in list(held if indices is None else indices):
            if index not in held:
                continue
            del held[index]
            if any(index in others for others in write.held.values()):
                continue
            segment = write.open[index]
            self._close(session, write, index)
            if segment.state is State.RESERVED:
                self._context.store.discard(segment, self._context.now)
                withdrawn.append(segment.key)
        self._withdraw(write.tenant, withdrawn)

    def _close(self, session: SessionGrants, write: Write, index: int) -> None:
        self._context.store.unpin(write.open.pop(index))
        session.reserved -= 1
        if not write.open:
            del session.writes[write.id]
            if write.timer is not None:
                write.timer.cancel()


def _move(held: dict[ConnectionId, T], old: ConnectionId, new: ConnectionId) -> None:
    if old in held:
        held[new] = held.pop(old)


def pack(segments: Sequence[Segment | None], shards: int, *, checksums: bool) -> tuple[bytes, bytes]:
    """(slots, checksums) as replies to engines carry them; zeros where there is no segment, and no checksums unless the
    engine asked for them."""
    slots = b"".join([NO_SLOT_BYTES if segment is None else segment.packed for segment in segments])
    if not checksums:
        return slots, b""
    none = bytes(CHECKSUM_BYTES * shards)
    return slots, b"".join([none if segment is None else segment.checksums for segment in segments])
