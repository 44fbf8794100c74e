"""Leases and writes: the slots that the engines of this node may use, and the processes that hold them.

A deadline hides a segment and does not free its slot. When a write expires, its segments leave the index, and each slot
stays pinned until every process that may still write into it gave it back or is dead.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TypeVar

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context
from tokenlake.core.engines.access import RecentMatches, Touches
from tokenlake.core.report.account import Account, Source
from tokenlake.core.report.explain import Trail
from tokenlake.hints import Hints
from tokenlake.identity import ConnectionId, LeaseId, NodeId, SegmentKey, TenantId, WriteId
from tokenlake.layout import MAX_SHARDS
from tokenlake.memory import Segment, State
from tokenlake.timers import Timer
from tokenlake.wire import Code, peer
from tokenlake.wire.engine import MAX_CHANGED, MAX_GRANTS
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.funnel import MissReason
from tokenlake.wire.slots import NO_SLOT_BYTES

T = TypeVar("T")

GRANT_BYTES, ITEM_BYTES = 4096, 96
"""Bytes that are charged for a lease or a write, and for each segment of it. A lease keeps the codes of the keys of its
match that are no hits, at most `MAX_KEYS`."""
PROCESS_BYTES, HELD_BYTES = 256, 2
"""Bytes that are charged for each further process that holds a lease, and for each segment of it."""
WRITER_BYTES = 96
"""Bytes that are charged for each segment of a write and each further process that may write into it."""
MAX_PROCESSES = 2 * MAX_SHARDS
"""Maximum number of processes that hold a lease, or a write: the ranks of an engine and its scheduler."""
MAX_SESSION_BYTES, MAX_BYTES = 16 << 20, 32 << 20
"""Limits of the bytes charged for the leases and writes of one session, and of all tenants together, which share them
in equal parts."""


class Lease:
    """The lease that one match gave. An item of it is a segment that is pinned on this node, or leased at another node.
    A lease may have no items: it ends, like any other, when the engine has said what it took of the match.

    Each process that holds the lease gives back its items by range. The pin of an item ends when the last process has
    given it back.
    """

    def __init__(
        self,
        lease: LeaseId,
        keys: list[SegmentKey],
        connection: ConnectionId,
        hints: Hints,
        account: Account,
        segments: Sequence[Segment | None],
        remotes: Sequence[NodeId | None] = (),
        remote_leases: Iterable[tuple[NodeId, int]] = (),
    ) -> None:
        """`segments`: the local segment of each item, or None. `remotes`: the node of each item that is at another
        node, or None; empty if every item is local."""
        self.id = lease
        self.keys = keys
        self.account = account
        """The tokens of the match; they are counted when the lease ends."""
        self.nbytes = GRANT_BYTES + ITEM_BYTES * len(keys)
        """The bytes that are charged for the lease."""
        self.segments = list(segments)
        """The pinned segment of this node for each item; None for an item that is elsewhere or was given back."""
        self.remotes: list[NodeId | None] = list(remotes) or [None] * len(keys)
        """The node from which each item can still be fetched; None for a local item or a lost one."""
        self.coming: dict[int, int] = {}
        """Number of fetches that wait for an item, by index of the items that are being fetched."""
        self.remote_leases = list(remote_leases)
        """(node, lease id) of the leases at other nodes that keep the remote items from being evicted there."""
        self.disk_s: dict[NodeId, float] = {}
        """Seconds that other nodes expect to take to read items from their disks, by node, where there are such."""
        self.hints = hints
        """The hints of the request; they are recorded with every read of an item."""
        self.trail: Trail | None = None
        """The record of the request for `Explain`; None for a request without a name."""
        self.returned_from = len(keys)
        """Index from which on every process has given all items back, if they were given back deepest first."""
        self.held: dict[ConnectionId, bytearray] = {connection: bytearray(b"\1" * len(keys))}
        """For each process, one byte per item: 1 while the process holds the item, else 0."""

    def attach(self, connection: ConnectionId) -> None:
        """Let another process of the session hold all items that are still held."""
        held = 0
        for flags in self.held.values():
            held |= int.from_bytes(flags, "big")
        self.held[connection] = bytearray(held.to_bytes(len(self.keys), "big"))

    def is_held(self, index: int) -> bool:
        """Returns True while any process holds the item at `index`."""
        return any(flags[index] for flags in self.held.values())

    def code(self, index: int) -> Code:
        """Returns the present state of the item at `index`: LOCAL, REMOTE or LOST."""
        segment = self.segments[index]
        if segment is not None:
            return Code.LOCAL if segment.state is State.READY else Code.LOST
        return Code.REMOTE if self.remotes[index] is not None else Code.LOST

    def readable(self, start: int, stop: int) -> list[Segment | None]:
        """Returns the segment of this node for each item from `start` to `stop`; None for a remote item, and for a copy
        that was dropped for a wrong checksum (its slot stays pinned until the item is given back)."""
        ready = State.READY
        return [s if s is not None and s.state is ready else None for s in self.segments[start:stop]]


class Write:
    """One reservation of slots. A segment stays pinned until it is committed, or until every process that may write
    into its slot gave it back."""

    def __init__(self, write: WriteId, connection: ConnectionId) -> None:
        self.id = write
        self.nbytes = 0
        """The bytes that are charged for the write."""
        self.open: dict[int, Segment] = {}
        """The segments that are reserved and not committed yet (open), by index in the keys of the `Prepare`
        request."""
        self.held: dict[ConnectionId, dict[int, None]] = {connection: {}}
        """Indices of the open segments that each process may still write into."""
        self.filled: dict[ConnectionId, dict[int, None]] = {}
        """Indices of the open segments of which each process committed its shards and which it does not write again."""
        self.expired = False
        self.timer: Timer | None = None
        self.began = 0.0
        """Time in seconds at which the slots were reserved."""
        self.pin_s = 0.0
        """Seconds for which its segments are pinned when they are committed; 0: they are not."""


class SessionGrants:
    """The leases and writes of one session, and the counts that bound them. Only `Grants` changes them."""

    def __init__(self, tenant: TenantId, slot_bytes: int, segment_tokens: int) -> None:
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.segment_tokens = segment_tokens
        self.leases: dict[LeaseId, Lease] = {}
        self.writes: dict[WriteId, Write] = {}
        self.leased = 0
        """Number of held items in all leases of the session, local and remote."""
        self.pinned = 0
        """Number of held items in the leases of the session that are on this node."""
        self.coming = 0
        """Number of slots of this node that are reserved for items that are being fetched."""
        self.reserved = 0
        """Number of segments in the writes of the session that are not committed yet."""
        self.nbytes = 0
        """The bytes that are charged for the leases and writes."""
        self.recent = RecentMatches()
        """The access records of its latest matches, for the stores that follow them."""

    def move(self, old: ConnectionId, new: ConnectionId, known: Container[int] = ()) -> None:
        """Move all leases and writes that a process holds, but those that are `known`, from its connection `old` to its
        connection `new`."""
        for lease in self.leases.values():
            if lease.id not in known:
                _move(lease.held, old, new)
        for write in self.writes.values():
            if write.id not in known:
                _move(write.held, old, new)
                _move(write.filled, old, new)

    def pins(self) -> Iterator[Segment]:
        """Yields a segment once for each pin that leases and writes of the session hold on it; for integrity checks."""
        for lease in self.leases.values():
            yield from (segment for segment in lease.segments if segment is not None)
        for write in self.writes.values():
            yield from write.open.values()

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts differ from what the leases and writes hold."""
        leases, writes = self.leases.values(), self.writes.values()
        held = sum(lease.is_held(index) for lease in leases for index in range(len(lease.keys)))
        assert self.leased == held, f"{self.leased} items are counted as leased, {held} are held"
        here = sum(segment is not None for lease in leases for segment in lease.segments)
        assert self.pinned == here, f"{self.pinned} slots are counted as leased, {here} are held"
        assert self.coming >= 0
        assert self.nbytes == sum(lease.nbytes for lease in leases) + sum(write.nbytes for write in writes)
        assert self.nbytes <= MAX_SESSION_BYTES
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
        withdraw: Callable[[TenantId, Sequence[SegmentKey], SessionGrants], None],
    ) -> None:
        """`withdraw`: takes back the in-flight markers of segments that this session does not write any more."""
        self._context = context
        self._peers = peers
        self._touches = touches
        self._withdraw = withdraw
        self._by_tenant: Counter[TenantId] = Counter()
        """The bytes that are charged for the leases and writes of each tenant."""

    # -- bounds

    def _room_bytes(self, session: SessionGrants) -> int:
        """Returns how many bytes may still be charged to the session."""
        part = MAX_BYTES // max(1, len(self._context.config.quotas))
        return max(0, min(MAX_SESSION_BYTES - session.nbytes, part - self._by_tenant[session.tenant]))

    def _charge(self, session: SessionGrants, nbytes: int) -> None:
        session.nbytes += nbytes
        self._by_tenant[session.tenant] += nbytes

    def fetch_room(self, session: SessionGrants) -> int:
        """Returns how many more slots of this node the session may take for segments that it fetches. Matches may lease
        the share `session_lease_share` of the slots. Fetches may use half (rounded up) of the other slots too, so that
        a session whose local items fill its share can still fetch the remote ones."""
        leased, everything = self._share(session, self._context.config.session_lease_share), self._share(session, 1.0)
        limit = everything - (everything - leased) // 2
        return max(0, limit - session.pinned - session.coming)

    def may_lease(self, session: SessionGrants, found: Sequence[Segment | None], processes: int) -> int:
        """Returns how many items of a match, from the first on, the session may lease: within its share of the slots,
        the maximum number of its leases, and the bytes that may be charged to it and to its tenant. `found`: the
        segment of this node for each item, None where it is at another node. `processes`: how many processes the
        session has.

        A remote item takes no slot of this node until it is fetched, and its node bounds its own leases. A single
        process reads a prompt longer than its share in windows: it gives back each before it fetches the next. With
        several processes the one that matched holds all items until the last process has read them, so every item
        counts at once.
        """
        items = (self._room_bytes(session) - GRANT_BYTES) // ITEM_BYTES
        if not self.may_add_lease(session) or items <= 0:
            return 0
        found = found[:items]
        share = self._share(session, self._context.config.session_lease_share)
        if processes > 1:
            return max(0, min(len(found), share - session.leased))
        # A session may lease this share of the slots of each node, and the nodes are taken to be of equal size.
        limit = max(0, min(len(found), share * len(self._context.ring.members) - session.leased))
        room = max(0, share - session.pinned - session.coming)
        if limit - found[:limit].count(None) <= room:
            return limit
        here = (index for index, segment in enumerate(found) if segment is not None)
        return next(itertools.islice(here, room, None))

    def may_add_lease(self, session: SessionGrants) -> bool:
        """Returns True if the session may have one more lease, possibly without items."""
        return len(session.leases) < MAX_GRANTS and self._room_bytes(session) >= GRANT_BYTES

    def reserve_room(self, session: SessionGrants) -> int:
        """Returns how many more slots the session may reserve for writes."""
        items = (self._room_bytes(session) - GRANT_BYTES) // ITEM_BYTES
        if len(session.writes) >= MAX_GRANTS or items <= 0:
            return 0
        return min(items, self._share(session, self._context.config.session_reserve_share) - session.reserved)

    def _share(self, session: SessionGrants, share: float) -> int:
        pool = self._context.store.pool(session.tenant, session.slot_bytes)
        return max(2, int(share * self._context.store.capacity(pool.id))) if pool is not None else 0

    # -- leases

    def add_lease(self, session: SessionGrants, lease: Lease) -> None:
        """Add a lease to the session. The lease takes over one pin of each of its local segments from the caller."""
        session.leases[lease.id] = lease
        self._charge(session, lease.nbytes)
        session.leased += len(lease.keys)
        session.pinned += len(lease.segments) - lease.segments.count(None)

    def attach_lease(self, session: SessionGrants, lease: Lease, connection: ConnectionId) -> bool:
        """Let another process of the session hold a lease as well. Returns False, and changes nothing, if that exceeds
        a limit."""
        nbytes = PROCESS_BYTES + HELD_BYTES * len(lease.keys)
        if connection not in lease.held:
            if nbytes > self._room_bytes(session) or len(lease.held) >= MAX_PROCESSES:
                return False
            lease.nbytes += nbytes
            self._charge(session, nbytes)
        lease.attach(connection)
        return True

    def item_expected(self, session: SessionGrants, lease: Lease, index: int) -> None:
        """Count a fetch of the remote item at `index` that begins. The item counts as one slot, however many fetches
        wait for it."""
        session.coming += index not in lease.coming
        lease.coming[index] = lease.coming.get(index, 0) + 1

    def item_settled(self, session: SessionGrants, lease: Lease, index: int) -> None:
        """Count the end of a fetch of the item at `index`, whatever its outcome. After the last fetch of the item under
        way, no slot counts as reserved for it any more."""
        lease.coming[index] -= 1
        if not lease.coming[index]:
            del lease.coming[index]
            session.coming -= 1

    def item_arrived(self, session: SessionGrants, lease: Lease, index: int, segment: Segment, source: Source) -> None:
        """Make the item at `index` local, because its segment arrived from `source`. The lease takes over the caller's
        pin of the segment."""
        lease.account.arrived(index, source)
        lease.segments[index] = segment
        lease.remotes[index] = None
        session.pinned += 1

    def item_lost(self, lease: Lease, index: int, reason: MissReason, detail: str) -> None:
        """Mark a remote item as lost: it cannot be fetched from any node."""
        lease.account.lose(index, reason, detail)
        lease.remotes[index] = None

    def release(
        self,
        session: SessionGrants,
        connection: ConnectionId,
        ranges: Iterable[tuple[Lease, int, int]],
        read: bool | None,
    ) -> None:
        """Give back the items that a process holds in each range (lease, start, stop). `read`: whether it has read
        them; None: it has ended, or has lost the lease, and did not say so."""
        ended: dict[NodeId, list[int]] = {}
        for lease, start, stop in ranges:
            if self._release(session, connection, lease, start, stop, read):
                for node, number in lease.remote_leases:
                    ended.setdefault(node, []).append(number)
        for node, numbers in ended.items():
            for start in range(0, len(numbers), peer.MAX_KEYS):
                self._peers.tell(node, peer.ReleaseLease(tuple(numbers[start : start + peer.MAX_KEYS])))

    def _release(
        self,
        session: SessionGrants,
        connection: ConnectionId,
        lease: Lease,
        start: int,
        stop: int,
        read: bool | None,
    ) -> bool:
        """Give back the items of one range that a process holds. Returns True if no process holds any item of the lease
        any more, so that it ends."""
        flags = lease.held.get(connection)
        if flags is None:
            return False
        stop = min(stop, len(flags))
        start = min(start, stop)
        given = flags[start:stop]
        flags[start:stop] = bytes(stop - start)
        if read:
            lease.account.mark_read(start, bytes(given))
        reported = read is not None
        if len(lease.held) == 1:
            # This is the only process with the lease, so no process holds the other items of the range.
            self._drop(session, lease, start, stop, given.count(1), reported=reported)
        else:
            for index in range(stop - 1, start - 1, -1):
                if given[index - start] and not lease.is_held(index):
                    self._drop(session, lease, index, index + 1, 1, reported=reported)
        if 1 not in flags:
            del lease.held[connection]
            if lease.held:
                nbytes = PROCESS_BYTES + HELD_BYTES * len(lease.keys)
                lease.nbytes -= nbytes
                self._charge(session, -nbytes)
        if lease.held:
            return False
        del session.leases[lease.id]
        self._charge(session, -lease.nbytes)
        lease.account.close(self._context.counters)
        if lease.keys and lease.returned_from:
            # The process may have given back the beginning of the prompt first: count the read of the beginning once
            # more, so that it is evicted last.
            found = self._context.ready(session.tenant, lease.keys[:MAX_CHANGED])
            self._touches.read([segment for segment in found if segment is not None], lease.hints)
        return True

    def _drop(self, session: SessionGrants, lease: Lease, start: int, stop: int, count: int, *, reported: bool) -> None:
        """Unpin the `count` items in a range that no process holds any more, and settle them in the account of the
        match. `reported`: the last process said whether it has read them."""
        if start < lease.returned_from <= stop:
            lease.returned_from = start
        session.leased -= count
        dropped = [segment for segment in lease.segments[start:stop] if segment is not None]
        session.pinned -= len(dropped)
        account = lease.account
        if len(dropped) < stop - start or not account.settle_all(start, stop):
            for index in range(start, stop):
                here, node = lease.segments[index] is not None, lease.remotes[index]
                if not account.settle(index, here=here, shipped=node is not None, reported=reported):
                    skipped = MissReason.SKIPPED, ""
                    unread = lease.trail.not_fetched(node) if lease.trail is not None and node is not None else skipped
                    account.lose(index, *unread)
        if not account.independent:
            before = max(0, start - 1)
            self._context.store.link(lease.keys[before:stop], lease.segments[before:stop])
        lease.segments[start:stop] = [None] * (stop - start)
        lease.remotes[start:stop] = [None] * (stop - start)
        self._context.store.unpin(*dropped)
        # The segments could not be evicted while they were pinned, so for the eviction policy their age begins now.
        # They count as used also where the engine had them itself: the prompt goes on.
        self._touches.read(dropped, lease.hints)

    # -- writes

    def add_write(self, session: SessionGrants, write: Write) -> None:
        """Add a write to the session and start its deadline. The write takes over the pin that the reservation set on
        each of its segments."""
        session.writes[write.id] = write
        write.began = self._context.now
        write.nbytes = GRANT_BYTES + ITEM_BYTES * len(write.open)
        self._charge(session, write.nbytes)
        session.reserved += len(write.open)
        for held in write.held.values():
            held.update(dict.fromkeys(write.open))
        write.timer = self._context.after(self._context.config.reservation_s, lambda: self.expire(session, write))

    def attach(self, session: SessionGrants, write: Write, connection: ConnectionId) -> bool:
        """Let another process of the session write into the slots of the write as well. Returns False, and changes
        nothing, if that exceeds a limit."""
        nbytes = PROCESS_BYTES + WRITER_BYTES * len(write.open)
        if connection not in write.held:
            if nbytes > self._room_bytes(session) or len(write.held) >= MAX_PROCESSES:
                return False
            write.nbytes += nbytes
            self._charge(session, nbytes)
        write.held[connection] = dict.fromkeys(write.open)
        return True

    def filled(self, write: Write, connection: ConnectionId, index: int) -> None:
        """Record that a process committed its shards of the segment at `index`, of which other shards are still
        missing."""
        write.filled.setdefault(connection, {})[index] = None

    def committed(self, session: SessionGrants, write: Write, index: int) -> None:
        """End the write's hold on the segment at `index`, which is published: its pin ends."""
        for held in write.held.values():
            held.pop(index, None)
        self._close(session, write, index)

    def expire(self, session: SessionGrants, write: Write) -> None:
        """Handle the deadline of a write: its uncommitted segments leave the index. Their slots stay pinned until the
        processes that may still write into them have given them back."""
        if write.expired:
            return
        write.expired = True
        for segment in write.open.values():
            self._context.store.discard(segment, self._context.now)
        self._withdraw(session.tenant, [segment.key for segment in write.open.values()], session)
        for connection, indices in write.filled.items():
            self.give_back(session, write, connection, indices)

    def give_back(
        self, session: SessionGrants, write: Write, connection: ConnectionId, indices: Iterable[int] | None = None
    ) -> None:
        """Record that a process will not write into the slots at `indices` any more (None: into no slot of the write).
        A segment that is not committed is discarded when the last process has given it back."""
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
        self._withdraw(session.tenant, withdrawn, session)

    def check_integrity(self, sessions: Iterable[SessionGrants]) -> None:
        """Raises AssertionError when the bytes of a tenant differ from those of its `sessions`."""
        counted: Counter[TenantId] = Counter()
        for session in sessions:
            counted[session.tenant] += session.nbytes
        assert +self._by_tenant == +counted, f"{self._by_tenant} bytes are charged, {counted} are kept"

    def _close(self, session: SessionGrants, write: Write, index: int) -> None:
        self._context.store.unpin(write.open.pop(index))
        session.reserved -= 1
        if not write.open:
            del session.writes[write.id]
            self._charge(session, -write.nbytes)
            if write.timer is not None:
                write.timer.cancel()


def _move(held: dict[ConnectionId, T], old: ConnectionId, new: ConnectionId) -> None:
    if old in held:
        held[new] = held.pop(old)


def pack(segments: Sequence[Segment | None], shards: int, *, checksums: bool) -> tuple[bytes, bytes]:
    """Returns (slots, checksums) of the segments as packed in replies to engines: zeros where there is no segment, and
    no checksums unless the engine asked for them."""
    slots = b"".join([NO_SLOT_BYTES if segment is None else segment.packed for segment in segments])
    if not checksums:
        return slots, b""
    none = bytes(CHECKSUM_BYTES * shards)
    return slots, b"".join([none if segment is None else segment.checksums for segment in segments])
