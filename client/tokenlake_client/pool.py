"""Pool: the blocking client that an engine imports."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import DeadlinePassed, LimitReached, ProtocolRefused, TokenLakeError, Unreachable
from tokenlake.identity import LeaseId, SegmentKey, SessionId, TenantId, WriteId
from tokenlake.keys import Prefix, TokenIds, probe, root_key
from tokenlake.layout import Layout
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import join_keys
from tokenlake.wire.version import OLDEST_VERSION, PROTOCOL_VERSION
from tokenlake_client.channel import Channel, Pending
from tokenlake_client.lease import Lease, PendingMatch
from tokenlake_client.regions import Mapping as Mapped
from tokenlake_client.regions import Regions
from tokenlake_client.write import Reservation, Write

__all__ = ["Pool"]

log = logging.getLogger(__name__)
R = TypeVar("R")

CONNECT_S = 5.0
RECONNECT_S = 0.2
"""Between two attempts of the heartbeat thread to reach a daemon that is gone."""
MATCH_S = 0.020
GRACE_S = 0.030
"""The daemon keeps its deadlines; this much later we stop waiting for it to say so."""
LOCAL_S = 0.250
"""For calls that the daemon answers from its own memory."""
RETRY_S = 0.002
STORE_WINDOW = 32
"""Segments that `store_all` has reserved at a time, so that one prompt does not fill the write budget."""


class Link:
    """One connection to one life of a daemon. Leases and writes keep theirs, so that a slot number is never looked
    up in the memory of a daemon that started later."""

    def __init__(self, channel: Channel, welcome: engine.Welcome) -> None:
        self.channel = channel
        self.incarnation = welcome.incarnation
        self.session = SessionId(welcome.session)
        self.connection = welcome.connection
        self.node = welcome.node
        self.tenant = TenantId(welcome.tenant)
        self.secret = welcome.secret
        self.heartbeat_s = welcome.heartbeat_s
        self.regions = Regions(self._open_region)

    def call(self, make: Callable[[int], engine.EngineRequest], deadline_s: float, expected: type[R]) -> R:
        """As `Channel.call`, for a reply of one kind."""
        reply = self.channel.call(make, deadline_s)
        if not isinstance(reply, expected):
            raise ProtocolRefused(f"the daemon answered with {type(reply).__name__}, not {expected.__name__}")
        return reply

    def _open_region(self, region: int, write: bool) -> Mapped:
        channel = self.channel
        pending = channel.begin(lambda number: engine.OpenRegion(number, region, write))
        reply = channel.wait(pending, LOCAL_S)
        if not isinstance(reply, engine.Region) or pending.descriptor is None:
            raise ProtocolRefused(f"the daemon answered OpenRegion with {type(reply).__name__}")
        return Mapped(pending.descriptor, reply.region_bytes, reply.slot_bytes, write=write)


class Pool:
    """One process of a session at its node's daemon. Usable from several threads.

    A daemon that dies is reconnected to in the background; until then calls raise `Unreachable` at once, and
    what was leased is gone (arrays handed out stay readable and right). A daemon that freezes costs one
    deadline; further calls raise `DeadlinePassed` at once until it answers.
    """

    def __init__(self, socket: Path, layout: Layout, credential: str | None, session: SessionId, verify: bool) -> None:
        """Use `connect`."""
        layout.check()
        self.socket = socket
        self.layout = layout
        self.verify = verify
        self.corrupt = 0
        """Segments whose bytes did not match their checksum on a local read (only with `verify`)."""
        self.expired = 0
        """Times the daemon had given this session up because its heartbeats stayed away."""
        self._credential = credential
        self._books = threading.RLock()
        """Guards leases' looks, the link, and what is to be given back."""
        self._ended_looks: deque[tuple[Lease, int]] = deque()
        self._releases: list[tuple[int, int, int]] = []
        self._aborts: list[int] = []
        self._looking = 0
        self._writing = 0
        """Writes whose slots somebody may still fill."""
        self._process = os.getpid()
        self._closed = threading.Event()
        self._wake = threading.Event()
        """Set when the heartbeat thread has something to do now: connect again, or end."""
        self._connect(session, resume=0)
        self._heart = threading.Thread(target=_beat, args=(weakref.ref(self),), name="tokenlake", daemon=True)
        self._heart.start()

    @classmethod
    def connect(
        cls,
        socket: str | Path,
        layout: Layout,
        credential: str | None = None,
        *,
        session: SessionId | None = None,
        verify: bool = False,
    ) -> Pool:
        """Join the daemon at `socket`.

        `credential`: a token of the tenant; without one the daemon goes by uid. `session`: join an engine's
        session that another process opened. `verify`: check every segment's checksum when it is read here.

        Raises `Unreachable`, `LayoutRefused`, `CredentialRefused`, `ProtocolRefused`, `LimitReached`.
        """
        return cls(Path(socket), layout, credential, session or SessionId(0), verify)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- keys

    def prefix(
        self,
        tokens: TokenIds = (),
        *,
        adapter: str | None = None,
        salt: str | None = None,
        extras: Mapping[int, Sequence[bytes]] | None = None,
    ) -> Prefix:
        """The key chain of a prompt: hash it once, `extend` it later. `adapter`, `salt` and `extras` (digests
        of what the tokens do not say, by segment) change all keys from there on."""
        chain = Prefix(
            root_key(self._link.secret, self.layout.fingerprint(), adapter, salt), self.layout.segment_tokens, extras
        )
        chain.extend(tokens)
        return chain

    # -- reading

    def match(self, keys: Sequence[SegmentKey], *, deadline_s: float = MATCH_S) -> Lease:
        """Lease the longest prefix of `keys` that the pool has; `hits` may be 0. Other nodes are asked for at
        most `deadline_s`. Raises `Unreachable`."""
        return self.begin_match(keys, deadline_s=deadline_s).wait()

    def begin_match(self, keys: Sequence[SegmentKey], *, deadline_s: float = MATCH_S) -> PendingMatch:
        """The same without waiting: `poll` the result. Raises `Unreachable`."""
        self._sweep()
        return PendingMatch(self, keys, deadline_s)

    def attach(self, lease: LeaseId) -> Lease:
        """Hold a lease that another process of this session made. Its keys are not known here; `hits` is 0 when
        the lease has ended. Raises `Unreachable`."""
        self._sweep()
        link = self._link
        reply = link.call(lambda number: engine.Attach(number, lease), LOCAL_S, engine.Matched)
        return Lease(self, link, [SegmentKey(b"")] * reply.hits, reply)

    # -- writing

    def store(self, keys: Sequence[SegmentKey], first: int = 0, patience: float = 0.0) -> Write:
        """Reserve slots for consecutive segments of one prompt, the first at index `first`; fill and commit
        them. What is there already, or refused, has no slot. `patience`: how many seconds to go on trying
        while only the write budget stands in the way. Raises `Unreachable`."""
        self._sweep()
        until = time.monotonic() + patience
        pause = RETRY_S
        packed = join_keys(keys)
        while True:
            link = self._link
            reply = link.call(lambda number: engine.Prepare(number, packed, first), LOCAL_S, engine.Prepared)
            stuck = not reply.write and Code.WRITE_BUDGET in reply.codes
            if not stuck or time.monotonic() + pause > until:
                return self._write(link, keys, reply)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def store_all(
        self,
        keys: Sequence[SegmentKey],
        fill: Callable[[int, NDArray[np.uint8]], None],
        first: int = 0,
        patience: float = 0.0,
    ) -> bytes:
        """Store consecutive segments a window at a time; one `Code` per key.

        `fill(index into keys, array)` writes a segment into its slot. Where the write budget is full, goes on
        trying for at most `patience` seconds without progress. Raises `Unreachable`, and what `fill` raises.
        """
        codes = bytearray()
        while len(codes) < len(keys):
            start = len(codes)
            with self.store(keys[start : start + STORE_WINDOW], first + start, patience) as write:
                for index, array in write.slots:
                    fill(start + index, array)
            done = len(write.codes)
            if Code.COMMITTED in write.codes and Code.WRITE_BUDGET in write.codes:
                # Some of the window went through: the rest is tried again, with its own patience.
                done = write.codes.index(Code.WRITE_BUDGET)
            codes += write.codes[:done]
        return bytes(codes)

    def reserve(self, keys: Sequence[SegmentKey], first: int = 0, *, deadline_s: float = LOCAL_S) -> Reservation:
        """Reserve slots, as `store` does, that other processes of this session fill. Raises `Unreachable`."""
        self._sweep()
        link, packed = self._link, join_keys(keys)
        reply = link.call(lambda number: engine.Prepare(number, packed, first), deadline_s, engine.Prepared)
        return Reservation(self, link, reply)

    def attach_write(self, write: WriteId) -> Write:
        """Fill a write that another process of this session began, each process its own shards. Its keys are not
        known here. Raises `Unreachable`, and `ProtocolRefused` when the write has ended."""
        self._sweep()
        link = self._link
        reply = link.call(lambda number: engine.Attach(number, write), LOCAL_S, engine.Prepared)
        return self._write(link, [SegmentKey(b"")] * len(reply.codes), reply)

    # -- life

    def close(self) -> None:
        """Leave the session. Idempotent. Arrays still alive stay readable, and so do the slots of a write that was
        neither committed nor aborted; what they lie in is quarantined until this process ends."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        if self._process != os.getpid():
            # The session is the parent's: a forked child has nothing to say in it.
            return
        self._sweep()
        with self._books:
            channel, touching = self._link.channel, self._looking + self._writing
        if not touching and not channel.broken:
            try:
                channel.tell(engine.Bye())
            except TokenLakeError as error:
                log.debug("no farewell: %s", error)
        channel.close()

    def __del__(self) -> None:
        # Nothing that keeps a slot in use can be alive: arrays and writes hold the pool.
        if hasattr(self, "_link"):
            self.close()

    @property
    def connected(self) -> bool:
        """Is there a connection to the daemon, as far as anybody noticed?"""
        return not self._link.channel.broken

    @property
    def timeouts(self) -> int:
        """Calls on the current connection that waited for their whole deadline in vain."""
        return self._link.channel.timeouts

    @property
    def node(self) -> str:
        """The daemon's."""
        return self._link.node

    @property
    def tenant(self) -> TenantId:
        """What the credential stands for."""
        return self._link.tenant

    @property
    def session(self) -> SessionId:
        """For `connect` in another process of this engine. Another one after the daemon restarted."""
        return self._link.session

    @property
    def incarnation(self) -> int:
        """Of the daemon: another one after each of its starts."""
        return self._link.incarnation

    def _connect(self, session: SessionId, resume: int) -> None:
        """Open a channel and say hello. Raises as `connect` does; nothing is changed then."""
        channel = Channel(self.socket, self._wake)
        try:
            welcome = channel.call(
                lambda number: engine.Hello(
                    number,
                    OLDEST_VERSION,
                    PROTOCOL_VERSION,
                    self.layout.encode(),
                    probe(engine.PROBE_SECRET, self.layout.fingerprint()),
                    self._credential,
                    session,
                    resume,
                ),
                CONNECT_S,
            )
            if not isinstance(welcome, engine.Welcome):
                raise ProtocolRefused(f"the daemon answered Hello with {type(welcome).__name__}")
            if welcome.probe != probe(welcome.secret, self.layout.fingerprint()):
                raise ProtocolRefused(
                    "the daemon's probe hash is another one: both sides hash the same prefix to different keys; "
                    "install the same version of tokenlake on both"
                )
        except TokenLakeError:
            channel.close()
            raise
        channel.max_frame = welcome.max_frame
        link = Link(channel, welcome)
        with self._books:
            former = getattr(self, "_link", None)
            if former is None or former.incarnation != link.incarnation:
                # What the former daemon granted lies in memory that is nobody's any more.
                self._releases.clear()
                self._aborts.clear()
                self._looking = self._writing = 0
            self._link = link
            if self._closed.is_set():
                channel.close()

    def _reconnect(self) -> None:
        """In the heartbeat thread: the same session where it still is, else a new one."""
        for session, resume in ((self.session, self._link.connection), (SessionId(0), 0)):
            try:
                self._connect(session, resume)
            except LimitReached:
                continue
            log.warning("connected again to the daemon of node %s at %s", self.node, self.socket)
            return

    # -- what Lease, PendingMatch and Write need

    def _begin_match(self, keys: Sequence[SegmentKey], deadline_s: float) -> tuple[Link, Pending]:
        packed = join_keys(keys)
        link = self._link
        return link, link.channel.begin(lambda number: engine.Match(number, packed, deadline_s))

    @staticmethod
    def _patience(deadline_s: float) -> float:
        return deadline_s + GRACE_S

    def _lease(self, link: Link, keys: Sequence[SegmentKey], reply: engine.EngineReply) -> Lease:
        if not isinstance(reply, engine.Matched):
            raise ProtocolRefused(f"the daemon answered a match with {type(reply).__name__}")
        return Lease(self, link, keys, reply)

    def _fetch(self, lease: Lease, start: int, stop: int, deadline_s: float) -> engine.Fetched:
        self._sweep()
        link = self._same_life(lease._link)
        pending = link.channel.begin(lambda number: engine.Fetch(number, lease.id, start, stop, deadline_s))
        if deadline_s:
            reply = link.channel.wait(pending, self._patience(deadline_s))
        else:
            reply = self._wait_while_alive(link, pending)
        if not isinstance(reply, engine.Fetched):
            raise ProtocolRefused(f"the daemon answered a fetch with {type(reply).__name__}")
        return reply

    @staticmethod
    def _wait_while_alive(link: Link, pending: Pending) -> engine.EngineReply:
        """For a deadline that only the daemon knows: wait for as long as it answers heartbeats."""
        while True:
            reply = link.channel.poll(pending, LOCAL_S)
            if reply is not None:
                return reply
            try:
                link.call(engine.Heartbeat, LOCAL_S, engine.HeartbeatReply)
            except TokenLakeError:
                link.channel.drop(pending)
                raise

    def _same_life(self, link: Link) -> Link:
        """The link to use for what was granted over `link`."""
        current = self._link
        if link.incarnation != current.incarnation:
            raise Unreachable("the daemon restarted; what was leased there is gone")
        return current

    def _write(self, link: Link, keys: Sequence[SegmentKey], reply: engine.Prepared) -> Write:
        try:
            return Write(self, link, keys, reply)
        except BaseException:
            # The slots could not be mapped here: nobody will fill them.
            self._abort(link, reply.write)
            raise

    def _count_writing(self, link: Link, change: int) -> None:
        with self._books:
            if link.incarnation == self._link.incarnation:
                self._writing += change

    def _commit(self, write: Write, indices: tuple[int, ...], mask: int, checksums: bytes) -> bytes:
        link = self._link
        if write._link.incarnation != link.incarnation:
            return bytes([Code.EXPIRED]) * len(indices)
        try:
            reply = link.call(
                lambda number: engine.Commit(number, write.id, indices, mask, checksums), LOCAL_S, engine.Committed
            )
        except TokenLakeError:
            # Whether it arrived or not: what it did not publish is given back.
            self._abort(write._link, write.id)
            raise
        return reply.codes

    def _abort(self, link: Link, write: int) -> None:
        with self._books:
            if write and link.incarnation == self._link.incarnation:
                self._aborts.append(write)
        self._sweep()

    # -- giving back

    def _give_back(self, lease: Lease, indices: Sequence[int]) -> None:
        """Under `_books`: these are looked at by nobody."""
        if lease.id and lease._link.incarnation == self._link.incarnation:
            self._releases += [(lease.id, start, stop) for start, stop in _ranges(indices)]

    def _sweep(self) -> None:
        """Tell the daemon what is no longer looked at or filled. Never waits, never raises."""
        with self._books:
            ended: dict[int, tuple[Lease, list[int]]] = {}
            while self._ended_looks:
                lease, index = self._ended_looks.popleft()
                if lease._link.incarnation == self._link.incarnation:
                    self._looking -= 1
                if lease._settle(index):
                    ended.setdefault(id(lease), (lease, []))[1].append(index)
            for lease, indices in ended.values():
                self._give_back(lease, sorted(indices))
            orphans = self._link.channel.orphans
            while orphans:
                self._disown(orphans.popleft())
            try:
                while self._aborts:
                    self._link.channel.tell(engine.Abort(self._aborts[-1]))
                    self._aborts.pop()
                if self._releases:
                    self._link.channel.tell(engine.Release(tuple(self._releases)))
                    self._releases.clear()
            except TokenLakeError as error:
                log.debug("not given back yet: %s", error)

    def _disown(self, reply: engine.EngineReply) -> None:
        """Under `_books`: a reply that nobody waits for granted this."""
        if isinstance(reply, engine.Matched) and reply.lease:
            self._releases.append((reply.lease, 0, reply.hits))
        elif isinstance(reply, engine.Prepared) and reply.write:
            self._aborts.append(reply.write)

    def _heartbeat(self) -> None:
        """In the heartbeat thread."""
        if self._link.channel.broken:
            self._reconnect()
            return
        self._sweep()
        reply = self._link.call(engine.Heartbeat, LOCAL_S, engine.HeartbeatReply)
        if not reply.alive:
            self.expired += 1
            log.warning("the daemon had given up session %d: its heartbeats stayed away", self.session)


def _ranges(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges


def _beat(reference: weakref.ref[Pool]) -> None:
    """Heartbeats until the pool is closed or collected. Holds no reference to it while it waits."""
    while True:
        pool = reference()
        if pool is None or pool._closed.is_set():
            return
        try:
            pool._heartbeat()
        except DeadlinePassed as error:
            log.debug("heartbeat: %s", error)
        except TokenLakeError as error:
            log.debug("no connection: %s", error)
        broken, pause = pool._link.channel.broken, pool._link.heartbeat_s
        closed, wake = pool._closed, pool._wake
        del pool
        if broken:
            closed.wait(RECONNECT_S)
        else:
            wake.wait(pause)
        wake.clear()
