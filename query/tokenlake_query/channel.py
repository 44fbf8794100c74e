"""The socket pair that this process inherits from its daemon: connections come over it. Its end is the daemon's death,
and ends the process at once: what it maps is nobody's any more."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import threading

from tokenlake.errors import TokenLakeError
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

__all__ = ["DaemonChannel", "die_with_parent"]

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


class DaemonChannel:
    """`run` reads in the calling thread, `dial` from any."""

    def __init__(self, descriptor: int) -> None:
        """Takes `descriptor` over."""
        self._sock = socket.socket(fileno=descriptor)
        self._sock.set_inheritable(False)
        self._reader = FrameReader(self._sock)
        self._sending = threading.Lock()

    def read(self) -> tuple[ToQueryEngine, socket.socket | None]:
        """The next message and the connection that came with it. Ends the process with the channel."""
        try:
            message = decode(query_engine_decoder, self._reader.frame())
            if isinstance(message, EngineConnected | PeerConnected | DialSucceeded):
                return message, socket.socket(fileno=self._reader.descriptor())
            return message, None
        except (EOFError, OSError):
            os._exit(0)
        except TokenLakeError:
            log.exception("the daemon is of another version")
            os._exit(1)

    def dial(self, node: str) -> None:
        """Ask for a connection to the query engine of `node`; `read` tells."""
        self.tell(Dial(node))

    def tell(self, message: ToDaemon) -> None:
        """A frame of some bytes: it never waits. Nothing where the daemon is gone, which `read` learns."""
        with self._sending, contextlib.suppress(OSError):
            self._sock.sendall(pack_frame(message))


def die_with_parent() -> None:
    """Where the channel's end would come late: a process that computes for long dies with its daemon all the same."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
