"""Heartbeats, and the way back to a daemon that went away: a thread per pool.

The thread refers to the books alone. It ends when the pool was closed, or when nobody has the pool, a lease, a write
or an array of it any more.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from typing import Protocol

from tokenlake.errors import DeadlinePassed, ListenerUntrusted, Refused, TokenLakeError
from tokenlake.identity import SessionId
from tokenlake.wire import engine
from tokenlake_client.books import Books
from tokenlake_client.link import LOCAL_S, Link

__all__ = ["Heart", "Wake"]

log = logging.getLogger(__name__)

RECONNECT_S = 0.2
"""Between two attempts to reach a daemon that is gone."""
LINGER_S = 0.05
"""Between two looks at arrays that are being collected together with their pool."""


class Connect(Protocol):
    """`open_link` for this pool."""

    def __call__(self, session: SessionId, resume: int = 0, incarnation: int = 0) -> Link: ...


class Wake:
    """Ends a wait of the thread. May be called by the garbage collector in the middle of anything, `wait` included."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self) -> None:
        self._queue.put(None)

    def wait(self, limit_s: float) -> None:
        """Until somebody calls, or `limit_s` passed."""
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=limit_s)

    def forget(self) -> None:
        """Calls until now end no wait."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()


class Heart(threading.Thread):
    """Beats while `keeper` lives: what the pool and everything handed out over it refer to."""

    def __init__(self, books: Books, connect: Connect, wake: Wake, keeper: object) -> None:
        super().__init__(name="tokenlake", daemon=True)
        self.expired = 0
        """Times the daemon had given the session up."""
        self._books = books
        self._connect = connect
        self._wake = wake
        self._untrusted = ""
        """What was said of a listener that is not trusted."""
        self._keeper = weakref.ref(keeper, lambda _: wake())

    def run(self) -> None:
        """Until the pool is closed or collected."""
        while not self._books.closed:
            if self._keeper() is None and self._books.finish():
                return
            try:
                self._beat()
            except DeadlinePassed as error:
                log.debug("heartbeat: %s", error)
            except TokenLakeError as error:
                # Everything else is over when the daemon is back; this may have to be mended.
                first = isinstance(error, ListenerUntrusted) and str(error) != self._untrusted
                self._untrusted = str(error) if first else self._untrusted
                log.log(logging.WARNING if first else logging.DEBUG, "no connection: %s", error)
            link = self._books.link
            if link.channel.broken and not self._books.closed:
                time.sleep(RECONNECT_S)
            else:
                self._wake.wait(link.heartbeat_s if self._keeper() is not None else LINGER_S)
            self._wake.forget()

    def _beat(self) -> None:
        link = self._books.link
        if link.channel.broken:
            self._reconnect(link)
            return
        if link.channel.overdue:
            link.channel.probe(engine.Heartbeat, LOCAL_S)
        self._books.sweep()
        reply = link.call(engine.Heartbeat, engine.HeartbeatReply)
        if not reply.alive:
            self.expired += 1
            log.warning("the daemon had given up session %d: its heartbeats stayed away", link.session)

    def _reconnect(self, former: Link) -> None:
        """To the same session where it still is, else to a new one."""
        try:
            link = self._connect(former.session, former.connection, former.incarnation)
        except Refused as error:
            log.debug("session %d is not to be had again: %s", former.session, error)
            link = self._connect(SessionId(0))
        self._books.use(link)
        log.warning("connected again to the daemon of node %s at %s", link.node, link.channel.path)
