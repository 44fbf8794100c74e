"""Receives segments' bytes from other daemons, over blocking sockets in a bounded number of threads.

The receiver sends one `Pull` frame; the sender (`tokenlake_server.bulk_sender`) replies with one `Pulled` frame and the
raw slots. A large fetch is split in two halves over two connections. Where a node has several network interfaces for
bulk connections, the connections spread over them, and the others take the place of one that fails. The rules reserved
the slots of the receiver and pin those of the sender for as long as the transfer lasts.

A fetch can be aborted at any time: while it waits for a thread, connects, or receives. One node never takes all
threads, so that a node that does not answer leaves some for the others.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections import Counter, deque

import xxhash

from tokenlake.core import events
from tokenlake.core.instructions import AbortFetch, StartFetch
from tokenlake.errors import LimitReached, ProtocolRefused, TokenLakeError, Unreachable
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, peer
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import SLOT_BYTES, split_keys, unpack_slots
from tokenlake_server.arena import Arena
from tokenlake_server.blocking_sockets import NewKeys, ended, introduce, limit_wait, no_keys, size_buffer
from tokenlake_server.bulk_paths import BulkPaths
from tokenlake_server.bulk_stream import BulkStream, is_length
from tokenlake_server.contents import Contents
from tokenlake_server.driver import Driver
from tokenlake_server.handshake import PeerIdentity
from tokenlake_server.peer_addresses import Endpoint, PeerAddresses, set_tcp_options

__all__ = ["RECEIVE_THREADS", "THREADS_PER_NODE", "BulkReceiver"]

log = logging.getLogger(__name__)

RECEIVE_THREADS = 8
"""Number of threads that receive segments. A fetch from a frozen peer blocks one or two of them until its deadline; the
others serve fetches from other peers."""
THREADS_PER_NODE = RECEIVE_THREADS - 2
"""Maximum number of these threads that receive from one node at a time: the pieces of background transfers that may be
under way, in two halves each, and a large fetch."""
IDLE_CONNECTIONS = 4
"""Limit of the unused bulk connections per path to a peer that stay open for later fetches."""
STALL_S = 0.25
"""Least seconds without progress after which a transfer whose first bytes have come is given up; more than the 200 ms
after which TCP sends a lost packet again."""
PROGRESS_BYTES = 64 << 10
"""Bytes, or the rest of a piece, that count as progress. A path that passes fewer, for instance only small packets,
counts as one that passes none."""
HALVES_BYTES = 16 << 20
"""Bytes from which a fetch is split in two halves, each over a connection of its own: a single connection is limited by
one processor on each side."""
CACHED_BYTES = 1 << 20
"""Received bytes are added to the checksum in pieces of at most this size, while they are still in the processor's
cache."""


class _Job:
    """The execution of one `StartFetch`. One thread fetches each of `parts` (ranges of indices into the keys) and alone
    writes the entries of its range in `codes` and `checksums`. The control loop may call `abort` at any time."""

    def __init__(self, instruction: StartFetch, first_path: int) -> None:
        self.instruction = instruction
        self.first_path = first_path
        """Number of the path of the first part (`BulkPaths.order`)."""
        count = len(instruction.keys) // KEY_BYTES
        self.codes = bytearray([Code.LOST]) * count
        self.checksums = bytearray(CHECKSUM_BYTES * instruction.shards * count)
        self.answered: bool | None = None
        """See `FetchDone`. Set to True by any thread of the job to which bytes came, and to False by one that failed
        before, or that waited for further bytes in vain."""
        half = count // 2 if count * instruction.slot_bytes >= HALVES_BYTES else 0
        self.parts = [range(half), range(half, count)] if half else [range(count)]
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._left = len(self.parts)
        self._aborted = False

    def failed(self, *, stalled: bool) -> None:
        """Record that a part of the fetch failed. If it was not aborted, the node should have answered. `stalled`: no
        further bytes came, although the connection did not end."""
        with self._lock:
            if not self._aborted and (stalled or self.answered is None):
                self.answered = False

    @property
    def aborted(self) -> bool:
        """True once `abort` was called."""
        return self._aborted

    def rest(self, part: range) -> range:
        """The part from the first segment on that has not come."""
        return range(next((index for index in part if self.codes[index] == Code.LOST), part.stop), part.stop)

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

    def __init__(
        self,
        identity: PeerIdentity,
        addresses: PeerAddresses,
        arena: Arena,
        driver: Driver,
        new_keys: NewKeys = no_keys,
    ) -> None:
        """`new_keys`: makes the keys of connections."""
        self._identity = identity
        self._new_keys = new_keys
        self._buffers: list[bytearray] = []
        """Buffers for encrypted bytes that no thread uses now."""
        self._addresses = addresses
        self._paths = BulkPaths(addresses)
        self._next_path = itertools.count()
        self._arena = arena
        self._driver = driver
        self._jobs: dict[int, _Job] = {}
        self._changed = threading.Condition()
        """Guards the three fields below, and wakes threads without work when one of them changes."""
        self._queue: deque[tuple[_Job, range]] = deque()
        """Parts of fetches that wait for a thread, oldest first."""
        self._busy: Counter[str] = Counter()
        """Number of threads that receive from each node."""
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"receive-{number}", daemon=True)
            for number in range(RECEIVE_THREADS)
        ]
        try:
            # All threads start now: later a thread might not start, and the slots of a fetch would stay reserved.
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            raise LimitReached(f"the threads that receive segments cannot be started: {error}") from error
        self._idle: dict[tuple[str, Endpoint], list[BulkStream]] = {}
        self._idle_lock = threading.Lock()
        self.contents = Contents()
        """Takes the contents of the segments that come."""
        driver.carry_out(StartFetch, self._start)
        driver.carry_out(AbortFetch, self.abort)

    def _start(self, instruction: StartFetch) -> None:
        job = _Job(instruction, next(self._next_path))
        self._jobs[instruction.fetch] = job
        with self._changed:
            self._queue.extend((job, part) for part in job.parts)
            self._changed.notify(len(job.parts))

    def abort(self, instruction: AbortFetch) -> None:
        """Carry out an `AbortFetch`; does nothing for a transfer of another kind, or that has ended."""
        job = self._jobs.get(instruction.fetch)
        if job is None:
            return
        job.abort()
        with self._changed:
            waiting = [part for each, part in self._queue if each is job]
            for part in waiting:
                self._queue.remove((job, part))
        for _ in waiting:
            self._end_part(job)

    def _work(self) -> None:
        """Receive parts of fetches until the daemon ends, in a thread."""
        while (taken := self._take()) is not None:
            job, part = taken
            try:
                self._run(job, part)
            finally:
                with self._changed:
                    self._busy[job.instruction.node] -= 1
                    self._changed.notify()

    def _take(self) -> tuple[_Job, range] | None:
        """Wait for a part of a fetch from a node that has threads left, and take it out of the queue. Returns None when
        the daemon ends."""
        with self._changed:
            while not self._closing:
                for at, (job, part) in enumerate(self._queue):
                    node = job.instruction.node
                    if self._busy[node] < THREADS_PER_NODE:
                        del self._queue[at]
                        self._busy[node] += 1
                        return job, part
                self._changed.wait()
        return None

    def _run(self, job: _Job, part: range) -> None:
        """Fetch one part of the segments of a `StartFetch`, in a thread. In every case the last part posts `FetchDone`
        with the outcome of each segment."""
        instruction = job.instruction
        stalled = False
        try:
            self._pull_over_any(job, part)
            self._end_part(job)
            return
        except (OSError, TokenLakeError) as error:
            stalled = isinstance(error, TimeoutError)
            named = f" for request {instruction.request!r}" if instruction.request else ""
            log.info("fetch %d from %s%s ended early: %s", instruction.fetch, instruction.node, named, error)
        except Exception:
            log.exception("fetch %d from %s failed", instruction.fetch, instruction.node)
        job.failed(stalled=stalled)
        self._end_part(job)

    def _end_part(self, job: _Job) -> None:
        if job.end_part():
            fetch = job.instruction.fetch
            self._jobs.pop(fetch, None)
            self._driver.post(events.FetchDone(fetch, bytes(job.codes), bytes(job.checksums), job.answered))

    def _pull_over_any(self, job: _Job, part: range) -> None:
        """Receive the segments over the path of the part; where it fails, the rest of them over another one."""
        node, answer_s = job.instruction.node, job.instruction.answer_s
        paths = self._paths.order(node, job.first_path + job.parts.index(part))
        until = time.monotonic() + answer_s
        while True:
            path = paths.pop(0)
            now = time.monotonic()
            try:
                self._pull(job, part, path, now + (until - now) / (len(paths) + 1))
                return
            except (OSError, TokenLakeError) as error:
                if not (job.aborted and job.answered):
                    # What keeps this connection from answering may keep the idle ones from it.
                    self._drop_idle(node, path)
                if job.aborted or isinstance(error, Unreachable):
                    raise
                self._paths.failed(node, path)
                if not paths:
                    raise
                log.info("fetch %d from %s leaves the path %s: %s", job.instruction.fetch, node, path.address, error)
            part = job.rest(part)
            if time.monotonic() >= until:
                # Bytes had come over the path before.
                until = time.monotonic() + answer_s

    def _pull(self, job: _Job, part: range, path: Endpoint, until: float) -> None:
        instruction = job.instruction
        whole = False
        stream = self._borrow(instruction.node, path, job, until)
        buffer = self._buffers.pop() if self._buffers else bytearray()
        try:
            keys = instruction.keys[part.start * KEY_BYTES : part.stop * KEY_BYTES]
            pull = peer.Pull(instruction.tenant, keys, instruction.request, instruction.background)
            _limit(stream.sock, until)
            stream.send_frame(pull)
            reply = decode(peer.pulled_decoder, stream.read_frame(peer.MAX_FRAME))
            self._receive(_Inflow(stream, job, until, buffer), job, part, reply)
            whole = True
        finally:
            self._buffers.append(buffer)
            job.leave(stream.sock)
            if whole:
                self._give_back(instruction.node, path, stream)
            else:
                stream.sock.close()

    def _receive(self, inflow: _Inflow, job: _Job, part: range, reply: peer.Pulled) -> None:
        instruction = job.instruction
        per_segment = CHECKSUM_BYTES * instruction.shards
        sent = [index for index, code in zip(part, reply.codes, strict=False) if code == Code.LOCAL]
        if len(reply.codes) != len(part) or len(reply.checksums) != per_segment * len(sent):
            raise ProtocolRefused(f"node {instruction.node} answered for other segments than were requested")
        if not part and reply.slot_bytes == peer.PROBE_BYTES:
            inflow.fill(memoryview(bytearray(peer.PROBE_BYTES)))
        elif not part:
            raise ProtocolRefused(f"node {instruction.node} answered a probe with {reply.slot_bytes} bytes")
        elif not sent:
            job.answered = True
        if sent and reply.slot_bytes != instruction.slot_bytes:
            raise ProtocolRefused(
                f"node {instruction.node} sends segments of {reply.slot_bytes} bytes; expected {instruction.slot_bytes}"
            )
        if reply.contents:
            own = split_keys(instruction.keys)
            self.contents.offer(instruction.tenant, [own[index] for index in sent], reply.contents)
        places = unpack_slots(instruction.slots[part.start * SLOT_BYTES : part.stop * SLOT_BYTES])
        views = self._arena.slots(places, instruction.slot_bytes)
        for position, index in enumerate(sent):
            expected = reply.checksums[position * per_segment : (position + 1) * per_segment]
            if _receive_segment(inflow, views[index - part.start], instruction.shards) != expected:
                job.codes[index] = Code.BAD_CHECKSUM
                continue
            job.checksums[index * per_segment : (index + 1) * per_segment] = expected
            job.codes[index] = Code.LOCAL

    # -- connections

    def _borrow(self, node: str, path: Endpoint, job: _Job, until: float) -> BulkStream:
        """An idle bulk connection to `node` over `path`, else a new one, made until the time `until`. The caller owns
        it, and an abort of `job` shuts it down."""
        idle = self._take_idle(node, path)
        sock = idle.sock if idle is not None else socket.socket(path.family, socket.SOCK_STREAM)
        try:
            # From here on an abort also ends the attempt to connect: it shuts the socket down.
            job.use(sock)
            if idle is not None:
                return idle
            _limit(sock, until)
            set_tcp_options(sock)
            try:
                sock.connect(path.address)
            except OSError:
                self._addresses.failed(node, path)
                raise
            _limit(sock, until)
            keys = introduce(sock, self._identity, node, "bulk", self._new_keys)
            size_buffer(sock, socket.SO_RCVBUF, encrypted=keys is not None)
            return BulkStream(sock, keys)
        except BaseException:
            job.leave(sock)
            sock.close()
            raise

    def _take_idle(self, node: str, path: Endpoint) -> BulkStream | None:
        with self._idle_lock:
            idle = self._idle.get((node, path))
            while idle:
                stream = idle.pop()
                if not _dropped(stream.sock):
                    return stream
                stream.sock.close()
        return None

    def _drop_idle(self, node: str, path: Endpoint) -> None:
        with self._idle_lock:
            idle = self._idle.pop((node, path), [])
        for stream in idle:
            stream.sock.close()

    def _give_back(self, node: str, path: Endpoint, stream: BulkStream) -> None:
        with self._idle_lock:
            if node in self._addresses:
                idle = self._idle.setdefault((node, path), [])
                if len(idle) < IDLE_CONNECTIONS:
                    idle.append(stream)
                    return
        stream.sock.close()

    def follow(self) -> None:
        """Follow a change of the addresses: close the idle connections with nodes that left."""
        with self._idle_lock:
            left = [(node, path) for node, path in self._idle if node not in self._addresses]
        for node, path in left:
            self._drop_idle(node, path)

    def close(self) -> None:
        """Abort all fetches and wait for the threads that receive."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for job in list(self._jobs.values()):
            job.abort()
        for thread in self._threads:
            thread.join()
        with self._idle_lock:
            for stream in [stream for idle in self._idle.values() for stream in idle]:
                stream.sock.close()
            self._idle.clear()


class _Inflow:
    """The bytes of segments that come to a connection, behind the header of a reply."""

    def __init__(self, stream: BulkStream, job: _Job, until: float, buffer: bytearray) -> None:
        """`until`: the time at which the first bytes must have come. `buffer`: for encrypted bytes."""
        self._stream = stream
        self._sock = sock = stream.sock
        self._buffer = buffer
        self._job = job
        self._stall_s = max(STALL_S, job.instruction.answer_s)
        self._until = until
        self._since = 0
        """Bytes that came since the last progress."""
        self._begun = False
        """True after the first progress."""
        sock.settimeout(None)
        limit_wait(sock, "SO_RCVTIMEO", until - time.monotonic())

    def fill(self, target: memoryview) -> None:
        """Fill `target` with the next bytes. Raises OSError: ConnectionError when the connection ends first,
        TimeoutError when no progress is made in time; and `ProtocolRefused` for an encrypted record that is not the
        next one."""
        self._stream.fill(target, self._receive, self._buffer)

    def _receive(self, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            try:
                received = self._sock.recv_into(target[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                # The kernel's timeout has passed without a byte.
                received = -1
            if not received:
                raise ended()
            filled += max(0, received)
            self._since += max(0, received)
            if self._since >= PROGRESS_BYTES or (filled == len(target) and not is_length(target)):
                self._progress()
            elif time.monotonic() >= self._until:
                raise TimeoutError("the node did not send in time")

    def _progress(self) -> None:
        self._since = 0
        self._until = time.monotonic() + self._stall_s
        if not self._begun:
            self._begun = self._job.answered = True
            limit_wait(self._sock, "SO_RCVTIMEO", self._stall_s)


def _receive_segment(inflow: _Inflow, segment: memoryview, shards: int) -> bytes:
    """Fill `segment` with the next bytes and return the checksums of its shards, concatenated. Each piece of at most
    `CACHED_BYTES` is hashed as soon as it is received. Raises the errors of `_Inflow.fill`."""
    size = len(segment) // shards
    if size > CACHED_BYTES:
        digests = [_receive_shard(inflow, segment[at : at + size]) for at in range(0, len(segment), size)]
    else:
        digests = []
        step = CACHED_BYTES // size * size
        for start in range(0, len(segment), step):
            piece = segment[start : start + step]
            inflow.fill(piece)
            digests += [xxhash.xxh3_64_intdigest(piece[at : at + size]) for at in range(0, len(piece), size)]
    return b"".join(digest.to_bytes(CHECKSUM_BYTES, "little") for digest in digests)


def _receive_shard(inflow: _Inflow, shard: memoryview) -> int:
    digest = xxhash.xxh3_64()
    for at in range(0, len(shard), CACHED_BYTES):
        piece = shard[at : at + CACHED_BYTES]
        inflow.fill(piece)
        digest.update(piece)
    return digest.intdigest()


def _limit(sock: socket.socket, until: float) -> None:
    """Let the calls of `sock` raise TimeoutError at the time `until`. Raises TimeoutError after that time."""
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the node did not answer in time")
    sock.settimeout(left_s)


def _dropped(sock: socket.socket) -> bool:
    """True when the other side closed an idle connection, or sent bytes although nothing was requested."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
