"""Sends segments' bytes to other daemons: one thread with a blocking socket per bulk connection.

The protocol is described in `tokenlake_server.bulk.receiver`.

Where no further thread can be started, a connection is served by one that all such connections share, a request at a
time, until a thread of its own can be started.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from typing import NamedTuple, cast

from tokenlake.core import events
from tokenlake.core.cluster.bulk_path import LEAST_RATE
from tokenlake.core.cluster.transfer import MAX_DEADLINE_S
from tokenlake.core.instructions import SendBulk
from tokenlake.errors import LimitReached, ProtocolRefused, TokenLakeError
from tokenlake.keys import KEY_BYTES
from tokenlake.metrics import Level, Metric
from tokenlake.trace import checked
from tokenlake.wire import Code, peer
from tokenlake.wire.fields import RecordKeys
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import split_keys, unpack_slots
from tokenlake_server.bulk.blocking_sockets import limit_wait, size_buffer
from tokenlake_server.bulk.choice import Transports
from tokenlake_server.bulk.receiver import RECEIVE_THREADS
from tokenlake_server.bulk.stream import BulkStream
from tokenlake_server.bulk.tcp import Tcp
from tokenlake_server.bulk.transport import SEND_STALL_S, Outgoing
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.contents import Contents
from tokenlake_server.loop.driver import Driver

log = logging.getLogger(__name__)

LONGEST_SEND_S = MAX_DEADLINE_S
"""Most seconds that one send may take, as long as the longest deadline of a fetch."""
CONNECTIONS_PER_PEER = RECEIVE_THREADS + 2
"""Limit of the bulk connections that one peer may open: a peer uses one per thread that receives, one to measure the
bandwidth, and one to probe this node's memory."""
MAX_CONTENTS = 1 << 20
"""Limit of the bytes of the contents of segments in one answer."""
NO_LIMIT_S = 1e9
SHARED = Metric(
    "tokenlake_shared_sends",
    "Requests of other nodes for segments that the shared thread served since the start, because no further thread "
    "could be started",
    kind="gauge",
)


class _Stream(NamedTuple):
    """One bulk connection of a peer."""

    number: int
    hello: peer.PeerHello
    bulk: BulkStream
    instructions: queue.SimpleQueue[SendBulk | None]
    """The requests that the thread waits for; None ends it."""

    def end(self) -> None:
        """Let the thread of the connection return soon."""
        with contextlib.suppress(OSError):
            self.bulk.sock.shutdown(socket.SHUT_RDWR)
        self.instructions.put(None)


class BulkSender:
    """Carries out the instruction `SendBulk` of the rules, with one thread for each bulk connection (stream) that a
    peer opened. The number of connections of each peer is bounded, and so is the time of a send."""

    def __init__(
        self, arena: Arena, driver: Driver, transports: Transports | None = None, contents: Contents | None = None
    ) -> None:
        """`transports`: without them bytes are sent over TCP. `contents` has the contents of segments, which are sent
        with their bytes."""
        self._transports = transports or Transports(Tcp(arena))
        self._driver = driver
        self._streams: dict[int, _Stream] = {}
        self._threads: dict[int, threading.Thread] = {}
        """By number of a connection, the thread of its own."""
        self._shared_sends = 0
        self._selector = selectors.DefaultSelector()
        """The connections without a thread of their own. They are registered and removed by the shared thread."""
        self._joining: queue.SimpleQueue[_Stream | None] = queue.SimpleQueue()
        """Connections that the shared thread is to serve; None ends it."""
        self._bell, self._rung = socket.socketpair()
        self._selector.register(self._rung, selectors.EVENT_READ)
        self._shared = threading.Thread(target=self._share, name="send-shared", daemon=True)
        try:
            self._shared.start()
        except RuntimeError as error:
            raise LimitReached(f"a thread that sends segments cannot be started: {error}") from error
        self._last = 0
        self._contents = contents or Contents()
        driver.carry_out(SendBulk, self._hand_over)

    def adopt(self, sock: socket.socket, hello: peer.PeerHello, keys: RecordKeys | None) -> None:
        """Serve a bulk connection whose handshake is done. Takes `sock` over. `keys`: of its records; None if it is
        plain."""
        others = [stream for stream in list(self._streams.values()) if stream.hello.node == hello.node]
        same = [stream for stream in others if stream.hello.incarnation == hello.incarnation]
        if len(same) >= CONNECTIONS_PER_PEER:
            # The peer violates the protocol.
            sock.close()
            return
        for earlier in others:
            if earlier.hello.incarnation != hello.incarnation:
                earlier.end()
        try:
            sock.settimeout(None)
            size_buffer(sock, socket.SO_SNDBUF, encrypted=keys is not None)
            limit_wait(sock, "SO_SNDTIMEO", SEND_STALL_S)
        except OSError as error:
            log.debug("bulk connection of %s ended: %s", hello.node, error)
            sock.close()
            return
        self._last += 1
        number = self._last
        instructions: queue.SimpleQueue[SendBulk | None] = queue.SimpleQueue()
        stream = _Stream(number, hello, BulkStream(sock, keys), instructions)
        self._streams[number] = stream
        problem = self._start(stream)
        if problem:
            log.warning(
                "a bulk connection of %s shares a thread with others, because no further one can be started (%s): "
                "raise the limit of processes (pids) of this service",
                hello.node,
                problem,
                extra={"kind": "threads"},
            )
            self._joining.put(stream)
            self._ring()

    def _start(self, stream: _Stream) -> str:
        """Serve a connection in a thread of its own. Returns the problem when none can be started."""
        thread = threading.Thread(target=self._serve, args=(stream,), name=f"send-{stream.number}", daemon=True)
        self._threads[stream.number] = thread
        try:
            thread.start()
        except RuntimeError as error:
            del self._threads[stream.number]
            return str(error)
        return ""

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.send(b"\0", socket.MSG_DONTWAIT)

    def _hand_over(self, instruction: SendBulk) -> None:
        stream = self._streams.get(instruction.stream)
        # None for a connection that ended before the rules answered its `Pull`: its thread has posted `SendDone`.
        if stream is not None:
            stream.instructions.put(instruction)

    def refuse(self, stream: int) -> None:
        """Close a bulk connection whose request for segments (`Pull`) the rules refused: its thread stops waiting for a
        `SendBulk` and closes it."""
        served = self._streams.get(stream)
        if served is not None:
            served.instructions.put(None)

    def _serve(self, stream: _Stream) -> None:
        """Serve one bulk connection, in a thread, until it ends."""
        while self._serve_one(stream):
            pass
        self._threads.pop(stream.number, None)

    def _serve_one(self, stream: _Stream) -> bool:
        """Serve the next request of a connection. Returns False when the connection has ended: it is removed after its
        last `SendDone` was posted."""
        number, node = stream.number, stream.hello.node
        served = False
        try:
            body = stream.bulk.read_frame(peer.MAX_FRAME)
            request = decode(peer.bulk_request_decoder, body)
            if len(request.keys) % KEY_BYTES:
                raise ProtocolRefused(
                    f"a Pull with {len(request.keys)} bytes of keys; expected a multiple of {KEY_BYTES}"
                )
            if request.request and log.isEnabledFor(logging.DEBUG):
                count = len(request.keys) // KEY_BYTES
                log.debug("request %r: %s pulls %d segments", request.request, node, count)
            self._driver.post(
                events.PullRequested(
                    number, node, request.tenant, request.keys, request.background, checked(request.trace)
                )
            )
            try:
                instruction = stream.instructions.get()
                if instruction is not None:
                    self._send(stream.bulk, instruction, request)
                    served = True
            finally:
                self._driver.post(events.SendDone(number))
        except (OSError, TokenLakeError) as error:
            log.debug("bulk connection %d of %s ended: %s", number, node, error)
        except Exception:
            log.exception("bulk connection %d of %s failed", number, node)
        finally:
            if not served:
                self._streams.pop(number, None)
                stream.bulk.sock.close()
        return served

    def _share(self) -> None:
        """Serve the connections without a thread of their own, in the shared thread."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._rung.recv(4096)
                    while not self._joining.empty():
                        joining = self._joining.get()
                        if joining is None:
                            return
                        self._selector.register(joining.bulk.sock, selectors.EVENT_READ, joining)
                    continue
                stream = cast(_Stream, key.data)
                self._selector.unregister(stream.bulk.sock)
                if not self._start(stream):
                    continue
                # Another connection must not wait for a peer that sends a part of a request only.
                limit_wait(stream.bulk.sock, "SO_RCVTIMEO", SEND_STALL_S)
                if self._serve_one(stream):
                    self._shared_sends += 1
                    limit_wait(stream.bulk.sock, "SO_RCVTIMEO", NO_LIMIT_S)
                    self._selector.register(stream.bulk.sock, selectors.EVENT_READ, stream)

    def gauges(self) -> list[Level]:
        """Gauges for the metrics page."""
        return [Level(SHARED, (), self._shared_sends)]

    def _send(self, stream: BulkStream, instruction: SendBulk, request: peer.Pull) -> None:
        size = instruction.slot_bytes if instruction.codes else request.probe_bytes
        slots = unpack_slots(instruction.slots)
        contents: tuple[bytes, ...] = ()
        if self._contents.models(request.tenant):
            keys = zip(split_keys(request.keys), instruction.codes, strict=False)
            present = [key for key, code in keys if code == Code.LOCAL]
            contents = self._contents.contents(request.tenant, present, MAX_CONTENTS)
        answer = peer.Pulled(size, instruction.codes, instruction.checksums, contents)
        # Three times the time that a peer with the least rate (`LEAST_RATE`) takes.
        count = instruction.codes.count(Code.LOCAL) if instruction.codes else 1
        limit_s = min(LONGEST_SEND_S, SEND_STALL_S + 3 * size * count / LEAST_RATE)
        outgoing = Outgoing(stream, answer, slots, time.monotonic() + limit_s, limit_s)
        self._transports.to_answer(request, slots).send(outgoing)

    def close(self) -> None:
        """Close all bulk connections and wait for their threads."""
        for stream in list(self._streams.values()):
            stream.end()
        self._joining.put(None)
        self._ring()
        for thread in [*self._threads.values(), self._shared]:
            thread.join(timeout=SEND_STALL_S)
        for each in (self._bell, self._rung):
            each.close()
        self._selector.close()
