"""Receives segments' bytes from other daemons, over blocking sockets in a bounded number of threads.

The receiver sends one `Pull` frame; the sender (`tokenlake_server.bulk_sender`) replies with one `Pulled` frame and the
raw slots. A large fetch is split in two halves over two connections. The rules reserved the slots of the receiver and
pin those of the sender for as long as the transfer lasts.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import xxhash

from tokenlake.config import Address
from tokenlake.core import events
from tokenlake.core.instructions import AbortFetch, StartFetch
from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, pack_frame, peer
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import SLOT_BYTES, unpack_slots
from tokenlake_server.arena import Arena
from tokenlake_server.blocking_sockets import introduce, read_frame, receive_exactly, size_buffer
from tokenlake_server.driver import Driver
from tokenlake_server.handshake import PeerIdentity

__all__ = ["RECEIVE_THREADS", "BulkReceiver"]

log = logging.getLogger(__name__)

RECEIVE_THREADS = 8
"""Number of threads that receive segments. A fetch from a frozen peer blocks one or two of them until its deadline; the
others serve fetches from other peers."""
IDLE_CONNECTIONS = 4
"""Limit of the unused bulk connections per peer that stay open for later fetches."""
CONNECT_S = 5.0
HALVES_BYTES = 16 << 20
"""Bytes from which a fetch is split in two halves, each over a connection of its own: a single connection is limited by
one processor on each side."""
CACHED_BYTES = 1 << 20
"""Received bytes are added to the checksum in pieces of at most this size, while they are still in the processor's
cache."""


class _Job:
    """The execution of one `StartFetch`. One thread fetches each of `parts` (ranges of indices into the keys) and alone
    writes the entries of its range in `codes` and `checksums`. The control loop may call `abort` at any time."""

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
        """Record that the fetch uses the socket: from now on `abort` shuts it down. Raises TimeoutError when the fetch
        was aborted before."""
        with self._lock:
            self._socks.add(sock)
            if self._aborted:
                raise TimeoutError("aborted")

    def leave(self, sock: socket.socket) -> None:
        """Record that the fetch does not use the socket any more: from now on `abort` leaves it alone."""
        with self._lock:
            self._socks.discard(sock)

    def end_part(self) -> bool:
        """Count that one part of the fetch has ended. Returns whether it was the last part."""
        with self._lock:
            self._left -= 1
            return not self._left

    def abort(self) -> None:
        """Abort the fetch: shut its connections down, so that their threads stop waiting and no more bytes are written
        into the slots. Closing a socket would not wake the thread that reads it."""
        with self._lock:
            self._aborted = True
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class BulkReceiver:
    """Receives segments from other nodes: carries out the rules' instructions `StartFetch` and `AbortFetch`."""

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
        """Fetch one part of the segments of a `StartFetch`, in a thread. In every case the last part posts `FetchDone`
        with the outcome of each segment."""
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
            pull = peer.Pull(instruction.tenant, keys, instruction.request, instruction.background)
            sock.sendall(pack_frame(pull))
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
        reply = decode(peer.pulled_decoder, read_frame(sock, peer.MAX_FRAME))
        per_segment = CHECKSUM_BYTES * instruction.shards
        sent = [index for index, code in zip(part, reply.codes, strict=False) if code == Code.LOCAL]
        if len(reply.codes) != len(part) or len(reply.checksums) != per_segment * len(sent):
            raise ProtocolRefused(f"node {instruction.node} answered for other segments than were requested")
        if sent and reply.slot_bytes != instruction.slot_bytes:
            raise ProtocolRefused(
                f"node {instruction.node} sends segments of {reply.slot_bytes} bytes; expected {instruction.slot_bytes}"
            )
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
        """An idle bulk connection to `node`, else a new one. The caller owns it, and an abort of `job` shuts it
        down."""
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
        """Do the handshake of a new connection, then remove its timeout. A connection without a timeout has done its
        handshake (`_borrow`)."""
        size_buffer(sock, socket.SO_RCVBUF)
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
        """Abort all fetches and wait for the threads that receive."""
        for job in list(self._jobs.values()):
            job.abort()
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._idle_lock:
            for sock in [sock for idle in self._idle.values() for sock in idle]:
                sock.close()
            self._idle.clear()


def _receive_segment(sock: socket.socket, segment: memoryview, shards: int) -> bytes:
    """Fill `segment` from the socket and return the checksums of its shards, concatenated. Each piece of at most
    `CACHED_BYTES` is hashed as soon as it is received. Raises the errors of `receive_exactly`."""
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


def _dropped(sock: socket.socket) -> bool:
    """True when the other side closed an idle connection, or sent bytes although nothing was requested."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
