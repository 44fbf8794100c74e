"""The one thread of a pool: it sends heartbeats to the daemon, and connects again when the connection has broken.

The thread refers to the pool's `Grants` and not to the pool, so that a pool that no code uses can be collected. It ends
when the pool is closed, or when the pool and all its leases, writes and arrays are collected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import weakref

from tokenlake.errors import DeadlinePassed, ListenerUntrusted, Refused, TokenLakeError, Unreachable
from tokenlake.identity import SessionId
from tokenlake.wire import engine
from tokenlake_client.arguments import poll_ms
from tokenlake_client.channel import Channel
from tokenlake_client.grants import Grants
from tokenlake_client.link import Connector, Link

log = logging.getLogger(__name__)

RECONNECT_S = 0.2
"""Seconds between two attempts to reach a daemon that does not listen."""
COLLECT_S, LONGEST_COLLECT_S = 0.05, 0.5
"""Seconds between two checks, after the pool was closed or garbage-collected, whether its arrays are collected too: at
first, and at most; each time is twice the one before."""


class Wake:
    """Wakes the heartbeat thread. The object may be called at any time, also by the garbage collector while the thread
    is in `wait`."""

    def __init__(self) -> None:
        try:
            self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise Unreachable(f"this process cannot open a descriptor: {error}") from error

    def __call__(self) -> None:
        os.eventfd_write(self._event, 1)

    def wait(self, limit_s: float, channel: Channel) -> None:
        """Wait until the object is called or the daemon has closed `channel`, at most `limit_s`. An idle engine notices
        the end of its daemon at once. Bytes that wait to be sent end the wait too, once the daemon reads."""
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        with contextlib.suppress(ValueError):
            # The socket is closed, and has no number, once the channel is broken.
            poller.register(channel, select.POLLRDHUP | (select.POLLOUT if channel.unsent else 0))
        poller.poll(poll_ms(limit_s))
        channel.flush()

    def forget(self) -> None:
        """Discard the wake-ups until now, so that they do not end the next `wait`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            os.close(self._event)


class HeartbeatThread(threading.Thread):
    """Sends heartbeats, and reconnects, while `keeper` is alive: the object to which the pool and all its leases,
    writes and arrays refer."""

    def __init__(self, grants: Grants, connector: Connector, wake: Wake, keeper: object) -> None:
        """`wake`: ends the thread's pauses; `connector` must call it when the connection breaks."""
        super().__init__(name="tokenlake", daemon=True)
        self.expired = 0
        """The number of times that the daemon had ended the pool's session because no heartbeat had arrived in time."""
        self._grants = grants
        self._connector = connector
        self._wake = wake
        self._untrusted = ""
        """The last warning about a listener that is not trusted. Each such text is logged as a warning once."""
        self._keeper = weakref.ref(keeper, lambda _: wake())

    def wake(self) -> None:
        """End the pause of the thread, because the pool was closed."""
        self._wake()

    def run(self) -> None:
        """Send heartbeats and reconnect until the pool has left: it is closed or collected, and so are its arrays."""
        collect_s, beat_at = COLLECT_S, 0.0
        while not self._grants.left:
            if self._keeper() is None and self._grants.close_unless_pinned():
                return
            ends = self._grants.closed or self._keeper() is None
            if ends and (self._grants.leave_if_free() or self._grants.leaving or time.monotonic() < beat_at):
                self._wake.wait(collect_s, self._grants.link.channel)
                self._wake.forget()
                collect_s = min(2 * collect_s, LONGEST_COLLECT_S)
                continue
            try:
                self._beat()
                beat_at = time.monotonic() + self._grants.link.heartbeat_s
            except DeadlinePassed as error:
                log.debug("heartbeat: %s", error)
            except TokenLakeError as error:
                # A listener that is not trusted is logged as a warning, because an administrator may have to act. All
                # other errors end by themselves when the daemon is back.
                first = isinstance(error, ListenerUntrusted) and str(error) != self._untrusted
                self._untrusted = str(error) if first else self._untrusted
                log.log(logging.WARNING if first else logging.DEBUG, "no connection: %s", error)
            except Exception:
                # Without this thread the pool would never reconnect.
                log.exception("the heartbeat failed and is repeated")
            link = self._grants.link
            if link.channel.broken and not self._grants.left:
                if not link.keeps:
                    # The next daemon may need the memory that this process maps of the last one.
                    link.forget()
                beat_at = 0.0
                time.sleep(RECONNECT_S)
            elif not ends:
                self._wake.wait(link.heartbeat_s, link.channel)
            self._wake.forget()

    def _beat(self) -> None:
        link = self._grants.link
        if link.channel.broken:
            self._reconnect(link)
            return
        if link.channel.overdue:
            link.channel.probe(engine.Heartbeat, link.deadlines.call_s)
        self._grants.sweep()
        reply = link.call(engine.Heartbeat, engine.HeartbeatReply)
        if not reply.alive:
            self.expired += 1
            log.warning("the daemon ended session %d: its heartbeats did not arrive in time", link.session)

    def _reconnect(self, previous: Link) -> None:
        """Open a new connection to the daemon: it resumes the session of the link `previous` where the daemon still has
        it, or has the memory of the daemon before, else it begins a new session."""
        try:
            link = self._connector.connect(previous.session, previous.connection, previous.incarnation)
            link.resumes(previous)
        except Refused as error:
            log.debug("session %d cannot be resumed: %s", previous.session, error)
            link = self._connector.connect(SessionId(0))
        except Unreachable:
            if not (previous.keeps and self._grants.accesses):
                # A closed pool asks the next daemon for nothing.
                self._grants.leave_if_free(lost=True)
            if not previous.keeps:
                previous.forget()
                previous.detach()
            raise
        try:
            self._grants.switch_to(link)
        except TokenLakeError:
            link.channel.close()
            raise
        if link.life != previous.life:
            previous.detach()
        log.warning("connected again to the daemon of node %s at %s", link.node, link.channel.path)
