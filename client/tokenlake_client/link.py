"""One connection to one incarnation of a daemon. The client dials, checks that the listener is trusted, and introduces
this process.

A `Link` is a `Channel` (requests and replies over a socket) together with the daemon's `Welcome` and the mapped
regions. A pool has one link at a time and gets another when the connection breaks (`tokenlake_client.heartbeat`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from tokenlake.errors import LayoutRefused, ProtocolRefused, TokenLakeError, Unreachable
from tokenlake.identity import Incarnation, SessionId, TenantId
from tokenlake.keys import probe
from tokenlake.opaque_layout import AnyLayout
from tokenlake.where import HOST
from tokenlake.wire import engine, pack_frame
from tokenlake.wire.slots import SLOT_BYTES
from tokenlake.wire.version import OLDEST_VERSION, PROTOCOL_VERSION
from tokenlake_client.channel import Channel, Pending
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines
from tokenlake_client.dial import dial
from tokenlake_client.mapped_memory import MappedMemory
from tokenlake_client.process_lock import ProcessLock
from tokenlake_client.regions import Mapping, Regions

R = TypeVar("R")

MAX_SECRET_BYTES = 64
"""Limit of the bytes of the tenant's secret: the longest key that blake2b takes."""
ALONE_SHARE = 0.2
"""Share of `Deadlines.call_s` after which a wait without a deadline of its own sends a heartbeat: most replies arrive
earlier."""


class Link:
    """A connection to the daemon, with the mappings of its regions. Leases and writes keep the link that they were
    granted over, so that a slot number is never looked up in the memory of a daemon that started later."""

    def __init__(
        self,
        channel: Channel,
        welcome: engine.Welcome,
        deadlines: Deadlines = DEFAULT_DEADLINES,
        lock: ProcessLock | None = None,
    ) -> None:
        """`lock`: shows the daemon that this process lives; None where the daemon did not ask for one."""
        self.channel = channel
        self.incarnation = Incarnation(welcome.incarnation)
        self.session = SessionId(welcome.session)
        self.connection = welcome.connection
        self.node = welcome.node
        self.tenant = TenantId(welcome.tenant)
        self.secret = welcome.secret
        self.published = welcome.published
        """The names of the models whose segments the daemon publishes to routers."""
        self.heartbeat_s = welcome.heartbeat_s
        self.kept = welcome.kept
        """True: this daemon has the memory of the daemon before, and has to be told what this process holds of it."""
        self._keep_s = welcome.keep_s
        self._ended_at = math.inf
        self.deadlines = deadlines
        self._lock = lock
        self._left: list[weakref.ref[MappedMemory]] = []
        self.regions = self._no_regions()
        channel.max_frame = welcome.max_frame

    @property
    def life(self) -> tuple[Incarnation, SessionId, int]:
        """The daemon's incarnation, the session, and the number of this process in the session. A lease or write is
        valid over links with the `life` of the link that it was granted over: that link and those that resume it."""
        return self.incarnation, self.session, self.connection

    def resumes(self, earlier: Link) -> None:
        """Take over the lock of the link `earlier`, if this link has the same `life`, and its mappings, if this daemon
        has kept the memory. To be called before this link is used."""
        if self.life == earlier.life:
            self._lock = earlier._lock
            self.forget()
            if self.kept:
                self.regions.take(earlier.regions)
                self._left += earlier._left

    @property
    def keeps(self) -> bool:
        """True while the connection has ended, and the mappings are kept for the next daemon, which may go on with the
        memory."""
        if self.channel.broken and self._ended_at == math.inf:
            self._ended_at = time.monotonic()
        return bool(self._keep_s) and time.monotonic() < self._ended_at + self._keep_s

    def tell_held(self, leases: Iterable[tuple[int, int, bytes]], writes: Iterable[tuple[int, bytes]]) -> None:
        """Tell a daemon that has kept its memory, before anything else, what this process holds of it, and wait until
        it knows. `leases`: (lease, number of its items, the place of each, zeros where it is not held); `writes`:
        (write, the slots that may still be filled). Raises `Unreachable`, `DeadlinePassed`."""
        parts = list(_regrants(leases, writes))
        pending = [
            self.channel.begin(functools.partial(engine.Regrant, leases=some, writes=others, last=at == len(parts)))
            for at, (some, others) in enumerate(parts, 1)
        ]
        for each in pending:
            self.expect(self.channel.wait(each, self.deadlines.store_s), engine.Regranted)

    def leave(self) -> None:
        """Drop the mappings, and close the connection. The lock is held until the last mapping with arrays over it is
        gone."""
        self._lock = None
        self.forget()
        self.channel.close()

    def detach(self) -> None:
        """Called after `forget`, when the daemon has ended: copies the bytes under the arrays that still exist into
        private memory at the same addresses, so that the daemon's shared memory is freed."""
        for each in self._left:
            memory = each()
            if memory is not None:
                memory.detach()

    def forget(self) -> None:
        """Drop the mappings of the regions. A mapping with arrays over it lives until the last of these arrays is gone,
        or until `detach`."""
        dropped, self.regions = self.regions, self._no_regions()
        left = [memory for each in self._left if (memory := each()) is not None]
        self._left = [weakref.ref(memory) for memory in [*left, *dropped.memories()]]

    def _no_regions(self) -> Regions:
        # The regions do not refer to the link: in a cycle of references the memory of a dead daemon would stay mapped
        # (and locked, if it was locked for a GPU) until the garbage collector runs.
        return Regions(functools.partial(_open_region, self.channel, self.deadlines, self._lock))

    def call(
        self, make: Callable[[int], engine.EngineRequest], expected: type[R], deadline_s: float | None = None
    ) -> R:
        """Send a request to the daemon and return its reply, checked by `expect_grant`. Waits at most `deadline_s`
        seconds (None: `Deadlines.call_s`), and raises the errors of `Channel.call` and `expect`."""
        return self.expect_grant(self.channel.call(make, self._deadline(deadline_s)), expected)

    def expect_grant(self, reply: engine.EngineReply, expected: type[R]) -> R:
        """As `expect`. The lease or write of a reply that is refused is given back."""
        try:
            return self.expect(reply, expected)
        except ProtocolRefused:
            self.channel.orphans.append(reply)
            raise

    @staticmethod
    def expect(reply: engine.EngineReply, expected: type[R]) -> R:
        """Return `reply` if it is of the type `expected` and its fields are consistent. Raises `ProtocolRefused`
        otherwise."""
        if not isinstance(reply, expected):
            raise ProtocolRefused(f"the daemon answered with {type(reply).__name__}, not {expected.__name__}")
        if not _consistent(reply):
            raise ProtocolRefused(f"the fields of a {expected.__name__} contradict each other")
        return reply

    def wait(self, pending: Pending, deadline_s: float | None = None) -> engine.EngineReply:
        """Wait for the daemon's reply to `pending` for at most `deadline_s` seconds (None: `Deadlines.call_s`), and
        return it. Raises the errors of `Channel.wait`."""
        return self.channel.wait(pending, self._deadline(deadline_s))

    def wait_while_alive(self, pending: Pending) -> engine.EngineReply:
        """Wait for the reply to a request whose deadline only the daemon knows, for as long as the daemon answers
        heartbeats. Raises `DeadlinePassed` when it has answered neither for `Deadlines.call_s`, and the errors of
        `Channel.call`."""
        alone_s = ALONE_SHARE * self.deadlines.call_s
        while True:
            reply = self.channel.poll(pending, alone_s)
            if reply is not None:
                return reply
            try:
                self.call(engine.Heartbeat, engine.HeartbeatReply, self.deadlines.call_s - alone_s)
            except TokenLakeError:
                self.channel.drop(pending)
                raise

    def _deadline(self, deadline_s: float | None) -> float:
        return self.deadlines.call_s if deadline_s is None else deadline_s


def _regrants(
    leases: Iterable[tuple[int, int, bytes]], writes: Iterable[tuple[int, bytes]]
) -> Iterator[tuple[tuple[tuple[int, int, int, bytes], ...], tuple[tuple[int, bytes], ...]]]:
    """Yield leases and writes in parts, each of which one `Regrant` may name; at least one part."""
    room, some, others = engine.MAX_REGRANTED, list[tuple[int, int, int, bytes]](), list[tuple[int, bytes]]()
    for lease, items, places in leases:
        at = 0
        while at < items:
            stop = min(items, at + room)
            some.append((lease, items, at, places[at * SLOT_BYTES : stop * SLOT_BYTES]))
            room -= stop - at
            at = stop
            if not room:
                yield tuple(some), ()
                room, some = engine.MAX_REGRANTED, []
    for write, slots in writes:
        count = len(slots) // SLOT_BYTES
        if count > room:
            yield tuple(some), tuple(others)
            room, some, others = engine.MAX_REGRANTED, [], []
        others.append((write, slots))
        room -= count
    yield tuple(some), tuple(others)


def _open_region(channel: Channel, deadlines: Deadlines, lock: ProcessLock | None, region: int, write: bool) -> Mapping:
    pending = channel.begin(lambda number: engine.OpenRegion(number, region, write))
    reply = Link.expect(channel.wait(pending, deadlines.store_s if write else deadlines.call_s), engine.Region)
    if pending.descriptor is None:
        raise ProtocolRefused(f"the daemon sent no descriptor of region {region}")
    if reply.where != HOST:
        os.close(pending.descriptor)
        raise ProtocolRefused(f"region {region} is at {reply.where}; this client opens regions at {HOST} alone")
    try:
        return Mapping(pending.descriptor, reply.region_bytes, reply.slot_bytes, write=write, lock=lock)
    except (OSError, OverflowError, ValueError) as error:
        raise ProtocolRefused(f"the descriptor of region {region} cannot be mapped: {error}") from error


def _consistent(reply: engine.EngineReply) -> bool:
    """True if the lengths of the reply's fields are consistent. Without this check its readers could allocate memory
    for any number of hits, or look up slots that the reply does not have."""
    match reply:
        case engine.Matched():
            return reply.hits * SLOT_BYTES == len(reply.slots) <= len(reply.codes) * SLOT_BYTES
        case engine.Fetched() | engine.Prepared():
            return len(reply.slots) == len(reply.codes) * SLOT_BYTES
        case engine.Welcome():
            return len(reply.secret) <= MAX_SECRET_BYTES
    return True


@dataclass(frozen=True)
class Connector:
    """Opens the links of one pool."""

    path: Path | None
    """The path of the daemon's socket; None: the first default path at which a daemon listens."""
    daemon_uid: int | None
    """The user id that the daemon runs as, where that is neither root nor this process's user."""
    layout: AnyLayout
    credential: str | None
    on_end: Callable[[], None]
    """Function that is called when the connection to the daemon breaks."""
    deadlines: Deadlines = DEFAULT_DEADLINES

    def connect(self, session: SessionId, resume: int = 0, incarnation: int = 0) -> Link:
        """Dial the daemon and introduce this process. `session`: the session to join; 0 opens a new one. `resume`: the
        `Link.connection` of a broken link whose leases and writes should stay valid, or 0. `incarnation`: that of the
        daemon that assigned these two numbers; 0: unknown.

        Raises `Unreachable`, `ListenerUntrusted`, `LayoutRefused`, `CredentialRefused`, `ProtocolRefused`,
        `LimitReached`.
        """
        sock, path = dial(self.path, self.daemon_uid, self.deadlines.dial_s)
        channel = Channel(sock, path, self.on_end)
        try:
            pending = channel.begin(self._hello(session, resume, incarnation))
            welcome = Link.expect(channel.wait(pending, self.deadlines.connect_s), engine.Welcome)
            lock = None if pending.descriptor is None else ProcessLock(pending.descriptor)
            if not OLDEST_VERSION <= welcome.version <= PROTOCOL_VERSION:
                raise ProtocolRefused(f"the daemon chose protocol version {welcome.version}, which was not offered")
            if welcome.probe != probe(welcome.secret, self.layout.fingerprint()):
                raise ProtocolRefused(
                    "the daemon's probe hash differs: client and daemon hash the same prefix to different keys; "
                    "install the same version of tokenlake on both"
                )
        except TokenLakeError as error:
            self._leave(channel, error)
            raise
        except OSError as error:
            refused = ProtocolRefused(f"this process cannot lock the daemon's file: {error}")
            self._leave(channel, refused)
            raise refused from error
        return Link(channel, welcome, self.deadlines, lock)

    def _hello(self, session: SessionId, resume: int, incarnation: int) -> Callable[[int], engine.Hello]:
        oldest, newest, layout = OLDEST_VERSION, PROTOCOL_VERSION, self.layout.encode()
        proof = probe(engine.PROBE_SECRET, self.layout.fingerprint())
        return lambda number: engine.Hello(
            number, oldest, newest, layout, proof, self.credential, session, resume, incarnation
        )

    @staticmethod
    def _leave(channel: Channel, error: TokenLakeError) -> None:
        """Close the connection, and tell a daemon that has answered why."""
        if not isinstance(error, Unreachable):
            with contextlib.suppress(TokenLakeError):
                channel.tell(engine.Bye(str(error)[: engine.MAX_REASON]))
        channel.close()


def decline(path: Path | None, daemon_uid: int | None, reason: str) -> NoReturn:
    """Tell the daemon why this engine goes without the pool. `path`, `daemon_uid`: as of `Connector`. Raises
    `Unreachable` where no daemon can be told, else `LayoutRefused` with the reason."""
    sock, place = dial(path, daemon_uid, DEFAULT_DEADLINES.dial_s)
    try:
        with sock:
            sock.sendall(pack_frame(engine.Bye(reason[: engine.MAX_REASON])))
    except OSError as error:
        raise Unreachable(f"{place}: {error}") from error
    raise LayoutRefused(reason)
