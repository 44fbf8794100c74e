"""Segments' bytes between daemons: blocking sockets in a bounded number of threads, never on the loop.

One `Pull` frame asks; one `Pulled` frame and the raw slots answer. A large fetch is asked for in two halves, over two
connections. Both directions of a transfer take their slots from the rules: the receiver's were reserved for it, the
sender's are pinned until it returns.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import queue
import socket
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import xxhash

from tokenlake.config import Address
from tokenlake.core import events
from tokenlake.core.instructions import AbortFetch, SendBulk, StartFetch
from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, pack_frame, peer
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import SLOT_BYTES, unpack_slots
from tokenlake_server.arena import Arena
from tokenlake_server.blocking import introduce, read_frame, receive_exactly
from tokenlake_server.driver import Driver
from tokenlake_server.proof import PeerIdentity

__all__ = ["Receivers", "Senders"]

log = logging.getLogger(__name__)

RECEIVE_THREADS = 8
"""A frozen peer holds a thread until its deadline; the others go on."""
IDLE_CONNECTIONS = 4
"""Kept open per peer."""
CONNECT_S = 5.0
SEND_STALL_S = 10
"""A reader that takes nothing for this long, at most for twice as long, is cut off, so that its pins end."""
SENDERS_PER_PEER = RECEIVE_THREADS
MAX_IOVEC = 64
HALVES_BYTES = 16 << 20
"""A fetch of at least this many comes in halves: one connection keeps less than one processor busy on each side."""
CACHED_BYTES = 1 << 20
"""Still in the processor's cache after they were received, when their checksums are made."""
LOOPBACK_BUFFER = 256 << 10
"""What lies between two processes of one machine should stay in its cache. A network's round trip needs more, which the
kernel finds out."""


class _Job:
    """One `StartFetch`. `abort` may come from the loop at any time. Each of `parts`, ranges of its keys, is one
    thread's, and so are their places in `codes` and `checksums`."""

    def __init__(self, instruction: StartFetch) -> None:
        self.instruction = instruction
        count = len(instruction.keys) // KEY_BYTES
        self.codes = bytearray([Code.LOST]) * count
        self.checksums = bytearray(CHECKSUM_BYTES * instruction.shards * count)
        half = count // 2 if count * instruction.slot_bytes >= HALVES_BYTES else 0
        self.parts = [range(half), range(half, count)] if half else [range(count)]
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._left = len(self.parts)
        self._aborted = False

    def use(self, sock: socket.socket) -> None:
        """From now on `abort` ends this socket. Raises TimeoutError when it came before."""
        with self._lock:
            self._socks.add(sock)
            if self._aborted:
                raise TimeoutError("aborted")

    def leave(self, sock: socket.socket) -> None:
        """From now on it does not."""
        with self._lock:
            self._socks.discard(sock)

    def end_part(self) -> bool:
        """Was it the last?"""
        with self._lock:
            self._left -= 1
            return not self._left

    def abort(self) -> None:
        """Shut the connection down: closing it would not wake the thread, and late bytes would still land."""
        with self._lock:
            self._aborted = True
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class Receivers:
    """Carries out `StartFetch` and `AbortFetch`."""

    def __init__(self, identity: PeerIdentity, addresses: Mapping[str, Address], arena: Arena, driver: Driver) -> None:
        self._identity = identity
        self._addresses = dict(addresses)
        self._arena = arena
        self._driver = driver
        self._threads = ThreadPoolExecutor(RECEIVE_THREADS, thread_name_prefix="receive")
        self._jobs: dict[int, _Job] = {}
        self._idle: dict[str, list[socket.socket]] = {}
        self._idle_lock = threading.Lock()
        driver.carry_out(StartFetch, self._start)
        driver.carry_out(AbortFetch, self._abort)

    def _start(self, instruction: StartFetch) -> None:
        job = _Job(instruction)
        self._jobs[instruction.fetch] = job
        for part in job.parts:
            self._threads.submit(self._run, job, part)

    def _abort(self, instruction: AbortFetch) -> None:
        job = self._jobs.get(instruction.fetch)
        if job is not None:
            job.abort()

    def _run(self, job: _Job, part: range) -> None:
        """In a thread. Whatever happens, the last part's `FetchDone` says what is in the slots."""
        instruction = job.instruction
        try:
            self._pull(job, part)
        except (OSError, TokenLakeError) as error:
            named = f" for request {instruction.request!r}" if instruction.request else ""
            log.info("fetch %d from %s%s ended early: %s", instruction.fetch, instruction.node, named, error)
        except Exception:
            log.exception("fetch %d from %s failed", instruction.fetch, instruction.node)
        if job.end_part():
            self._jobs.pop(instruction.fetch, None)
            self._driver.post(events.FetchDone(instruction.fetch, bytes(job.codes), bytes(job.checksums)))

    def _pull(self, job: _Job, part: range) -> None:
        instruction = job.instruction
        whole = False
        sock = self._borrow(instruction.node, job)
        try:
            keys = instruction.keys[part.start * KEY_BYTES : part.stop * KEY_BYTES]
            asked = peer.Pull(instruction.tenant, keys, instruction.request, instruction.background)
            sock.sendall(pack_frame(asked))
            self._receive(sock, job, part)
            whole = True
        finally:
            job.leave(sock)
            if whole:
                self._give_back(instruction.node, sock)
            else:
                sock.close()

    def _receive(self, sock: socket.socket, job: _Job, part: range) -> None:
        instruction = job.instruction
        reply = decode(peer.pulled_decoder, read_frame(sock, self._identity.max_frame))
        per_segment = CHECKSUM_BYTES * instruction.shards
        sent = [index for index, code in zip(part, reply.codes, strict=False) if code == Code.LOCAL]
        if len(reply.codes) != len(part) or len(reply.checksums) != per_segment * len(sent):
            raise ProtocolRefused(f"node {instruction.node} answered for other segments than were asked for")
        if sent and reply.slot_bytes != instruction.slot_bytes:
            raise ProtocolRefused(f"node {instruction.node} has segments of {reply.slot_bytes} bytes")
        places = unpack_slots(instruction.slots[part.start * SLOT_BYTES : part.stop * SLOT_BYTES])
        views = self._arena.slots(places, instruction.slot_bytes)
        for position, index in enumerate(sent):
            expected = reply.checksums[position * per_segment : (position + 1) * per_segment]
            if _receive_segment(sock, views[index - part.start], instruction.shards) != expected:
                job.codes[index] = Code.BAD_CHECKSUM
                continue
            job.checksums[index * per_segment : (index + 1) * per_segment] = expected
            job.codes[index] = Code.LOCAL

    # -- connections

    def _borrow(self, node: str, job: _Job) -> socket.socket:
        """A connection that `job.abort` ends from here on."""
        sock = self._take_idle(node) or socket.create_connection(self._addresses[node], timeout=CONNECT_S)
        try:
            job.use(sock)
            if sock.gettimeout() is not None:
                self._introduce(sock, node)
        except BaseException:
            job.leave(sock)
            sock.close()
            raise
        return sock

    def _take_idle(self, node: str) -> socket.socket | None:
        with self._idle_lock:
            idle = self._idle.get(node)
            while idle:
                sock = idle.pop()
                if not _dropped(sock):
                    return sock
                sock.close()
        return None

    def _introduce(self, sock: socket.socket, node: str) -> None:
        """The handshake of a new connection; from then on it has no timeout, as the idle ones."""
        _size_buffer(sock, socket.SO_RCVBUF)
        introduce(sock, self._identity, node, "bulk")
        sock.settimeout(None)

    def _give_back(self, node: str, sock: socket.socket) -> None:
        with self._idle_lock:
            idle = self._idle.setdefault(node, [])
            if len(idle) < IDLE_CONNECTIONS:
                idle.append(sock)
                return
        sock.close()

    def close(self) -> None:
        """Abort what runs and wait for the threads."""
        for job in list(self._jobs.values()):
            job.abort()
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._idle_lock:
            for sock in [sock for idle in self._idle.values() for sock in idle]:
                sock.close()
            self._idle.clear()


class Senders:
    """Carries out `SendBulk`: one thread per bulk connection that peers opened, a bounded number."""

    def __init__(self, identity: PeerIdentity, peers: int, arena: Arena, driver: Driver) -> None:
        self._identity = identity
        self._limit = max(1, peers) * SENDERS_PER_PEER
        self._arena = arena
        self._driver = driver
        self._streams: dict[int, tuple[socket.socket, queue.SimpleQueue[SendBulk | None], threading.Thread]] = {}
        self._last = 0
        driver.carry_out(SendBulk, self._grant)

    def adopt(self, sock: socket.socket, who: peer.PeerHello, rest: bytes) -> None:
        """Serve a bulk connection. `rest`: bytes of it that were read already."""
        if len(self._streams) >= self._limit or rest:
            # A peer that behaves waits for the welcome before it asks, and opens no more than it has threads.
            sock.close()
            return
        try:
            sock.settimeout(None)
            _size_buffer(sock, socket.SO_SNDBUF)
            # Not the socket's own time-out, which would make each send a poll and a part of what it was given.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_STALL_S, 0))
        except OSError as error:
            log.debug("bulk connection of %s ended: %s", who.node, error)
            sock.close()
            return
        self._last += 1
        stream = self._last
        grants: queue.SimpleQueue[SendBulk | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._serve, args=(stream, sock, who.node, grants), name=f"send-{stream}", daemon=True
        )
        self._streams[stream] = (sock, grants, thread)
        thread.start()

    def _grant(self, instruction: SendBulk) -> None:
        self._streams[instruction.stream][1].put(instruction)

    def refuse(self, stream: int) -> None:
        """The rules did not take what was asked on this connection: it ends, since its thread waits for a grant that
        does not come."""
        served = self._streams.get(stream)
        if served is not None:
            served[1].put(None)

    def _serve(self, stream: int, sock: socket.socket, node: str, grants: queue.SimpleQueue[SendBulk | None]) -> None:
        """In a thread, until the connection ends. A stream is forgotten only after its last `SendDone`."""
        try:
            while True:
                body = read_frame(sock, self._identity.max_frame)
                request = decode(peer.bulk_request_decoder, body)
                if len(request.keys) % KEY_BYTES:
                    raise ProtocolRefused("keys of a Pull do not add up")
                if request.request and log.isEnabledFor(logging.DEBUG):
                    count = len(request.keys) // KEY_BYTES
                    log.debug("request %r: %s pulls %d segments", request.request, node, count)
                self._driver.post(events.PullAsked(stream, node, request.tenant, request.keys, request.background))
                grant = grants.get()
                if grant is None:
                    return
                try:
                    self._send(sock, grant)
                finally:
                    self._driver.post(events.SendDone(stream))
        except (OSError, TokenLakeError) as error:
            log.debug("bulk connection %d of %s ended: %s", stream, node, error)
        except Exception:
            log.exception("bulk connection %d of %s failed", stream, node)
        finally:
            self._streams.pop(stream, None)
            sock.close()

    def _send(self, sock: socket.socket, grant: SendBulk) -> None:
        views = self._arena.slots(unpack_slots(grant.slots), grant.slot_bytes)
        header = pack_frame(peer.Pulled(grant.slot_bytes, grant.codes, grant.checksums))
        buffers = [memoryview(header), *views]
        while buffers:
            sent = sock.sendmsg(buffers[:MAX_IOVEC])
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = buffers[0][sent:]

    def close(self) -> None:
        """End all connections and their threads."""
        for sock, grants, _ in list(self._streams.values()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            grants.put(None)
        for _, _, thread in list(self._streams.values()):
            thread.join(timeout=SEND_STALL_S)


def _receive_segment(sock: socket.socket, segment: memoryview, shards: int) -> bytes:
    """Fill `segment`; xxh3-64 of each shard, little-endian, concatenated. Each byte is hashed soon after it came.
    Raises as `receive_exactly`."""
    size = len(segment) // shards
    if size > CACHED_BYTES:
        digests = [_receive_shard(sock, segment[at : at + size]) for at in range(0, len(segment), size)]
    else:
        digests = []
        step = CACHED_BYTES // size * size
        for start in range(0, len(segment), step):
            piece = segment[start : start + step]
            receive_exactly(sock, piece)
            digests += [xxhash.xxh3_64_intdigest(piece[at : at + size]) for at in range(0, len(piece), size)]
    return b"".join(digest.to_bytes(CHECKSUM_BYTES, "little") for digest in digests)


def _receive_shard(sock: socket.socket, shard: memoryview) -> int:
    digest = xxhash.xxh3_64()
    for at in range(0, len(shard), CACHED_BYTES):
        piece = shard[at : at + CACHED_BYTES]
        receive_exactly(sock, piece)
        digest.update(piece)
    return digest.intdigest()


def _size_buffer(sock: socket.socket, option: int) -> None:
    if ipaddress.ip_address(sock.getpeername()[0]).is_loopback:
        sock.setsockopt(socket.SOL_SOCKET, option, LOOPBACK_BUFFER)


def _dropped(sock: socket.socket) -> bool:
    """Was an idle connection closed by the other side (or has it sent what nobody asked for)?"""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
