"""Reads out of the memory of other nodes with NIXL: RDMA between machines, the kernel's copy between processes of one.

One thread owns the agent (`nixl_agent`) and polls it while this node reads, or is read. The agents of other nodes come
over the control connections (`MemoryAgent`). A node is read only after a probe, a read of `PROBE_BYTES` into memory
that is no slot, has brought the right bytes; a read that failed, or made no progress, takes that back, and segments
come over TCP until a later probe.

A read that is under way can be neither stopped nor released. Its slots are held (`Incoming.hold`) until it is done. One
that failed, or is not done `SETTLE_S` after its reader left, ends the life of the agent, and with it all reads:

::

    life n: lends and reads -> lends nothing more, other nodes use TCP, at most RETIRE_S -> agent ends, slots are free
    life n + 1: another name; the memory is registered again, and other nodes are told
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.memory.region import RegionShape
from tokenlake.metrics import Level, Metric
from tokenlake.where import device_of
from tokenlake.wire import peer
from tokenlake.wire.frames import decode
from tokenlake.wire.places import HOST, Place, unpack_places
from tokenlake.wire.slots import SlotRef
from tokenlake_server.bulk.connections import BulkConnections
from tokenlake_server.bulk.transport import SEND_STALL_S, Incoming, Outgoing, ReadFailed
from tokenlake_server.engines.arena import Arena
from tokenlake_server.nixl.agent import Agent, NotStarted, Span, State
from tokenlake_server.nixl.read import Piece, Read, ReadInflow, address_of, pieces_of
from tokenlake_server.nixl.remote import ProbeMemory, Remote

log = logging.getLogger(__name__)

WINDOW = 2
"""Number of pieces of one reader that are under way at a time."""
PROBE_S = 1.0
"""Seconds within which a probe must have come. The first one connects the two agents."""
PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Seconds after a failure before a node is probed again, and the most; each pause is twice as long as that before,
until a probe has come."""
SETTLE_S = 2.0
"""Seconds for which a read that its reader has left may go on before the agent's life ends."""
RETIRE_S = 2.0
"""Seconds for which the reads of other nodes, and other reads, may go on when the life of an agent ends."""
BIRTH_S = 60.0
"""Seconds between two attempts to make an agent, or to register memory with it, where one failed."""
SPIN_S = 20e-6
"""A poll that took longer has moved bytes, and the next one follows at once."""
SHORT_S, LONG_S = 50e-6, 5e-3
"""Seconds between two polls while bytes are awaited, and after `PATIENCE_S` without any."""
PATIENCE_S = 0.05

NODES = Metric("tokenlake_nixl_nodes", "Other nodes whose memory is read with NIXL now", kind="gauge")
LIVES = Metric("tokenlake_nixl_agents", "NIXL agents of this daemon since its start", kind="gauge")
BYTES = Metric("tokenlake_nixl_bytes", "Bytes read with NIXL since the start of the daemon", kind="gauge")
FAILURES = Metric("tokenlake_nixl_failures", "Reads and probes with NIXL that failed since the start", kind="gauge")
UNSETTLED = Metric(
    "tokenlake_nixl_unsettled_reads", "Reads that were given up and may still write; their slots wait", kind="gauge"
)


class Nixl:
    """The transport over NIXL; see `Transport`. `heard`, `lost`, `gauges` and `close` are called on the control loop,
    or while it does not run; the other methods by any thread."""

    def __init__(
        self,
        node: str,
        incarnation: int,
        arena: Arena,
        networks: Sequence[str],
        make: Callable[[str], Agent] = Agent,
    ) -> None:
        """`networks`: the networks by which this node can be read;
        `make`: makes an agent with a name."""
        self._make = make
        self._name = f"{node}/{incarnation}"
        self._networks = tuple(networks)
        self._arena = arena
        self.tell: Callable[[], None] = lambda: None
        """Called, in the agent's thread, when `introduction` has changed."""
        self._changed = threading.Condition()
        """Guards the fields below, and wakes the two threads."""
        self._orders: deque[Callable[[], None]] = deque()
        """Work for the agent's thread."""
        self._remotes: dict[str, Remote] = {}
        self._memory: dict[int, Span] = {}
        """The memory of the regions; each agent registers all of it."""
        self._described: frozenset[int] = frozenset()
        """The regions that `_introduction` describes; only these are lent."""
        self._lent = 0
        """Number of answers with places that are under way, during which other nodes read the memory of this one."""
        self._introduction: peer.MemoryAgent | None = None
        """The description of the present agent for other nodes; None while no memory of this node may be read."""
        self._closing = False
        self._probe = ProbeMemory()
        # Only the agent's thread changes the fields from here to `_failures`; `gauges` reads some of them.
        self._agent: Agent | None = None
        self._lives = 0
        self._version = 0
        self._born_at = -math.inf
        """The time of the last attempt to make an agent."""
        self._known: dict[str, str] = {}
        """The agents that the agent knows, by node: an agent that it knows is forgotten before it is met again."""
        self._reads: list[Read] = []
        self._bytes = 0
        self._failures = 0
        self._thread = threading.Thread(target=self._work, name="nixl", daemon=True)
        self._thread.start()
        self._prober: threading.Thread | None = None

    def start(self, connections: BulkConnections) -> None:
        """Begin to probe other nodes."""
        self._prober = threading.Thread(target=self._keep_probing, args=(connections,), name="nixl-probe", daemon=True)
        self._prober.start()

    @property
    def introduction(self) -> peer.MemoryAgent:
        """The message by which other nodes learn how to read this one now."""
        return self._introduction or peer.MemoryAgent("", 0, (), b"")

    # -- the side that reads

    def offer(self, node: str) -> tuple[str, int]:
        """The agent of `node` and its version, if its memory can be read now; else an empty name."""
        with self._changed:
            remote = self._remotes.get(node)
            return (remote.told.agent, remote.told.version) if remote is not None and remote.ready else ("", 0)

    @contextlib.contextmanager
    def receive(self, incoming: Incoming) -> Iterator[ReadInflow]:
        """See `Transport`."""
        agent, _ = self.offer(incoming.node)
        if not agent:
            raise ReadFailed("the node's memory is not read any more")
        read = Read(incoming.node, agent, pieces_of(incoming))
        size = incoming.answer.slot_bytes
        incoming.use(read, read.cancel)
        self._order(lambda: self._reads.append(read))
        try:
            yield ReadInflow(incoming, read)
        except ReadFailed as error:
            self._failed(incoming.node, str(error))
            raise
        finally:
            left = read.end()
            if left:
                incoming.hold(read, range(left.start // size, -(-left.stop // size)))

    # -- the side that is read

    def lends(self, pull: peer.Pull, slots: Sequence[SlotRef]) -> bool:
        """True if the reader of these slots can read them by itself, with what it knows of this node."""
        with self._changed:
            known = self._introduction
            return (
                known is not None
                and (pull.agent, pull.version) == (known.agent, known.version)
                and all(slot.region in self._described for slot in slots)
                and (bool(slots) or (not pull.keys and pull.probe_bytes == peer.PROBE_BYTES))
            )

    def send(self, outgoing: Outgoing) -> None:
        """See `Transport`."""
        places = self._places(outgoing)
        answer = peer.Pulled(
            outgoing.answer.slot_bytes,
            outgoing.answer.codes,
            outgoing.answer.checksums or self._probe.checksum,
            outgoing.answer.contents,
            b"".join(place.pack() for place in places),
        )
        sock = outgoing.stream.sock
        with self._lending():
            outgoing.stream.send_frame(answer)
            taken = 0
            while taken < len(places):
                left_s = outgoing.until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"the reader has not taken all segments after {outgoing.limit_s:.0f} s")
                sock.settimeout(min(SEND_STALL_S, left_s))
                message = decode(peer.taken_decoder, outgoing.stream.read_frame(peer.MAX_FRAME))
                if not taken < message.count <= len(places):
                    raise ProtocolRefused(f"{message.count} of {len(places)} segments are taken, after {taken}")
                taken = message.count
        sock.settimeout(None)

    def _places(self, outgoing: Outgoing) -> list[Place]:
        size = outgoing.answer.slot_bytes
        if not outgoing.answer.codes:
            return [Place(self._probe.source[0], size, 0, HOST)]
        with self._changed:
            spans = [self._memory[slot.region] for slot in outgoing.slots]
        shapes = {slot.region: RegionShape(self._arena.region(slot.region).nbytes, size) for slot in outgoing.slots}
        return [
            Place(base + shapes[slot.region].offset(slot.slot), size, slot.generation, device)
            for slot, (base, _, device) in zip(outgoing.slots, spans, strict=True)
        ]

    @contextlib.contextmanager
    def _lending(self) -> Iterator[None]:
        with self._changed:
            self._lent += 1
        # The reader may connect its agent to this one: the polls are frequent at first.
        self._order(lambda: None)
        try:
            yield
        finally:
            with self._changed:
                self._lent -= 1

    # -- regions

    def remove(self, region: int) -> None:
        """The memory of a region goes: it is not lent any more when this returns. Blocks, for some milliseconds, or
        while an agent is replaced."""
        with self._changed:
            span = self._memory.pop(region, None)
            self._described -= {region}
        if span is not None:
            self._order_and_wait(lambda: self._deregister(span))

    def add(self, region: int) -> None:
        """Register the memory of a region that has slots. Other nodes may read it once they have received its
        description."""
        span = self._span(region)

        def register() -> None:
            # An agent that cannot register it is replaced, and the next one registers all memory.
            with self._changed:
                self._memory[region] = span
            if self._agent is None:
                return
            try:
                self._agent.register(span)
            except OSError as error:
                self._retire(self._agent, str(error))
            else:
                self._describe()

        self._order(register)

    def _span(self, region: int) -> Span:
        made = self._arena.region(region)
        return address_of(made.map), made.nbytes, device_of(made.where)

    def _deregister(self, span: Span) -> None:
        if self._agent is None:
            return
        try:
            self._agent.deregister(span)
        except OSError as error:
            self._retire(self._agent, str(error))

    # -- other nodes

    def heard(self, node: str, message: peer.MemoryAgent) -> None:
        """Take the message by which a node says how its memory can be read."""
        with self._changed:
            before = self._remotes.pop(node, None)
            if message.agent and set(message.networks) & set(self._networks):
                self._remotes[node] = Remote(message, before)
        self._order(self._meet_all)

    def lost(self, node: str) -> None:
        """Forget the agent of a node, whose control connection has ended."""
        with self._changed:
            self._remotes.pop(node, None)

        def forget() -> None:
            with self._changed:
                if node in self._remotes:  # It is connected again: `_meet_all` forgets its agent and meets it.
                    return
            self._forget(node, "the connection with the node has ended")

        self._order(forget)

    def gauges(self) -> list[Level]:
        """The gauges of NIXL, for the metrics page."""
        with self._changed:
            ready = sum(remote.ready for remote in self._remotes.values())
        unsettled = sum(bool(read.ended_at) for read in list(self._reads))
        return [
            Level(NODES, (), ready),
            Level(LIVES, (), self._lives),
            Level(BYTES, (), self._bytes),
            Level(FAILURES, (), self._failures),
            Level(UNSETTLED, (), unsettled),
        ]

    def close(self) -> None:
        """End both threads and the agent. All reads have ended."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._prober is not None:
            self._prober.join()

    def _failed(self, node: str, reason: str) -> None:
        with self._changed:
            self._failures += 1
            remote = self._remotes.get(node)
            if remote is None:
                return
            was, remote.proven = remote.ready, False
            remote.failures += 1
            pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(remote.failures - 1, 16))
            remote.probe_at = time.monotonic() + pause_s
            self._changed.notify_all()
        if was or remote.failures == 1:
            log.warning("segments of %s come over TCP for at least %.0f s, not with NIXL: %s", node, pause_s, reason)

    # -- the agent's thread

    def _order(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._orders.append(work)
            self._changed.notify_all()

    def _order_and_wait(self, work: Callable[[], None]) -> None:
        done = threading.Event()

        def working() -> None:
            try:
                work()
            finally:
                done.set()

        self._order(working)
        while not done.wait(0.1):
            if not self._thread.is_alive():
                return

    def _work(self) -> None:
        """Make the agent, carry out the work for it, and poll its reads until the daemon ends. Runs in a thread."""
        moved_at = 0.0
        while self._wait_for_work():
            began = time.perf_counter()
            ordered = len(self._orders)
            moved = ordered > 0
            try:
                for _ in range(ordered):
                    # An order that raises leaves those behind it in the queue.
                    self._orders.popleft()()
                if self._agent is None:
                    self._be_born()
                else:
                    moved |= self._poll(self._agent)
            except Exception as error:
                log.exception("NIXL failed")
                self._die(str(error))
                self.tell()
            now = time.perf_counter()
            if moved or now - began > SPIN_S:
                moved_at = now
            elif self._agent is not None:
                time.sleep(SHORT_S if now - moved_at < PATIENCE_S else LONG_S)
        self._die("the daemon stops")

    def _wait_for_work(self) -> bool:
        """Wait for work: orders, bytes that are awaited, or an agent to make. False when the daemon ends."""
        with self._changed:
            while not self._closing and not self._orders:
                wait_s = None if self._agent is not None else max(0.0, self._born_at + BIRTH_S - time.monotonic())
                if wait_s == 0 or self._reads or (self._lent and self._agent is not None):
                    break
                self._changed.wait(wait_s)
            return not self._closing

    def _be_born(self) -> None:
        """Make the agent of a new life."""
        now = time.monotonic()
        if now - self._born_at < BIRTH_S:
            self._fail_all("there is no agent")
            return
        self._lives += 1
        self._born_at = now
        agent = None
        try:
            agent = self._make(f"{self._name}/{self._lives}")
            agent.register(self._probe.span)
            for span in list(self._memory.values()):
                agent.register(span)
        except OSError as error:
            log.error("this node and others read from each other over TCP, not with NIXL: %s", error)
            if agent is not None:
                agent.end()
            self._fail_all(str(error))
            return
        self._agent = agent
        self._describe()
        self._meet_all()

    def _describe(self) -> None:
        """Tell other nodes how to read this one from now on."""
        if self._agent is None:
            return
        self._version += 1
        description = self._agent.description()
        if len(description) > peer.MAX_DESCRIPTION:
            log.error("other nodes read from this one over TCP: NIXL's keys take %d bytes", len(description))
            return
        with self._changed:
            self._introduction = peer.MemoryAgent(self._agent.name, self._version, self._networks, description)
            self._described = frozenset(self._memory)
        self.tell()

    def _meet_all(self) -> None:
        """Let the agent know the agents of other nodes that it does not know yet, or not as they are now."""
        if self._agent is None:
            return
        now = time.monotonic()
        with self._changed:
            unmet = [
                (node, remote)
                for node, remote in self._remotes.items()
                # The reads that are under way end soon, or end the life of the agent.
                if not remote.met and remote.probe_at <= now and all(read.node != node for read in self._reads)
            ]
        for node, remote in unmet:
            if node in self._known:
                self._agent.forget(self._known.pop(node))
            try:
                name = self._agent.meet(remote.told.description)
                if name != remote.told.agent:
                    self._agent.forget(name)
                    raise OSError(f"its agent calls itself {name}, and the node {remote.told.agent}")
            except OSError as error:
                self._failed(node, str(error))
                continue
            self._known[node] = name
            with self._changed:
                remote.met = True
                self._changed.notify_all()

    def _forget(self, node: str, reason: str) -> None:
        for read in self._reads:
            if read.node == node:
                read.fail(reason)
        if self._agent is not None and node in self._known:
            self._agent.forget(self._known.pop(node))

    def _poll(self, agent: Agent) -> bool:
        """Poll all reads, and start their next pieces. Returns True if bytes were received, or a piece was started."""
        moved = False
        for read in self._reads:
            if not read.failed:
                moved |= self._advance(agent, read)
        if not self._reads:
            agent.progress()
        now = time.monotonic()
        for read in list(self._reads):
            if not read.handles and (read.whole or read.ended_at):
                self._reads.remove(read)
                read.settle()
                self._meet_all()
            elif read.ended_at and (now - read.ended_at > SETTLE_S or read.failed):
                # NIXL does not tell whether more bytes come.
                self._failed(read.node, read.failed or "a read did not end")
                self._retire(agent, f"a read from {read.node} cannot be stopped")
                break
        return moved

    def _advance(self, agent: Agent, read: Read) -> bool:
        """Take the pieces that have come, and start further ones. Returns whether there were any."""
        moved = False
        while read.handles:
            handle, stop = read.handles[0]
            state = agent.state(handle)
            if state is State.FAILED:
                self._forget(read.node, "the node's agent does not answer any more")
                return True
            if state is State.UNDER_WAY:
                break
            agent.release(handle)
            read.handles.popleft()
            self._bytes += read.came(stop)
            moved = True
        while len(read.handles) < WINDOW and (piece := read.next_piece()) is not None:
            moved = True
            try:
                read.handles.append((agent.read(read.agent, piece.here, piece.there), piece.stop))
            except NotStarted as error:
                if not read.handles:
                    read.not_started()
                read.fail(str(error))
            except OSError as error:
                read.handles.append((0, piece.stop))
                read.fail(str(error))
        return moved

    def _retire(self, agent: Agent, reason: str) -> None:
        """End this life: let the reads of others end, then the agent, and with it all reads."""
        log.warning("NIXL's agent is replaced, and segments come over TCP meanwhile: %s", reason)
        with self._changed:
            self._introduction = None
            for remote in self._remotes.values():
                remote.met, remote.proven = False, False
        self.tell()
        until = time.monotonic() + RETIRE_S
        while time.monotonic() < until and (self._lent or any(not read.ended_at for read in self._reads)):
            for read in self._reads:
                if not read.failed:
                    self._advance(agent, read)
            agent.progress()
            time.sleep(SHORT_S)
        self._die(reason)
        self._born_at = -math.inf

    def _die(self, reason: str) -> None:
        with self._changed:
            self._introduction = None
            for remote in self._remotes.values():
                remote.met, remote.proven = False, False
        if self._agent is not None:
            self._agent.end()
            self._agent = None
        self._known.clear()
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        """End all reads with `reason`. To be called when there is no agent, so that no piece is under way."""
        reads, self._reads = self._reads, []
        for read in reads:
            read.handles.clear()
            read.fail(reason)
            read.settle()

    # -- probes

    def _keep_probing(self, connections: BulkConnections) -> None:
        """Probe the nodes that are due, one after the other, in a thread."""
        while (due := self._next_due()) is not None:
            node, remote = due
            if remote.met:
                self._probe_node(node, remote, connections)
            else:
                self._order_and_wait(self._meet_all)
                with self._changed:
                    if not remote.met and not self._closing:
                        self._changed.wait(PATIENCE_S)

    def _next_due(self) -> tuple[str, Remote] | None:
        """Wait for a node that is to be probed, or to be met again after a failure. None when the daemon ends."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                # The agent's thread meets by itself a node that has not failed.
                waiting = [
                    each for each in self._remotes.items() if not each[1].proven and (each[1].met or each[1].failures)
                ]
                due = next((each for each in waiting if each[1].probe_at <= now), None)
                if due is not None:
                    return due
                self._changed.wait(min((remote.probe_at - now for _, remote in waiting), default=None))
        return None

    def _probe_node(self, node: str, remote: Remote, connections: BulkConnections) -> None:
        until = time.monotonic() + PROBE_S
        try:
            with connections.opened(node, until) as stream:
                ask = peer.Pull("", b"", agent=remote.told.agent, version=remote.told.version)
                stream.send_frame(ask)
                answer = decode(peer.pulled_decoder, stream.read_frame(peer.MAX_FRAME))
                places = unpack_places(answer.places)
                if [place.length for place in places] != [peer.PROBE_BYTES]:
                    raise OSError("it does not let its memory be read now")
                source = (places[0].address, peer.PROBE_BYTES, places[0].device)
                read = Read(node, remote.told.agent, [Piece([self._probe.sink], [source], peer.PROBE_BYTES)])
                self._order(lambda: self._reads.append(read))
                try:
                    read.wait(peer.PROBE_BYTES, until, 0.0)
                finally:
                    read.end()
                if self._probe.received() != answer.checksums:
                    raise OSError("a probe has brought wrong bytes")
                stream.send_frame(peer.Taken(1))
        except (OSError, TokenLakeError, ValueError) as error:
            self._failed(node, str(error))
            return
        with self._changed:
            remote.proven, remote.failures = True, 0
        log.info("the memory of %s is read with NIXL", node)
