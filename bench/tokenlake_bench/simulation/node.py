"""One simulated daemon: carries out what its rules say and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenlake.core import NodeCore, events, instructions
from tokenlake.keys import KEY_BYTES
from tokenlake.store import Kind, SegmentStore
from tokenlake.wire import Code
from tokenlake_bench.simulation.network import Link

if TYPE_CHECKING:
    from tokenlake_bench.simulation.cluster import Cluster
    from tokenlake_bench.simulation.engine import Engine

__all__ = ["CHECKSUM", "SimNode"]

CHECKSUM = b"checksum"
"""Of every segment: there are no bytes."""


class _Pull:
    """One `StartFetch` under way; `order` is None once its `FetchDone` is out."""

    __slots__ = ("codes", "order", "receiver", "sender", "stream")

    def __init__(self, receiver: SimNode, sender: SimNode, order: instructions.StartFetch, stream: int) -> None:
        self.receiver = receiver
        self.sender = sender
        self.order: instructions.StartFetch | None = order
        self.stream = stream
        self.codes = b""
        """Of what was sent."""


class SimNode:
    """A `NodeCore`, its timers, and where its instructions go."""

    def __init__(self, cluster: Cluster, index: int, core: NodeCore) -> None:
        self.cluster = cluster
        self.index = index
        self.name = core.config.node
        self.core = core
        self.engines: dict[int, Engine] = {}
        """By connection."""
        self._clock = cluster.clock
        self._handle = core.handle
        self._next_wake = core.next_wake
        self._armed = float("inf")
        self._links: dict[str, tuple[SimNode, Link]] = {}
        self._receives: dict[int, _Pull] = {}
        """By fetch."""
        self._sends: dict[int, _Pull] = {}
        """By stream."""
        self._streams = 0
        self._carry: dict[type, Callable[[Any], None]] = {
            instructions.Answer: self._answer,
            instructions.Welcomed: self._welcome,
            instructions.SendToPeer: self._say,
            instructions.StartFetch: self._start_fetch,
            instructions.AbortFetch: self._abort_fetch,
            instructions.SendBulk: self._send_bulk,
            instructions.CheckSlot: self._check_slot,
            # There is no memory to stamp, and nobody reads the log.
            instructions.Stamp: lambda i: None,
            instructions.Note: lambda i: None,
        }

    @property
    def store(self) -> SegmentStore:
        """To look at."""
        return self.core.store

    def replicas(self) -> int:
        """Extra copies of hot segments that it has now."""
        return sum(pool.counts[Kind.REPLICA] for pool in self.store.pools())

    def start(self) -> None:
        """Begin the rules' timers; all other nodes exist."""
        for other in self.cluster.nodes:
            if other is not self:
                self._links[other.name] = other, self.cluster.network.link(self.index, other.index)
        self.core.start(self._clock.now)
        self._arm()

    def deliver(self, event: events.Event) -> None:
        """Something happened."""
        carry = self._carry
        for instruction in self._handle(event, self._clock.now):
            carry[type(instruction)](instruction)
        wake = self._next_wake()
        if wake is not None and wake < self._armed:
            self._armed = wake
            self._clock.at(wake, self._tick, wake)

    def _arm(self) -> None:
        wake = self._next_wake()
        if wake is not None and wake < self._armed:
            self._armed = wake
            self._clock.at(wake, self._tick, wake)

    def _tick(self, wake: float) -> None:
        if wake != self._armed:
            return
        self._armed = float("inf")
        due = self._next_wake()
        if due is not None and due <= self._clock.now:
            self.deliver(events.Tick())
        else:
            self._arm()

    # -- instructions

    def _answer(self, order: instructions.Answer) -> None:
        self.engines[order.connection].hear(order.message)

    def _welcome(self, order: instructions.Welcomed) -> None:
        self.engines[order.connection].joined = True

    def _say(self, order: instructions.SendToPeer) -> None:
        other, link = self._links[order.node]
        message = self.cluster.on_the_wire(self.index, order.message)
        self._clock.after(link.latency_s, other.deliver, events.PeerSent(self.name, message))

    def _start_fetch(self, order: instructions.StartFetch) -> None:
        sender, link = self._links[order.node]
        self._streams += 1
        pull = _Pull(self, sender, order, self._streams * self.cluster.size.nodes + self.index)
        self._receives[order.fetch] = pull
        self._clock.after(link.latency_s, self._ask, pull)

    def _ask(self, pull: _Pull) -> None:
        order = pull.order
        if order is not None:
            pull.sender._sends[pull.stream] = pull
            asked = events.PullRequested(pull.stream, self.name, order.tenant, order.keys, order.background)
            pull.sender.deliver(asked)

    def _send_bulk(self, bulk: instructions.SendBulk) -> None:
        pull = self._sends[bulk.stream]
        pull.codes = bulk.codes
        now, nbytes = self._clock.now, bulk.codes.count(Code.LOCAL) * bulk.slot_bytes
        sent, arrived = self.cluster.network.transfer(now, self.index, pull.receiver.index, nbytes)
        if pull.order is not None:
            self.cluster.meter.sent(now, self.index, pull.receiver, pull.order, bulk.codes)
        self._clock.at(sent, self._sent, bulk.stream)
        self._clock.at(arrived, self._arrived, pull)

    def _sent(self, stream: int) -> None:
        del self._sends[stream]
        self.deliver(events.SendDone(stream))

    @staticmethod
    def _arrived(pull: _Pull) -> None:
        if pull.order is not None:
            pull.receiver._return(pull, pull.codes)

    def _abort_fetch(self, order: instructions.AbortFetch) -> None:
        if order.fetch in self._receives:
            self._clock.after(0.0, self._aborted, self._receives[order.fetch])

    def _aborted(self, pull: _Pull) -> None:
        if pull.order is not None:
            self._return(pull, bytes([Code.LOST]) * (len(pull.order.keys) // KEY_BYTES))

    def _check_slot(self, order: instructions.CheckSlot) -> None:
        """There are no bytes to be wrong."""
        self._clock.after(0.0, self.deliver, events.SlotChecked(order.check, True))

    def _return(self, pull: _Pull, codes: bytes) -> None:
        """The receiver returns: nothing lands any more."""
        order, pull.order = pull.order, None
        assert order is not None
        del self._receives[order.fetch]
        nothing = bytes(len(CHECKSUM) * order.shards)
        checksums = b"".join(CHECKSUM * order.shards if code == Code.LOCAL else nothing for code in codes)
        self.deliver(events.FetchDone(order.fetch, codes, checksums))
