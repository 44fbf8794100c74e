"""Receives segments' bytes from other daemons, over blocking sockets in a bounded number of threads.

The receiver sends one `Pull` frame; the sender (`tokenlake_server.bulk.sender`) replies with one `Pulled` frame, behind
which a transport (`tokenlake_server.bulk.transport`) brings the bytes. A large fetch is split in two halves over two
connections. Where a node has several network interfaces for bulk connections, the connections spread over them, and the
others take the place of one that fails. The rules reserved the slots of the receiver and pin those of the sender for as
long as the transfer lasts.

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
from collections.abc import Callable, Sequence
from functools import partial

import xxhash

from tokenlake.content import content_limit
from tokenlake.core import events
from tokenlake.core.instructions import AbortFetch, StartFetch
from tokenlake.errors import LimitReached, ProtocolRefused, TokenLakeError, Unreachable
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, peer
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import SLOT_BYTES, split_keys, unpack_slots
from tokenlake_server.bulk.blocking_sockets import NewKeys, no_keys
from tokenlake_server.bulk.choice import Transports
from tokenlake_server.bulk.connections import BulkConnections, limit
from tokenlake_server.bulk.paths import BulkPaths
from tokenlake_server.bulk.stream import BulkStream
from tokenlake_server.bulk.tcp import Tcp
from tokenlake_server.bulk.transport import Incoming, Inflow, ReadFailed, Settling
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.contents import Contents
from tokenlake_server.loop.driver import Driver
from tokenlake_server.peers.addresses import Endpoint, PeerAddresses
from tokenlake_server.peers.handshake import PeerIdentity

log = logging.getLogger(__name__)

RECEIVE_THREADS = 8
"""Number of threads that receive segments. A fetch from a frozen peer blocks one or two of them until its deadline; the
others serve fetches from other peers."""
THREADS_PER_NODE = RECEIVE_THREADS - 2
"""Maximum number of these threads that receive from one node at a time: the pieces of background transfers that may be
under way, in two halves each, and a large fetch."""
STALL_S = 0.25
"""Least seconds without progress after which a transfer whose first bytes have come is given up; more than the 200 ms
after which TCP sends a lost packet again."""
HALVES_BYTES = 16 << 20
"""Bytes from which a fetch is split in two halves, each over a connection of its own: a single connection is limited by
one processor on each side."""
CACHED_BYTES = 1 << 20
"""Received bytes are added to the checksum in pieces of at most this size, while they are still in the processor's
cache."""


class _Job:
    """The execution of one `StartFetch`. One thread fetches each of `parts` (indices of keys) and alone writes the
    entries of its indices in `codes`, `checksums` and `held`. The control loop may call `abort` at any time."""

    def __init__(self, instruction: StartFetch, first_path: int) -> None:
        self.instruction = instruction
        self.first_path = first_path
        """Number of the path of the first part (`BulkPaths.order`)."""
        count = len(instruction.keys) // KEY_BYTES
        self.codes = bytearray([Code.LOST]) * count
        self.checksums = bytearray(CHECKSUM_BYTES * instruction.shards * count)
        self.held = bytearray(count)
        """See `FetchDone`."""
        self.answered: bool | None = None
        """See `FetchDone`. A thread of the job sets it to True when it receives bytes, and to False when it fails
        before that, or when no further bytes are received within the limit."""
        half = count // 2 if count * instruction.slot_bytes >= HALVES_BYTES else 0
        self.parts = [range(half), range(half, count)] if half else [range(count)]
        self._lock = threading.Lock()
        self._used: dict[object, Callable[[], None]] = {}
        """The resources that threads of the fetch wait for, and how such a wait is ended."""
        self._holding: set[Settling] = set()
        """Reads that may still write into held slots."""
        self._left = len(self.parts)
        self._aborted = False

    def failed(self, *, stalled: bool) -> None:
        """Record that a part of the fetch failed. If it was not aborted, the node should have answered. `stalled`: no
        further bytes came, although the connection did not end."""
        with self._lock:
            if not self._aborted and (stalled or self.answered is None):
                self.answered = False

    def began(self) -> None:
        """Record that bytes have come."""
        self.answered = True

    @property
    def aborted(self) -> bool:
        """True once `abort` was called."""
        return self._aborted

    def rest(self, part: Sequence[int]) -> list[int]:
        """The segments of the part that have not come, and into whose slots bytes may be written."""
        first = next((at for at, index in enumerate(part) if self.codes[index] == Code.LOST), len(part))
        return [index for index in part[first:] if not self.held[index]]

    def use(self, resource: object, end: Callable[[], None]) -> None:
        """Record that the fetch waits for the resource: from now on `abort` calls `end`. Raises TimeoutError when the
        fetch was aborted before."""
        with self._lock:
            self._used[resource] = end
            if self._aborted:
                raise TimeoutError("aborted")

    def use_socket(self, sock: socket.socket) -> None:
        """As `use`: an abort shuts the socket down. Closing it would not wake the thread that reads it."""
        self.use(sock, partial(_shut_down, sock))

    def leave(self, resource: object) -> None:
        """Record that the fetch does not use the resource any more: from now on `abort` leaves it alone."""
        with self._lock:
            self._used.pop(resource, None)

    def hold(self, sent: Sequence[int], read: Settling, positions: range) -> None:
        """Record that a read may still write into the slots of the segments at these positions of `sent`."""
        with self._lock:
            self._holding.add(read)
        for position in positions:
            self.held[sent[position]] = self.codes[sent[position]] != Code.LOCAL

    def end_part(self) -> bool:
        """Count that one part of the fetch has ended. Returns whether it was the last part."""
        with self._lock:
            self._left -= 1
            return not self._left

    def on_settled(self, call: Callable[[], None]) -> None:
        """Call `call` once when nothing is written into the held slots any more. Called after the last part."""
        left = list(self._holding)

        def settled(read: Settling) -> None:
            with self._lock:
                self._holding.discard(read)
                last = not self._holding
            if last:
                call()

        for read in left:
            read.on_settled(partial(settled, read))

    def abort(self) -> None:
        """Abort the fetch: end the waits of its threads, so that no more bytes are written into the slots, but for
        those that are held."""
        with self._lock:
            self._aborted = True
            for end in self._used.values():
                end()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class BulkReceiver:
    """Receives segments from other nodes: carries out the rules' instructions `StartFetch`, and `AbortFetch`, which the
    disk tier passes on to `abort`."""

    def __init__(
        self,
        identity: PeerIdentity,
        addresses: PeerAddresses,
        arena: Arena,
        driver: Driver,
        new_keys: NewKeys = no_keys,
        transports: Transports | None = None,
        contents: Contents | None = None,
    ) -> None:
        """`new_keys` makes the keys of connections. `transports`: without them bytes are received over TCP. `contents`
        takes the contents of the segments that are received."""
        self.connections = BulkConnections(identity, addresses, new_keys)
        self._transports = transports or Transports(Tcp(arena))
        self._buffers: list[bytearray] = []
        """Buffers for encrypted bytes that no thread uses now."""
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
        self._contents = contents or Contents()
        driver.carry_out(StartFetch, self._start)

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
            held = bytes(job.held) if any(job.held) else b""
            self._driver.post(events.FetchDone(fetch, bytes(job.codes), bytes(job.checksums), job.answered, held))
            if held:
                job.on_settled(lambda: self._driver.post(events.FetchSettled(fetch)))

    def _pull_over_any(self, job: _Job, part: range) -> None:
        """Receive the segments over the path of the part; where it fails, the rest of them over another one. Where the
        transport fails and not the path, the rest comes over TCP."""
        node, answer_s = job.instruction.node, job.instruction.answer_s
        offer = self._transports.offer(node) if part else ("", 0)
        paths = self._paths.order(node, job.first_path + job.parts.index(part))
        until = time.monotonic() + answer_s
        rest: Sequence[int] = part
        while True:
            path = paths.pop(0)
            now = time.monotonic()
            try:
                self._pull(job, rest, path, now + (until - now) / (len(paths) + 1 + bool(offer[0])), offer)
                return
            except (OSError, TokenLakeError) as error:
                if isinstance(error, ReadFailed) and not job.aborted:
                    offer = "", 0
                    paths.insert(0, path)
                else:
                    if not (job.aborted and job.answered):
                        # The cause of the failure may affect the idle connections to the node as well.
                        self.connections.drop_idle(node, path)
                    if job.aborted or isinstance(error, Unreachable):
                        raise
                    self._paths.failed(node, path)
                    if not paths:
                        raise
                log.info("fetch %d from %s leaves the path %s: %s", job.instruction.fetch, node, path.address, error)
            rest = job.rest(rest)
            if part and not rest:
                return
            if time.monotonic() >= until:
                # Bytes were received over this path before, so that the node gets the time for an answer again.
                until = time.monotonic() + answer_s

    def _pull(self, job: _Job, part: Sequence[int], path: Endpoint, until: float, offer: tuple[str, int]) -> None:
        instruction = job.instruction
        whole = False
        stream = self.connections.borrow(instruction.node, path, until, job.use_socket)
        buffer = self._buffers.pop() if self._buffers else bytearray()
        try:
            keys = b"".join(instruction.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES] for index in part)
            agent, version = offer
            pull = peer.Pull(
                instruction.tenant,
                keys,
                instruction.request,
                instruction.background,
                agent=agent,
                version=version,
                trace=instruction.trace,
            )
            limit(stream.sock, until)
            stream.send_frame(pull)
            reply = decode(peer.pulled_decoder, stream.read_frame(peer.MAX_FRAME))
            self._receive(stream, buffer, job, part, reply, until)
            whole = True
        finally:
            self._buffers.append(buffer)
            job.leave(stream.sock)
            if whole:
                self.connections.give_back(instruction.node, path, stream)
            else:
                stream.sock.close()

    def _receive(
        self, stream: BulkStream, buffer: bytearray, job: _Job, part: Sequence[int], reply: peer.Pulled, until: float
    ) -> None:
        instruction = job.instruction
        per_segment = CHECKSUM_BYTES * instruction.shards
        sent = [index for index, code in zip(part, reply.codes, strict=False) if code == Code.LOCAL]
        if len(reply.codes) != len(part) or len(reply.checksums) != per_segment * len(sent):
            raise ProtocolRefused(f"node {instruction.node} answered for other segments than were requested")
        if not part and reply.slot_bytes != peer.PROBE_BYTES:
            raise ProtocolRefused(f"node {instruction.node} answered a probe with {reply.slot_bytes} bytes")
        if part and not sent:
            job.answered = True
        if sent and reply.slot_bytes != instruction.slot_bytes:
            raise ProtocolRefused(
                f"node {instruction.node} sends segments of {reply.slot_bytes} bytes; expected {instruction.slot_bytes}"
            )
        if reply.contents:
            own = split_keys(instruction.keys)
            self._contents.offer(
                instruction.tenant,
                [own[index] for index in sent],
                reply.contents,
                content_limit(instruction.slot_bytes),
            )
        if not part:
            slots = [memoryview(bytearray(peer.PROBE_BYTES))]
        else:
            packed = instruction.slots
            places = unpack_slots(b"".join(packed[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] for index in sent))
            slots = self._arena.slots(places, instruction.slot_bytes)
        incoming = Incoming(
            instruction.node,
            stream,
            reply,
            slots,
            until,
            max(STALL_S, instruction.answer_s),
            job.began,
            job.use,
            partial(job.hold, sent),
            buffer,
        )
        with self._transports.of(reply).receive(incoming) as inflow:
            if not part:
                inflow.fill(slots[0])
            for position, index in enumerate(sent):
                expected = reply.checksums[position * per_segment : (position + 1) * per_segment]
                if _receive_segment(inflow, slots[position], instruction.shards) == expected:
                    job.checksums[index * per_segment : (index + 1) * per_segment] = expected
                    job.codes[index] = Code.LOCAL
                else:
                    job.codes[index] = Code.BAD_CHECKSUM
                inflow.taken(position + 1)

    def follow(self) -> None:
        """Follow a change of the addresses: close the idle connections with nodes that left."""
        self.connections.follow()

    def close(self) -> None:
        """Abort all fetches and wait for the threads that receive."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for job in list(self._jobs.values()):
            job.abort()
        for thread in self._threads:
            thread.join()
        self.connections.close()


def _receive_segment(inflow: Inflow, segment: memoryview, shards: int) -> bytes:
    """Fill `segment` with the next bytes and return the checksums of its shards, concatenated. Each piece of at most
    `CACHED_BYTES` is hashed as soon as it is received. Raises the errors of `Inflow.fill`."""
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


def _receive_shard(inflow: Inflow, shard: memoryview) -> int:
    digest = xxhash.xxh3_64()
    for at in range(0, len(shard), CACHED_BYTES):
        piece = shard[at : at + CACHED_BYTES]
        inflow.fill(piece)
        digest.update(piece)
    return digest.intdigest()
