"""Engines on this node: sessions, their processes, leases and writes.

A deadline ends visibility, never ownership: when a session misses its heartbeats its reservations leave the
index, but a slot that one of its processes may still read or write stays pinned until that process released
it or is dead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from tokenlake.core.access import RecentMatches
from tokenlake.core.context import Context
from tokenlake.core.explain import Trail
from tokenlake.core.timers import Timer
from tokenlake.core.touches import Touches
from tokenlake.hints import Hints
from tokenlake.identity import ConnectionId, LeaseId, NodeId, SegmentKey, SessionId, TenantId, WriteId
from tokenlake.metrics import Metric
from tokenlake.store import Segment, State
from tokenlake.wire import Code

__all__ = ["Lease", "Process", "Session", "Sessions", "Write"]

EXPIRED = Metric("tokenlake_expired_sessions_total", "Sessions that missed their heartbeats for a whole lease")
SHIPPED = Metric(
    "tokenlake_shipped_tokens_total",
    "Tokens found at another node and attended to there",
)
SKIPPED = Metric(
    "tokenlake_skipped_by_cost_tokens_total",
    "Tokens found at another node and released without being fetched",
)

SLICE = 1024
"""Segments of a process that is gone that are given back at a time, or one lease or write."""


class Lease:
    """What one match found. An item is a segment pinned here, or the node where it is leased.

    Each process that holds the lease gives back its items by range; an item's pin goes with its last holder.
    """

    def __init__(self, lease: LeaseId, keys: list[SegmentKey], connection: ConnectionId) -> None:
        self.id = lease
        self.keys = keys
        self.segments: list[Segment | None] = [None] * len(keys)
        self.remotes: list[NodeId | None] = [None] * len(keys)
        """Where an item still has to be fetched from."""
        self.coming: dict[int, int] = {}
        """Items on their way here: how many fetches wait for each."""
        self.remote_leases: list[tuple[NodeId, int]] = []
        self.hints: Hints | None = None
        """Of the request, for every read of its items."""
        self.trail: Trail | None = None
        """What is noted for `Explain`."""
        self.shipped = 0
        """Items, from the first on, that an engine attended to where they lie."""
        self.held: dict[ConnectionId, bytearray] = {connection: bytearray(b"\1" * len(keys))}
        """Per process, 1 for each item it holds."""

    def code(self, index: int) -> Code:
        """Where an item is now."""
        segment = self.segments[index]
        if segment is not None:
            return Code.LOCAL if segment.state is State.READY else Code.LOST
        return Code.REMOTE if self.remotes[index] is not None else Code.LOST

    def readable(self, start: int, stop: int) -> list[Segment | None]:
        """Items of a range that lie here; None for those that do not, and for those whose copy was dropped because its
        bytes were wrong: these stay pinned until they are given back."""
        ready = State.READY
        return [s if s is not None and s.state is ready else None for s in self.segments[start:stop]]

    def holders(self, index: int) -> int:
        """How many processes hold an item."""
        return sum(flags[index] for flags in self.held.values())


class Write:
    """One reservation. A segment is pinned until it is committed, or until every process that may write it gave
    it back."""

    def __init__(self, write: WriteId, tenant: TenantId, first: int, connection: ConnectionId) -> None:
        self.id = write
        self.tenant = tenant
        self.first = first
        self.open: dict[int, Segment] = {}
        """Reserved and not committed, by index into the keys of the prepare."""
        self.held: dict[ConnectionId, dict[int, None]] = {connection: {}}
        """Per process, the open ones that it may still write."""
        self.filled: dict[ConnectionId, dict[int, None]] = {}
        """Per process, the open ones of which it committed its shards: it does not touch them again."""
        self.expired = False
        self.timer: Timer | None = None
        self.request = ""
        """What the logs call it by."""
        self.hints: Hints | None = None
        """Of that request."""


class Process:
    """One connection of a session."""

    def __init__(self, connection: ConnectionId, session: Session) -> None:
        self.connection = connection
        self.session = session


class Session:
    """One engine."""

    def __init__(
        self,
        session: SessionId,
        tenant: TenantId,
        slot_bytes: int,
        shards: int,
        segment_tokens: int,
        deadline: float,
    ) -> None:
        self.id = session
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.shards = shards
        self.segment_tokens = segment_tokens
        self.deadline = deadline
        self.expired = False
        self.processes: dict[ConnectionId, Process] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.writes: dict[WriteId, Write] = {}
        self.leased = 0
        """Items of its leases, fetched or not."""
        self.pinned = 0
        """Those of them that lie in slots here."""
        self.coming = 0
        """Slots here for items on their way to it."""
        self.reserved = 0
        """Open segments of its writes."""
        self.recent = RecentMatches()
        """What its stores go on from."""


class Sessions:
    """All sessions of the node; at most `max_sessions`."""

    def __init__(self, context: Context, touches: Touches) -> None:
        self._context = context
        self._touches = touches
        self._sessions: dict[SessionId, Session] = {}
        self._processes: dict[ConnectionId, Process] = {}
        self.peer_releases: dict[NodeId, list[int]] = {}
        """Leases at other nodes that nobody needs any more, until they are taken."""
        self.given_up: list[tuple[TenantId, SegmentKey]] = []
        """Segments that nobody writes here any more, until they are taken."""

    def process(self, connection: ConnectionId) -> Process | None:
        """The process, None when it is gone."""
        return self._processes.get(connection)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    # -- coming and going

    def join(
        self,
        connection: ConnectionId,
        tenant: TenantId,
        slot_bytes: int,
        shards: int,
        segment_tokens: int,
        session_id: SessionId,
        resume: ConnectionId,
    ) -> Session | str:
        """Open a session (id 0) or join one; the reason when it is refused. `resume`: the process's earlier
        connection, whose holdings it takes over."""
        config = self._context.config
        session = self._sessions.get(session_id)
        if session is None and session_id:
            return f"session {session_id} does not exist on node {config.node}; it ended, or the daemon restarted"
        if session is None:
            if len(self._sessions) >= config.max_sessions:
                return f"limit 'max_sessions' of {config.max_sessions} sessions is reached"
            number = SessionId(self._context.next_id())
            deadline = self._context.now + config.lease_s
            session = Session(number, tenant, slot_bytes, shards, segment_tokens, deadline)
            self._sessions[number] = session
            self._watch(session)
        elif (session.tenant, session.slot_bytes, session.shards) != (tenant, slot_bytes, shards):
            return f"session {session_id} belongs to another tenant or layout"
        process = Process(connection, session)
        session.processes[connection] = process
        self._processes[connection] = process
        self._take_over(session, resume, connection)
        self.renew(session)
        return session

    def _take_over(self, session: Session, old: ConnectionId, new: ConnectionId) -> None:
        # One that is gone may still be among the session's, until all that it held is given back.
        if old not in self._processes or session.processes.pop(old, None) is None:
            return
        del self._processes[old]
        for lease in session.leases.values():
            if old in lease.held:
                lease.held[new] = lease.held.pop(old)
        for write in session.writes.values():
            if old in write.held:
                write.held[new] = write.held.pop(old)
            if old in write.filled:
                write.filled[new] = write.filled.pop(old)

    def gone(self, connection: ConnectionId) -> None:
        """The process can touch nothing any more: what only it held is free."""
        process = self._processes.pop(connection, None)
        if process is None:
            return
        session = process.session
        leases, writes = list(session.leases.values()), list(session.writes.values())

        def work() -> bool:
            room = SLICE
            while leases and room > 0:
                lease = leases.pop()
                room -= len(lease.keys)
                self.release(session, lease, connection, 0, len(lease.keys))
            while writes and room > 0:
                write = writes.pop()
                room -= len(write.open)
                self.give_back(session, write, connection)
            if leases or writes:
                return True
            del session.processes[connection]
            if not session.processes:
                del self._sessions[session.id]
            return False

        self._context.in_slices(work)

    def keep(self, process: Process, leases: Iterable[int], writes: Iterable[int]) -> None:
        """What the process holds besides these is given back."""
        session, connection = process.session, process.connection
        known = {*leases, *writes}
        for lease in [lease for lease in session.leases.values() if lease.id not in known]:
            self.release(session, lease, connection, 0, len(lease.keys))
        for write in [write for write in session.writes.values() if write.id not in known]:
            self.give_back(session, write, connection)

    def renew(self, session: Session) -> bool:
        """A sign of life; False when its deadline had passed since the last one."""
        was_alive = not session.expired
        session.expired = False
        session.deadline = self._context.now + self._context.config.lease_s
        return was_alive

    def _watch(self, session: Session) -> None:
        def look() -> None:
            if session.id not in self._sessions:
                return
            if session.deadline <= self._context.now and not session.expired:
                session.expired = True
                self._context.counters.add(EXPIRED)
                for write in list(session.writes.values()):
                    self.expire(session, write)
            self._context.timers.at(max(session.deadline, self._context.now + 0.25 * config.lease_s), look)

        config = self._context.config
        self._context.timers.at(session.deadline, look)

    # -- leases

    def fetch_room(self, session: Session) -> int:
        """How many more slots here the session's leases may hold by fetching: half of what matches leave, so that one
        that found as much here as a session may lease can read what else it found."""
        most = self._share(session, (1 + self._context.config.session_lease_share) / 2)
        return max(0, most - session.pinned - session.coming)

    def may_lease(self, session: Session, found: Sequence[Segment | None]) -> int:
        """How many items of a match the session may lease, from the first on. `found`: None for each at another node.

        What lies elsewhere holds no slot here until it is fetched, and its node bounds what it leases: a process alone
        reads a prompt longer than its share in windows, giving back each before the next. Of several processes, the one
        that matched holds everything until the last has read, so for them all of it counts at once.
        """
        share = self._share(session, self._context.config.session_lease_share)
        if len(session.processes) > 1:
            return max(0, min(len(found), share - session.leased))
        # What equal nodes would let it have: a bound on what is noted here.
        most = max(0, min(len(found), share * len(self._context.ring.members) - session.leased))
        room = max(0, share - session.pinned - session.coming)
        if most - found[:most].count(None) <= room:
            return most
        here = (index for index, segment in enumerate(found) if segment is not None)
        return next(itertools.islice(here, room, None))

    def reserve_room(self, session: Session) -> int:
        """How many more slots the session may reserve."""
        return self._share(session, self._context.config.session_reserve_share) - session.reserved

    def _share(self, session: Session, share: float) -> int:
        pool = self._context.store.pool(session.tenant, session.slot_bytes)
        return max(2, int(share * self._context.store.capacity(pool.id))) if pool is not None else 0

    def add_lease(self, session: Session, lease: Lease) -> None:
        """Its segments are pinned by the caller, one pin each, which the lease takes over."""
        session.leases[lease.id] = lease
        session.leased += len(lease.keys)
        session.pinned += len(lease.segments) - lease.segments.count(None)

    def release(self, session: Session, lease: Lease, connection: ConnectionId, start: int, stop: int) -> None:
        """`connection` gives back the items of a range that it holds."""
        flags = lease.held.get(connection)
        if flags is None:
            return
        stop = min(stop, len(flags))
        start = min(start, stop)
        given = flags[start:stop]
        flags[start:stop] = bytes(stop - start)
        if len(lease.held) == 1:
            # What it does not hold here has left the lease already.
            self._drop(session, lease, start, stop, given.count(1))
        else:
            for index in range(stop - 1, start - 1, -1):
                if given[index - start] and not lease.holders(index):
                    self._drop(session, lease, index, index + 1, 1)
        if not any(flags):
            del lease.held[connection]
        if not lease.held:
            del session.leases[lease.id]
            for node, number in lease.remote_leases:
                self.peer_releases.setdefault(node, []).append(number)
            if stop - start < len(lease.keys):
                # It was given back in parts, perhaps parents first: once more as one prompt.
                found = self._context.ready(session.tenant, lease.keys)
                self._touches.read([segment for segment in found if segment is not None], lease.hints)

    def _drop(self, session: Session, lease: Lease, start: int, stop: int, count: int) -> None:
        """A range of which nobody holds any more the `count` items that are left in it."""
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
        # Until now they were in use, and nothing could displace them: their turn is counted from here.
        self._touches.read(dropped, lease.hints)

    def take_peer_releases(self) -> dict[NodeId, list[int]]:
        """Leases at other nodes that nobody needs any more; the caller gives them back."""
        taken, self.peer_releases = self.peer_releases, {}
        return taken

    def remote_leases(self) -> dict[NodeId, list[int]]:
        """Leases at other nodes that living engines stand behind, by node."""
        by_node: dict[NodeId, list[int]] = {}
        for session in self._sessions.values():
            for lease in session.leases.values() if not session.expired else ():
                for node, number in lease.remote_leases:
                    by_node.setdefault(node, []).append(number)
        return by_node

    # -- writes

    def add_write(self, session: Session, write: Write) -> None:
        """Its segments are RESERVED and carry the pin of `SegmentStore.reserve`."""
        session.writes[write.id] = write
        session.reserved += len(write.open)
        for held in write.held.values():
            held.update(dict.fromkeys(write.open))
        write.timer = self._context.after(self._context.config.reservation_s, lambda: self.expire(session, write))

    def attach(self, write: Write, connection: ConnectionId) -> None:
        """Another process of the session writes into the slots as well."""
        write.held[connection] = dict.fromkeys(write.open)

    def filled(self, write: Write, connection: ConnectionId, index: int) -> None:
        """`connection` committed its shards of a segment of which others are still missing."""
        write.filled.setdefault(connection, {})[index] = None

    def expire(self, session: Session, write: Write) -> None:
        """The deadline passed: its open segments leave the index; their slots stay with those that may still write
        into them."""
        if write.expired:
            return
        write.expired = True
        for segment in write.open.values():
            self._context.store.discard(segment, self._context.now)
            self.given_up.append((write.tenant, segment.key))
        for connection, indices in write.filled.items():
            self.give_back(session, write, connection, indices)

    def committed(self, session: Session, write: Write, index: int) -> None:
        """The segment at `index` was published: the write's pin goes."""
        for held in write.held.values():
            held.pop(index, None)
        self._close(session, write, index)

    def give_back(
        self, session: Session, write: Write, connection: ConnectionId, indices: Iterable[int] | None = None
    ) -> None:
        """`connection` will not touch these slots of the write any more, None for all. With its last holder an
        open segment goes."""
        held = write.held.get(connection, {})
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
                self.given_up.append((write.tenant, segment.key))

    def _close(self, session: Session, write: Write, index: int) -> None:
        self._context.store.unpin(write.open.pop(index))
        session.reserved -= 1
        if not write.open:
            del session.writes[write.id]
            if write.timer is not None:
                write.timer.cancel()

    def take_given_up(self) -> list[tuple[TenantId, SegmentKey]]:
        """Segments that nobody writes here any more; the caller tells their directory nodes."""
        taken, self.given_up = self.given_up, []
        return taken

    def pinned(self) -> Iterator[Segment]:
        """A segment per pin held here; for integrity checks."""
        for session in self._sessions.values():
            for lease in session.leases.values():
                yield from (segment for segment in lease.segments if segment is not None)
            for write in session.writes.values():
                yield from write.open.values()

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {
            "sessions": len(self._sessions),
            "processes": len(self._processes),
            "leases": sum(len(session.leases) for session in self._sessions.values()),
            "writes": sum(len(session.writes) for session in self._sessions.values()),
            "slots for what comes": sum(session.coming for session in self._sessions.values()),
        }

    def check_integrity(self) -> None:
        """AssertionError when counts do not match what is held."""
        for session in self._sessions.values():
            assert session.processes, f"session {session.id} has no process"
            items = sum(
                any(f[i] for f in le.held.values()) for le in session.leases.values() for i in range(len(le.keys))
            )
            assert session.leased == items, f"session {session.id} leased {session.leased}, holds {items}"
            here = sum(segment is not None for lease in session.leases.values() for segment in lease.segments)
            assert session.pinned == here, f"session {session.id} counts {session.pinned} slots, holds {here}"
            assert session.coming >= 0
            assert session.reserved == sum(len(w.open) for w in session.writes.values())
            for write in session.writes.values():
                assert write.open
                held = {index for indices in write.held.values() for index in indices}
                assert held == set(write.open), f"write {write.id}: {held} held of {list(write.open)}"
                for segment in write.open.values():
                    assert segment.pins > 0
                    expected = State.GONE if write.expired else State.RESERVED
                    assert segment.state is expected, f"{segment} of write {write.id}"
