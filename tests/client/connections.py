"""Pools whose connection a test breaks, and links whose daemon is the test."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.robustness.live import LAYOUT, PATIENT, PATIENT_S, Prompt, store, wait_until
from tests.robustness.matrix.proxy import Proxy
from tokenlake.errors import Unreachable
from tokenlake.identity import SessionId
from tokenlake.wire import FrameDecoder, engine, pack_frame
from tokenlake_client import Pool
from tokenlake_client.channel import Channel
from tokenlake_client.link import Link
from tokenlake_testing.cluster import Cluster, Node

MAX_FRAME = 1 << 20


def answers(pool: Pool) -> bool:
    """Does the daemon answer a match?"""
    try:
        pool.match([], deadline_s=PATIENT_S).release()
    except Unreachable:
        return False
    return True


def refill(pool: Pool, seed: int = 5) -> None:
    """Write more than the arena holds, so that every segment that may be evicted is."""
    for number in range(12):
        store(pool, Prompt(seed * 1000 + number, 32))


def fill_from_another_pool(cluster: Cluster) -> None:
    """Write more than the arena holds."""
    with cluster.connect(0, LAYOUT) as other:
        refill(other)


def heartbeat_threads() -> set[threading.Thread]:
    """The heartbeat threads of all pools of this process."""
    return {thread for thread in threading.enumerate() if thread.name == "tokenlake"}


@contextlib.contextmanager
def through_proxy(node: Node, session: SessionId | None = None) -> Iterator[tuple[Pool, Proxy]]:
    """A pool that is connected to `node` through a proxy."""
    with tempfile.TemporaryDirectory(prefix="tokenlake-") as directory:
        path = Path(directory, "proxy.sock")
        with Proxy(node.socket, path) as proxy, Pool.connect(path, LAYOUT, session=session, deadlines=PATIENT) as pool:
            yield pool, proxy


def reconnected(pool: Pool, previous: Link) -> None:
    """Wait until `pool` uses another link than `previous`."""
    wait_until(lambda: answers(pool) and pool.link is not previous, "connected again")


def reconnect(pool: Pool, proxy: Proxy) -> None:
    """Break the connection and wait for the next one."""
    previous = pool.link
    proxy.cut()
    reconnected(pool, previous)


class ScriptedDaemon:
    """The daemon's end of a link. The test reads the client's messages and sends the daemon's."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._decoder = FrameDecoder(MAX_FRAME)

    def send(self, *messages: engine.EngineReply) -> None:
        """Send replies."""
        self._sock.sendall(b"".join(map(pack_frame, messages)))

    def received(self) -> list[engine.EngineRequest]:
        """The messages that were sent since the last call."""
        found: list[engine.EngineRequest] = []
        with contextlib.suppress(BlockingIOError):
            while data := self._sock.recv(MAX_FRAME):
                found += [engine.request_decoder.decode(body) for body in self._decoder.feed(data)]
        return found


@contextlib.contextmanager
def scripted_link() -> Iterator[tuple[Link, ScriptedDaemon]]:
    """A link and the other end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(ours, Path("scripted"), lambda: None)
    welcome = engine.Welcome(0, 1, "node", 1, 1, 1, "tenant", b"secret", b"", 3600.0, MAX_FRAME)
    with theirs:
        yield Link(channel, welcome, PATIENT), ScriptedDaemon(theirs)
    channel.close()
