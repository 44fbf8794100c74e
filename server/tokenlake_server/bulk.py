"""Segments' bytes between daemons: blocking sockets in a bounded number of threads, never on the loop.

One `Pull` frame asks; one `Pulled` frame and the raw slots answer. Both directions of a transfer take their
slots from the rules: the receiver's were reserved for it, the sender's are pinned until it returns.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
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
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import unpack_slots
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
SEND_STALL_S = 10.0
"""A reader that takes nothing for this long is cut off, so that its pins end."""
SENDERS_PER_PEER = RECEIVE_THREADS
MAX_IOVEC = 64
CHECKSUM_BYTES = 8
SOCKET_BUFFER = 4 << 20


class _Job:
    """One `StartFetch`. `abort` may come from the loop at any time; the thread owns everything else."""

    def __init__(self, instruction: StartFetch) -> None:
        self.instruction = instruction
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._aborted = False

    def use(self, sock: socket.socket | None) -> None:
        """From now on `abort` ends this socket. Raises TimeoutError when it came before."""
        with self._lock:
            self._sock = sock
            if self._aborted and sock is not None:
                raise TimeoutError("aborted")

    def abort(self) -> None:
        """Shut the connection down: closing it would not wake the thread, and late bytes would still land."""
        with self._lock:
            self._aborted = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)


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
        self._threads.submit(self._run, job)

    def _abort(self, instruction: AbortFetch) -> None:
        job = self._jobs.get(instruction.fetch)
        if job is not None:
            job.abort()

    def _run(self, job: _Job) -> None:
        """In a thread. Whatever happens, `FetchDone` says what is in the slots."""
        instruction = job.instruction
        count = len(instruction.keys) // KEY_BYTES
        codes = bytearray([Code.LOST]) * count
        checksums = bytearray(CHECKSUM_BYTES * instruction.shards * count)
        try:
            self._pull(job, codes, checksums)
        except (OSError, TokenLakeError) as error:
            log.info("fetch %d from %s ended early: %s", instruction.fetch, instruction.node, error)
        except Exception:
            log.exception("fetch %d from %s failed", instruction.fetch, instruction.node)
        self._jobs.pop(instruction.fetch, None)
        self._driver.post(events.FetchDone(instruction.fetch, bytes(codes), bytes(checksums)))

    def _pull(self, job: _Job, codes: bytearray, checksums: bytearray) -> None:
        instruction = job.instruction
        whole = False
        sock = self._borrow(instruction.node, job)
        try:
            sock.sendall(pack_frame(peer.Pull(instruction.tenant, instruction.keys)))
            self._receive(sock, instruction, codes, checksums)
            job.use(None)
            whole = True
        finally:
            if whole:
                self._give_back(instruction.node, sock)
            else:
                sock.close()

    def _receive(self, sock: socket.socket, instruction: StartFetch, codes: bytearray, checksums: bytearray) -> None:
        reply = decode(peer.pulled_decoder, read_frame(sock, self._identity.max_frame))
        per_segment = CHECKSUM_BYTES * instruction.shards
        sent = [index for index, code in enumerate(reply.codes) if code == Code.LOCAL]
        if len(reply.codes) != len(codes) or len(reply.checksums) != per_segment * len(sent):
            raise ProtocolRefused(f"node {instruction.node} answered for other segments than were asked for")
        if sent and reply.slot_bytes != instruction.slot_bytes:
            raise ProtocolRefused(f"node {instruction.node} has segments of {reply.slot_bytes} bytes")
        views = self._arena.slots(unpack_slots(instruction.slots), instruction.slot_bytes)
        for position, index in enumerate(sent):
            receive_exactly(sock, views[index])
            expected = reply.checksums[position * per_segment : (position + 1) * per_segment]
            if shard_checksums(views[index], instruction.shards) != expected:
                codes[index] = Code.BAD_CHECKSUM
                continue
            checksums[index * per_segment : (index + 1) * per_segment] = expected
            codes[index] = Code.LOCAL

    # -- connections

    def _borrow(self, node: str, job: _Job) -> socket.socket:
        """A connection that `job.abort` ends from here on."""
        sock = self._take_idle(node) or socket.create_connection(self._addresses[node], timeout=CONNECT_S)
        try:
            job.use(sock)
            if sock.gettimeout() is not None:
                self._introduce(sock, node)
        except BaseException:
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
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
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
        self._last += 1
        stream = self._last
        grants: queue.SimpleQueue[SendBulk | None] = queue.SimpleQueue()
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        thread = threading.Thread(
            target=self._serve, args=(stream, sock, who.node, grants), name=f"send-{stream}", daemon=True
        )
        self._streams[stream] = (sock, grants, thread)
        thread.start()

    def _grant(self, instruction: SendBulk) -> None:
        self._streams[instruction.stream][1].put(instruction)

    def _serve(self, stream: int, sock: socket.socket, node: str, grants: queue.SimpleQueue[SendBulk | None]) -> None:
        """In a thread, until the connection ends. A stream is forgotten only after its last `SendDone`."""
        try:
            while True:
                sock.settimeout(None)
                body = read_frame(sock, self._identity.max_frame)
                request = decode(peer.bulk_request_decoder, body)
                if len(request.keys) % KEY_BYTES:
                    raise ProtocolRefused("keys of a Pull do not add up")
                self._driver.post(events.PullAsked(stream, node, request.tenant, request.keys))
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
        sock.settimeout(SEND_STALL_S)
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


def shard_checksums(segment: memoryview, shards: int) -> bytes:
    """xxh3-64 of each shard, little-endian, concatenated. Releases the GIL while it hashes."""
    size = len(segment) // shards
    digests = [xxhash.xxh3_64_intdigest(segment[at * size : (at + 1) * size]) for at in range(shards)]
    return b"".join(digest.to_bytes(CHECKSUM_BYTES, "little") for digest in digests)


def _dropped(sock: socket.socket) -> bool:
    """Was an idle connection closed by the other side (or has it sent what nobody asked for)?"""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
