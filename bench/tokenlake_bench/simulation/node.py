"""One simulated node: the rules of a daemon with a network and a memory that have sizes and times but no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from tokenlake.core import NodeCore, events, instructions
from tokenlake.keys import KEY_BYTES
from tokenlake.memory import SegmentStore
from tokenlake.wire import Code, engine, peer
from tokenlake_bench.simulation.cold import ColdContent, SimCold
from tokenlake_bench.simulation.disk import CHECKSUM, SimDisk
from tokenlake_bench.simulation.network import Network
from tokenlake_testing.clock import Clock
from tokenlake_testing.driver import NodeDriver, Pull


class Process(Protocol):
    """An engine process that has joined a simulated node."""

    joined: bool

    def hear(self, message: engine.EngineReply) -> None:
        """Receive a reply that the node sends at the present simulated time."""


class _SizedPull(Pull):
    """A simulated transfer of segments, whose duration the network computes from its size."""

    def __init__(self, source: SimNode, target: SimNode, order: instructions.StartFetch, stream: int) -> None:
        super().__init__(target.driver, order, stream)
        self._source = source
        self._target = target
        self._codes = b""

    def begin(self) -> None:
        """Called when the order to send has reached the sending node."""
        if self._source.knows(self._target.name):
            if not self.returned:
                self.ask(self._source.driver)
        else:
            self._return_nothing()

    def send(self, bulk: instructions.SendBulk) -> None:
        self._codes = bulk.codes
        source, target = self._source, self._target
        clock, nbytes = source.clock, bulk.codes.count(Code.LOCAL) * bulk.slot_bytes
        sent, arrived = source.network.transfer(clock.now, source.index, target.index, nbytes)
        source.log(source.index, bulk.codes.count(Code.LOCAL))
        clock.at(sent, self.end_sending)
        clock.at(arrived, self._return_codes)

    def abort(self) -> None:
        self._target.clock.after(0.0, self._return_nothing)

    def _return_nothing(self) -> None:
        self._codes = bytes([Code.LOST]) * (len(self.order.keys) // KEY_BYTES)
        self._return_codes()

    def _return_codes(self) -> None:
        if self.returned:
            return
        shards = self.order.shards
        missing = bytes(len(CHECKSUM) * shards)
        self.end_receiving(
            self._codes, b"".join(CHECKSUM * shards if code == Code.LOCAL else missing for code in self._codes)
        )


class _Membership:
    """Passes what the rules tell the membership on to the cluster, after the present event."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def read(self, order: instructions.ReadRing) -> None:
        self._node.clock.after(0.0, self._node.read_ring)

    def drained(self, order: instructions.Drained) -> None:
        self._node.clock.after(0.0, self._node.drained)


class SimNode:
    """A simulated node: the driver of its rules (`NodeDriver`), with the engines, the network and the memory that it
    drives."""

    def __init__(
        self,
        index: int,
        nodes: int,
        core: NodeCore,
        clock: Clock,
        network: Network,
        log: Callable[[int, int], None],
        disk_bytes: int = 0,
        cold: ColdContent | None = None,
    ) -> None:
        """`index`: number of this node among the `nodes` nodes of the cluster. `log` is called with (node, number of
        segments that it sends to another one). `disk_bytes`: size of its disk; 0: it has none. `cold`: the
        content of the cold tier."""
        self.index = index
        self.name = core.config.node
        self.core = core
        self.clock = clock
        self.network = network
        self.log = log
        self.engines: dict[int, Process] = {}
        """The engines of the node, by number of their connection."""
        self.drained: Callable[[], None] = lambda: None
        """Called when the node, which drains, has handed over its segments."""
        self.read_ring: Callable[[], None] = lambda: None
        """Called when the node hears of a newer ring."""
        self.disk: SimDisk | None = None
        if disk_bytes:
            self.disk = SimDisk(disk_bytes, clock, self._from_disk)
        self.cold = None if cold is None else SimCold(cold, clock, self._from_disk)
        self.saved = False
        """The rules have saved what is in memory, after `SaveRequested`."""
        self.driver = NodeDriver(
            core,
            clock,
            engines=self,
            network=self,
            memory=self,
            membership=_Membership(self),
            disks=self.disk,
            cold=self.cold,
            saved=self._has_saved,
        )
        self.deliver = self.driver.deliver
        self._nodes = nodes
        self._peers: dict[str, SimNode] = {}
        self._streams = 0

    @property
    def store(self) -> SegmentStore:
        """The segment store of the node."""
        return self.core.store

    def start(self) -> None:
        """Start the rules, and report the disk and the cold tier to them."""
        self.driver.start()
        if self.disk is not None:
            self.disk.start()
        if self.cold is not None:
            self.cold.start()

    def _has_saved(self, order: instructions.Saved) -> None:
        self.saved = True

    def _from_disk(self, event: events.Event) -> None:
        self.driver.deliver(event)

    def connect(self, nodes: Iterable[SimNode]) -> None:
        """Make the other nodes known to this one. Must be called before `driver.start`, and when a node joins."""
        self._peers = {node.name: node for node in nodes if node is not self}

    def knows(self, other: str) -> bool:
        """Whether the node lives, and its ring record has the node `other`."""
        return not self.driver.stopped and other in self.core.record.members

    def hear(self, sender: str, message: peer.PeerMessage) -> None:
        """Receive a frame; a frame of a node that is no member any more is lost with its connection."""
        if self.knows(sender):
            self.deliver(events.PeerSent(sender, message))

    # -- engines

    def answer(self, order: instructions.Answer) -> None:
        self.engines[order.connection].hear(order.message)

    def welcome(self, order: instructions.Welcomed) -> None:
        self.engines[order.connection].joined = True

    # -- network

    def say(self, order: instructions.SendToPeer) -> None:
        self.network.frame(order.message)
        self.clock.after(self.network.link.latency_s, self._peers[order.node].hear, self.name, order.message)

    def pull(self, order: instructions.StartFetch) -> Pull:
        source = self._peers[order.node]
        self._streams += 1
        pull = _SizedPull(source, self, order, self._streams * self._nodes + self.index)
        self.clock.after(self.network.link.latency_s, pull.begin)
        return pull

    # -- memory

    def stamp(self, order: instructions.Stamp) -> None:
        """Does nothing, because there is no memory whose slots have generations."""

    def check(self, order: instructions.CheckSlot) -> None:
        """Reports the copy as right, because there are no bytes that could be wrong."""
        self.clock.after(0.0, self.deliver, events.SlotChecked(order.check, True))

    def make(self, order: instructions.MakeRegion) -> None:
        """Reports the region as ready, because there is no memory to allocate."""
        self.clock.after(0.0, self.deliver, events.RegionReady(order.region))
