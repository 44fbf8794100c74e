"""The channel: a socket pair that this process inherits from its daemon, which passes connections over it.

The channel ends when the daemon dies. This process then exits at once, because no daemon owns the arena that it maps.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import threading

from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.wire import pack_frame
from tokenlake.wire.frames import decode
from tokenlake.wire.supervision import (
    Dial,
    DialSucceeded,
    EngineConnected,
    PeerConnected,
    ToDaemon,
    ToQueryEngine,
    query_engine_decoder,
)
from tokenlake_query.connection import FrameReader

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


class DaemonChannel:
    """The socket pair between the query engine and its daemon, over which the daemon passes connections. `read` is for
    one thread; `send` and `dial` are thread-safe."""

    def __init__(self, descriptor: int) -> None:
        """Takes `descriptor` over."""
        self._sock = socket.socket(fileno=descriptor)
        self._sock.set_inheritable(False)
        self._reader = FrameReader(self._sock)
        self._sending = threading.Lock()

    def read(self) -> tuple[ToQueryEngine, socket.socket | None]:
        """Block until the daemon sends a message; returns (message, connection sent with it, or None without one: this
        process may have no descriptor left for it). Exits the process with status 0 when the channel has ended, and 1
        after a message that cannot be decoded."""
        try:
            message = decode(query_engine_decoder, self._reader.frame())
            if not isinstance(message, EngineConnected | PeerConnected | DialSucceeded):
                return message, None
            with contextlib.suppress(ProtocolRefused):
                return message, socket.socket(fileno=self._reader.descriptor())
            return message, None
        except (EOFError, OSError):
            os._exit(0)
        except TokenLakeError:
            log.exception("the daemon sent a message that this version does not know")
            os._exit(1)

    def dial(self, node: str, tenant: str) -> None:
        """Ask the daemon for a connection to the query engine of `node`, for the queries of `tenant`. A later `read`
        returns the answer, `DialSucceeded` or `DialFailed`."""
        self.send(Dial(node, tenant))

    def send(self, message: ToDaemon) -> None:
        """Send one frame, so small that it does not block. An error is ignored: it means that the daemon is dead, and
        then `read` exits the process."""
        with self._sending, contextlib.suppress(OSError):
            self._sock.sendall(pack_frame(message))


def die_with_parent() -> None:
    """Let the kernel kill this process when the daemon dies, also while no thread reads the channel."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
