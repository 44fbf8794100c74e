"""Sessions and processes: the engines that are connected to this node.

A session is one engine, and each process of it is one connection. A session that sends nothing for `lease_s` expires:
its reservations leave the index. Its slots are free when its processes gave them back or are dead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context, Part
from tokenlake.core.engines.grants import Grants, SessionGrants
from tokenlake.identity import ConnectionId, NodeId, SessionId, TenantId
from tokenlake.memory import Segment
from tokenlake.metrics import Metric
from tokenlake.wire import peer

_WHAT_IS_ONE = "each open pool of an engine is one, and each closed one whose arrays or writes are alive"

PIECE = 128
"""Maximum number of segments that one slice of work gives back, and of leases that it renews."""

EXPIRED = Metric("tokenlake_expired_sessions_total", "Sessions that missed their heartbeats for a whole lease")


class Process:
    """One process of an engine: a connection of its session."""

    def __init__(self, connection: ConnectionId, session: Session) -> None:
        self.connection = connection
        self.session = session
        self.alive = True
        """False once the process is gone, or has continued over another connection."""


class Session(SessionGrants):
    """One engine as the daemon knows it, with its processes, leases and writes."""

    def __init__(
        self,
        session: SessionId,
        tenant: TenantId,
        slot_bytes: int,
        shards: int,
        segment_tokens: int,
        deadline: float,
    ) -> None:
        super().__init__(tenant, slot_bytes, segment_tokens)
        self.id = session
        self.shards = shards
        self.deadline = deadline
        self.expired = False
        self.processes: dict[ConnectionId, Process] = {}
        """Processes of the engine by connection. A dead process stays in the map until all leases and writes that it
        held are given back."""


class Sessions(Part):
    """All sessions of the node's engines, at most `max_sessions`. Each of the configured tenants may have an equal part
    of them."""

    def __init__(self, context: Context, peers: Peers, grants: Grants) -> None:
        self._context = context
        self._peers = peers
        self._grants = grants
        self._sessions: dict[SessionId, Session] = {}
        self._by_tenant: Counter[TenantId] = Counter()
        """Number of sessions of each tenant."""
        self._processes: dict[ConnectionId, Process] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def process(self, connection: ConnectionId) -> Process | None:
        """Returns the process of a connection, None when the process is gone."""
        return self._processes.get(connection)

    def start(self) -> None:
        """Begin to renew, at regular intervals, the leases that living sessions hold at other nodes."""
        self._context.after(self._context.config.peer_lease_s / 3, self._renew_remote_leases)

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
        """Open a session (`session_id` 0) or join an existing one. Returns the session, or the reason as text when it
        is refused. `resume`: the earlier connection of the process, whose leases and writes move to the new
        connection."""
        assert connection not in self._processes
        config = self._context.config
        session = self._sessions.get(session_id)
        if session is None and session_id:
            return f"session {session_id} does not exist on node {config.node}; it ended, or the daemon restarted"
        if session is None:
            if len(self._sessions) >= config.max_sessions:
                return f"limit 'max_sessions' of {config.max_sessions} sessions is reached; {_WHAT_IS_ONE}"
            share = max(1, config.max_sessions // max(1, len(config.quotas)))
            if self._by_tenant[tenant] >= share:
                return (
                    f"tenant '{tenant}' has {share} sessions, its part of 'max_sessions' of {config.max_sessions}; "
                    f"{_WHAT_IS_ONE}"
                )
            number = SessionId(self._context.next_id())
            deadline = self._context.now + config.lease_s
            session = Session(number, tenant, slot_bytes, shards, segment_tokens, deadline)
            self._sessions[number] = session
            self._by_tenant[tenant] += 1
            self._watch(session)
        elif (session.tenant, session.slot_bytes, session.shards) != (tenant, slot_bytes, shards):
            return f"session {session_id} belongs to another tenant or layout"
        process = Process(connection, session)
        session.processes[connection] = process
        self._processes[connection] = process
        # Only a living process can be resumed; a dead one may still be in the session until all that it held is given
        # back.
        if resume in self._processes and session.processes.pop(resume, None) is not None:
            self._processes.pop(resume).alive = False
            session.move(resume, connection)
        self.renew(session)
        return session

    def gone(self, connection: ConnectionId) -> None:
        """Give back all leases and writes of a process that is dead or said `Bye`. Where no other process holds them,
        leased segments lose the lease's pin and stay cached, and segments that were not committed are discarded."""
        process = self._processes.pop(connection, None)
        if process is None:
            return
        process.alive = False
        self._give_back(process)

    def _give_back(self, process: Process) -> None:
        """Give back all leases and writes of a process that is not alive, some at a time."""
        session, connection = process.session, process.connection
        leases = [lease for lease in session.leases.values() if connection in lease.held]
        writes = [write for write in session.writes.values() if connection in write.held]
        stop: int | None = None
        """Index up to which the items of the last lease are still to be given back; None: all of them."""

        def work() -> bool:
            nonlocal stop
            room = PIECE
            released = []
            while leases and room > 0:
                lease = leases[-1]
                stop = len(lease.keys) if stop is None else stop
                start = max(0, stop - room)
                released.append((lease, start, stop))
                room -= stop - start
                stop = start
                if not start:
                    leases.pop()
                    stop = None
            self._grants.release(session, connection, released, None)
            while writes and room > 0:
                write = writes.pop()
                room -= len(write.open)
                self._grants.give_back(session, write, connection)
            if leases or writes:
                return True
            del session.processes[connection]
            if not session.processes:
                del self._sessions[session.id]
                self._by_tenant[session.tenant] -= 1
            return False

        self._context.in_slices(work)

    def reconcile(self, process: Process, leases: Iterable[int], writes: Iterable[int]) -> None:
        """Give back every lease and write of the process that it does not name: it lost the reply that granted it."""
        # They become those of a process that is gone. The process itself may attach to one of them again meanwhile.
        gone = Process(ConnectionId(-self._context.next_id()), process.session)
        gone.alive = False
        process.session.move(process.connection, gone.connection, {*leases, *writes})
        process.session.processes[gone.connection] = gone
        self._give_back(gone)

    # -- deadlines

    def renew(self, session: Session) -> bool:
        """Move the deadline of a session that sent a message. Returns False when the deadline had passed before the
        message came."""
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
                self._expire_writes(session)
            self._context.timers.at(max(session.deadline, self._context.now + 0.25 * config.lease_s), look)

        config = self._context.config
        self._context.timers.at(session.deadline, look)

    def _expire_writes(self, session: Session) -> None:
        writes = list(session.writes.values())

        def work() -> bool:
            room = PIECE
            while writes and room > 0:
                write = writes.pop()
                room -= len(write.open)
                self._grants.expire(session, write)
            return bool(writes)

        self._context.in_slices(work)

    def _renew_remote_leases(self) -> None:
        """Renew the leases at other nodes, some at a time. Their node ignores a lease that has ended meanwhile."""
        living = [session for session in self._sessions.values() if not session.expired]
        leases = [lease for session in living for lease in session.leases.values() if lease.remote_leases]

        def work() -> bool:
            by_node: dict[NodeId, list[int]] = {}
            room = PIECE
            while leases and room > 0:
                held = leases.pop().remote_leases
                room -= len(held)
                for node, number in held:
                    by_node.setdefault(node, []).append(number)
            for node, numbers in by_node.items():
                for start in range(0, len(numbers), PIECE):
                    self._peers.tell(node, peer.RenewLease(tuple(numbers[start : start + PIECE])))
            return bool(leases)

        self._context.in_slices(work)
        self.start()

    # -- checks

    def pinned(self) -> Iterator[Segment]:
        for session in self._sessions.values():
            yield from session.pins()

    def census(self) -> dict[str, int]:
        sessions = self._sessions.values()
        return {
            "sessions": len(self._sessions),
            "processes": len(self._processes),
            "leases": sum(len(session.leases) for session in sessions),
            "writes": sum(len(session.writes) for session in sessions),
            "slots for what comes": sum(session.coming for session in sessions),
        }

    def check_integrity(self) -> None:
        for session in self._sessions.values():
            assert session.processes, f"session {session.id} has no process"
            session.check_integrity()
        self._grants.check_integrity(self._sessions.values())
        assert +self._by_tenant == Counter(session.tenant for session in self._sessions.values())
