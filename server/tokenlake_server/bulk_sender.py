"""Sends segments' bytes to other daemons: one thread with a blocking socket per bulk connection.

The protocol is described in `tokenlake_server.bulk_receiver`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading

from tokenlake.core import events
from tokenlake.core.instructions import SendBulk
from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import pack_frame, peer
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import unpack_slots
from tokenlake_server.arena import Arena
from tokenlake_server.blocking_sockets import read_frame, size_buffer
from tokenlake_server.bulk_receiver import RECEIVE_THREADS
from tokenlake_server.driver import Driver
from tokenlake_server.handshake import PeerIdentity

__all__ = ["BulkSender"]

log = logging.getLogger(__name__)

SEND_STALL_S = 10
"""Seconds after which a bulk connection is closed whose receiver has taken no bytes (twice as long in the worst case),
so that a frozen receiver does not keep the slots pinned."""
CONNECTIONS_PER_PEER = RECEIVE_THREADS
"""Limit of the bulk connections that one peer may open: a peer uses one per thread that receives."""
MAX_IOVEC = 64


class BulkSender:
    """Carries out the instruction `SendBulk` of the rules, with one thread for each bulk connection (stream) that a
    peer opened. The number of connections is bounded."""

    def __init__(self, identity: PeerIdentity, peers: int, arena: Arena, driver: Driver) -> None:
        self._identity = identity
        self.set_peers(peers)
        self._arena = arena
        self._driver = driver
        self._streams: dict[int, tuple[socket.socket, queue.SimpleQueue[SendBulk | None], threading.Thread]] = {}
        self._last = 0
        driver.carry_out(SendBulk, self._hand_over)

    def set_peers(self, peers: int) -> None:
        """Follow a change of the number of other nodes, which limits the connections."""
        self._limit = max(1, peers) * CONNECTIONS_PER_PEER

    def adopt(self, sock: socket.socket, hello: peer.PeerHello, rest: bytes) -> None:
        """Serve a bulk connection whose handshake is done. Takes `sock` over. `rest`: bytes behind the handshake that
        were read already."""
        if len(self._streams) >= self._limit or rest:
            # The peer violates the protocol: it has opened too many connections, or did not wait for the welcome.
            sock.close()
            return
        try:
            sock.settimeout(None)
            size_buffer(sock, socket.SO_SNDBUF)
            # The timeout is set in the kernel: with Python's `settimeout` each send would be a poll and a partial send.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_STALL_S, 0))
        except OSError as error:
            log.debug("bulk connection of %s ended: %s", hello.node, error)
            sock.close()
            return
        self._last += 1
        stream = self._last
        instructions: queue.SimpleQueue[SendBulk | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._serve, args=(stream, sock, hello.node, instructions), name=f"send-{stream}", daemon=True
        )
        self._streams[stream] = (sock, instructions, thread)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("a bulk connection of %s is closed, because no thread can be started: %s", hello.node, error)
            del self._streams[stream]
            sock.close()

    def _hand_over(self, instruction: SendBulk) -> None:
        self._streams[instruction.stream][1].put(instruction)

    def refuse(self, stream: int) -> None:
        """Close a bulk connection whose request for segments (`Pull`) the rules refused: its thread stops waiting for a
        `SendBulk` and closes it."""
        served = self._streams.get(stream)
        if served is not None:
            served[1].put(None)

    def _serve(
        self, stream: int, sock: socket.socket, node: str, instructions: queue.SimpleQueue[SendBulk | None]
    ) -> None:
        """Serve one bulk connection, in a thread, until it ends. The stream is removed after its last `SendDone` was
        posted."""
        try:
            while True:
                body = read_frame(sock, peer.MAX_FRAME)
                request = decode(peer.bulk_request_decoder, body)
                if len(request.keys) % KEY_BYTES:
                    raise ProtocolRefused(
                        f"a Pull with {len(request.keys)} bytes of keys; expected a multiple of {KEY_BYTES}"
                    )
                if request.request and log.isEnabledFor(logging.DEBUG):
                    count = len(request.keys) // KEY_BYTES
                    log.debug("request %r: %s pulls %d segments", request.request, node, count)
                self._driver.post(events.PullRequested(stream, node, request.tenant, request.keys, request.background))
                try:
                    instruction = instructions.get()
                    if instruction is None:
                        return
                    self._send(sock, instruction)
                finally:
                    self._driver.post(events.SendDone(stream))
        except (OSError, TokenLakeError) as error:
            log.debug("bulk connection %d of %s ended: %s", stream, node, error)
        except Exception:
            log.exception("bulk connection %d of %s failed", stream, node)
        finally:
            self._streams.pop(stream, None)
            sock.close()

    def _send(self, sock: socket.socket, instruction: SendBulk) -> None:
        views = self._arena.slots(unpack_slots(instruction.slots), instruction.slot_bytes)
        header = pack_frame(peer.Pulled(instruction.slot_bytes, instruction.codes, instruction.checksums))
        buffers = [memoryview(header), *views]
        while buffers:
            sent = sock.sendmsg(buffers[:MAX_IOVEC])
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = buffers[0][sent:]

    def close(self) -> None:
        """Close all bulk connections and wait for their threads."""
        for sock, instructions, _ in list(self._streams.values()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            instructions.put(None)
        for _, _, thread in list(self._streams.values()):
            thread.join(timeout=SEND_STALL_S)
