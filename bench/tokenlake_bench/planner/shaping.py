"""Links of a given bandwidth and delay between daemons on one machine: TCP connections through a proxy process.

::

    node a -- connect --> port of (a, b) ==[ link a>b: first in, first out ]==> listen address of b
                                         <=[ link b>a ]=======================

All connections between two nodes share the two links between them, one per direction. Bytes leave a link in the order
in which they entered it, no faster than its bandwidth, and no sooner than its delay after they were read.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from tokenlake_testing.children import start_child

CHUNK = 256 << 10
QUEUE_S = 0.005
"""Seconds of queue: a link stops reading when the bytes that it holds take this long at its bandwidth, like a switch
whose queue is full."""


class Shape(msgspec.Struct, frozen=True):
    """Bandwidth and delay that all links have in each direction."""

    bytes_per_s: float
    delay_s: float


FREE = Shape(1e12, 0.0)


class Route(msgspec.Struct, frozen=True):
    """A listening port of the proxy process: connections to `port` are forwarded to `target`, both on loopback."""

    client: str
    server: str
    port: int
    target: int


class Line:
    """Model of the link from one node to another in one direction: computes when bytes leave it. Does no I/O."""

    def __init__(self) -> None:
        self.shape = FREE
        self._free_at = 0.0

    def enter(self, nbytes: int, now: float) -> float:
        """Enter `nbytes` into the link. Returns the time at which the last of them arrives at the other end."""
        self._free_at = max(self._free_at, now) + nbytes / self.shape.bytes_per_s
        return self._free_at + self.shape.delay_s

    def full(self, now: float) -> bool:
        """Whether the link's queue is full, so that its source must wait."""
        return self._free_at - now > QUEUE_S


class _Flow:
    """One direction of one TCP connection that passes through the proxy process."""

    def __init__(self, source: socket.socket, sink: socket.socket, line: Line) -> None:
        self.source, self.sink, self.line = source, sink, line
        self.waiting: deque[tuple[float, memoryview]] = deque()
        """Chunks of bytes that were read, each with the time at which it may be sent on. An empty chunk marks the end
        of the source."""
        self.blocked = False
        self.ended = False

    def read(self, now: float) -> None:
        """Read a chunk from the source and queue it on the link. Raises OSError."""
        # Chunks are so small that a single one does not fill the queue of a slow link.
        size = int(min(CHUNK, max(4096.0, self.line.shape.bytes_per_s * QUEUE_S / 4)))
        part = self.source.recv(size)
        self.waiting.append((self.line.enter(len(part), now), memoryview(part)))
        self.ended = not part

    def write(self, now: float) -> None:
        """Send on the chunks whose time has come. Raises OSError."""
        self.blocked = False
        while self.waiting and self.waiting[0][0] <= now:
            at, part = self.waiting[0]
            if not part:
                self.waiting.popleft()
                self.sink.shutdown(socket.SHUT_WR)
                continue
            try:
                sent = self.sink.send(part)
            except BlockingIOError:
                self.blocked = True
                return
            if sent < len(part):
                self.waiting[0] = (at, part[sent:])
            else:
                self.waiting.popleft()


class Shaper:
    """The loop of the proxy process, in one thread, which moves bytes over all shaped connections."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._lines: dict[tuple[str, str], Line] = {}
        self._listeners: dict[socket.socket, Route] = {}
        self._flows: list[_Flow] = []
        for route in routes:
            listener = socket.create_server(("127.0.0.1", route.port))
            listener.setblocking(False)
            self._listeners[listener] = route
            self._lines[route.client, route.server] = Line()
            self._lines[route.server, route.client] = Line()

    def shape(self, shape: Shape) -> None:
        """Give all links this bandwidth and delay from now on."""
        for line in self._lines.values():
            line.shape = shape

    def run(self, orders: BinaryIO, answers: BinaryIO) -> None:
        """Move bytes until the pipe `orders` ends; each line that arrives there is a `Shape` for all links and is
        answered with an empty line."""
        descriptor = orders.fileno()
        while True:
            now = time.monotonic()
            reading = [flow for flow in self._flows if not flow.ended and not flow.line.full(now)]
            blocked = [flow for flow in self._flows if flow.blocked]
            due = [flow.waiting[0][0] for flow in self._flows if flow.waiting and not flow.blocked]
            timeout = max(0.0, min(due) - now) if due else None
            if len(reading) < len(self._flows):
                timeout = QUEUE_S / 5 if timeout is None else min(timeout, QUEUE_S / 5)
            sources: list[Any] = [descriptor, *self._listeners, *(flow.source for flow in reading)]
            ready, _, _ = select.select(sources, [flow.sink for flow in blocked], [], timeout)
            now, found = time.monotonic(), set(ready)
            if descriptor in found:
                line = orders.readline()
                if not line:
                    return
                self.shape(msgspec.json.decode(line, type=Shape))
                answers.write(b"\n")
                answers.flush()
            for listener in found & self._listeners.keys():
                self._accept(listener)
            for flow in list(self._flows):
                try:
                    if flow.source in found and flow in reading:
                        flow.read(now)
                    flow.write(now)
                except OSError:
                    self._end(flow)
            self._flows = [flow for flow in self._flows if flow.waiting or not flow.ended]

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        route = self._listeners[listener]
        try:
            server = socket.create_connection(("127.0.0.1", route.target))
        except OSError:
            client.close()
            return
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._flows.append(_Flow(client, server, self._lines[route.client, route.server]))
        self._flows.append(_Flow(server, client, self._lines[route.server, route.client]))

    def _end(self, broken: _Flow) -> None:
        """Close both directions of a proxied connection."""
        ends = {broken.source, broken.sink}
        for sock in ends:
            sock.close()
        self._flows = [flow for flow in self._flows if flow.source not in ends]


class Shaping:
    """Limits the bandwidth and delay of the connections between daemons: starts the proxy process through which they
    run, and sets the values of its links. The caller must close it, which ends the process."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._process = start_child(
            [sys.executable, "-m", __name__, msgspec.json.encode(routes).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.shape(FREE)

    def shape(self, shape: Shape) -> None:
        """Set the bandwidth and delay of all links to `shape`; they have it when the call returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(shape) + b"\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the shaping process ended")

    def close(self) -> None:
        """End the proxy process, and with it all connections through it. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()


if __name__ == "__main__":
    shaper = Shaper(msgspec.json.decode(sys.argv[1], type=list[Route]))
    # Orders are read without a buffer, because `select` does not see a line that waits in a buffer of this process.
    with open(0, "rb", buffering=0, closefd=False) as orders:
        shaper.run(orders, sys.stdout.buffer)
