"""Pool: the blocking client that an engine imports."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import DeadlinePassed, LimitReached, TokenLakeError
from tokenlake.identity import LeaseId, SegmentKey, SessionId, TenantId, WriteId
from tokenlake.keys import Prefix, TokenIds, root_key
from tokenlake.layout import Layout
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import join_keys
from tokenlake_client.books import Books
from tokenlake_client.lease import Lease, PendingMatch, Reading
from tokenlake_client.link import Link, open_link
from tokenlake_client.write import Reservation, Write

__all__ = ["Pool"]

log = logging.getLogger(__name__)

RECONNECT_S = 0.2
"""Between two attempts of the heartbeat thread to reach a daemon that is gone."""
MATCH_S = 0.020
RETRY_S = 0.002
STORE_WINDOW = 32
"""Segments that `store_all` has reserved at a time, so that one prompt does not fill the write budget."""


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
        self.expired = 0
        """Times the daemon had given this session up because its heartbeats stayed away."""
        self._credential = credential
        self._process = os.getpid()
        self._closed = threading.Event()
        self._wake = threading.Event()
        """Set when the heartbeat thread has something to do now: connect again, or end."""
        self._books = Books(open_link(socket, layout, credential, session, 0, self._wake))
        self._reading = Reading(self._books, layout, verify)
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
        self._books.sweep()
        return PendingMatch(self._reading, keys, deadline_s)

    def attach(self, lease: LeaseId) -> Lease:
        """Hold a lease that another process of this session made. Its keys are not known here; `hits` is 0 when
        the lease has ended. Raises `Unreachable`."""
        self._books.sweep()
        link = self._link
        reply = link.call(lambda number: engine.Attach(number, lease), engine.Matched)
        return Lease(self._reading, link, [SegmentKey(b"")] * reply.hits, reply)

    # -- writing

    def store(self, keys: Sequence[SegmentKey], first: int = 0, patience: float = 0.0) -> Write:
        """Reserve slots for consecutive segments of one prompt, the first at index `first`; fill and commit
        them. What is there already, or refused, has no slot. `patience`: how many seconds to go on trying
        while only the write budget stands in the way. Raises `Unreachable`."""
        self._books.sweep()
        until = time.monotonic() + patience
        pause = RETRY_S
        packed = join_keys(keys)
        while True:
            link = self._link
            reply = link.call(lambda number: engine.Prepare(number, packed, first), engine.Prepared)
            stuck = not reply.write and Code.WRITE_BUDGET in reply.codes
            if not stuck or time.monotonic() + pause > until:
                return Write(self._books, link, self.layout.shards, keys, reply)
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

    def reserve(self, keys: Sequence[SegmentKey], first: int = 0, *, deadline_s: float | None = None) -> Reservation:
        """Reserve slots, as `store` does, that other processes of this session fill. Raises `Unreachable`."""
        self._books.sweep()
        link, packed = self._link, join_keys(keys)
        reply = link.call(lambda number: engine.Prepare(number, packed, first), engine.Prepared, deadline_s)
        return Reservation(self._books, link, reply)

    def attach_write(self, write: WriteId) -> Write:
        """Fill a write that another process of this session began, each process its own shards. Its keys are not
        known here. Raises `Unreachable`, and `ProtocolRefused` when the write has ended."""
        self._books.sweep()
        link = self._link
        reply = link.call(lambda number: engine.Attach(number, write), engine.Prepared)
        return Write(self._books, link, self.layout.shards, [SegmentKey(b"")] * len(reply.codes), reply)

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
        self._books.sweep()
        channel = self._link.channel
        if not self._books.touching and not channel.broken:
            try:
                channel.tell(engine.Bye())
            except TokenLakeError as error:
                log.debug("no farewell: %s", error)
        channel.close()

    def __del__(self) -> None:
        # Nothing that keeps a slot in use can be alive: arrays and writes hold the pool.
        if hasattr(self, "_reading"):
            self.close()

    @property
    def _link(self) -> Link:
        return self._books.link

    @property
    def verify(self) -> bool:
        """Is every segment's checksum checked when it is read here?"""
        return self._reading.verify

    @property
    def corrupt(self) -> int:
        """Segments whose bytes did not match their checksum on a local read (only with `verify`)."""
        return self._reading.corrupt

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

    def _reconnect(self) -> None:
        """In the heartbeat thread: the same session where it still is, else a new one."""
        for session, resume in ((self.session, self._link.connection), (SessionId(0), 0)):
            try:
                link = open_link(self.socket, self.layout, self._credential, session, resume, self._wake)
            except LimitReached:
                continue
            self._books.use(link)
            if self._closed.is_set():
                link.channel.close()
            log.warning("connected again to the daemon of node %s at %s", self.node, self.socket)
            return

    def _heartbeat(self) -> None:
        """In the heartbeat thread."""
        if self._link.channel.broken:
            self._reconnect()
            return
        self._books.sweep()
        reply = self._link.call(engine.Heartbeat, engine.HeartbeatReply)
        if not reply.alive:
            self.expired += 1
            log.warning("the daemon had given up session %d: its heartbeats stayed away", self.session)


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
