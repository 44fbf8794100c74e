"""Drives the rules of one simulated node: hands events to them, carries out the instructions that they return, and
decides nothing itself.

The tests and the simulator use the same driver and pass in the parts that differ::

    engines  --> NodeDriver.deliver --> NodeCore.handle --> instructions
                                                              Answer, Welcomed      --> engines
                                                              Say, StartFetch       --> network
                                                              Stamp, CheckSlot, ... --> memory
                                                              DiskWrite, ...        --> disks
                                                              ColdWrite, ...        --> cold tier

Real bytes, delays drawn at random and faults: `tests/sim`. Sizes and times alone: `tokenlake_bench.simulation`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Protocol

from tokenlake.core import NodeCore, events, instructions
from tokenlake_testing.clock import Clock

Observer = Callable[[events.Event, list[instructions.Instruction]], None]
"""Function that is called with each event of a node and the instructions that the rules returned for it, before these
are carried out."""


class Engines(Protocol):
    """Delivers what a simulated node sends to the processes of its engines. Those are simulated too."""

    def answer(self, order: instructions.Answer) -> None:
        """Send a reply to an engine's process; does nothing where the process has ended."""

    def welcome(self, order: instructions.Welcomed) -> None:
        """Tell an engine's process which session it joined; does nothing where the process has ended."""


class Network(Protocol):
    """The connections between a simulated node and its peers."""

    def say(self, order: instructions.SendToPeer) -> None:
        """Send a frame to a peer, whose rules receive it as the event `PeerSent`."""

    def pull(self, order: instructions.StartFetch) -> Pull:
        """Begin the transfer of segments that the instruction asks for. No event may be delivered before this call
        returned."""


class Memory(Protocol):
    """The arena of a simulated node."""

    def stamp(self, order: instructions.Stamp) -> None:
        """Write the generation numbers of slots that have been given to new segments."""

    def check(self, order: instructions.CheckSlot) -> None:
        """Compare the bytes of a slot with its checksums. The event `SlotChecked` is delivered later, exactly once."""

    def make(self, order: instructions.MakeRegion) -> None:
        """Make a region of the arena. The event `RegionReady` is delivered later, exactly once."""


class Membership(Protocol):
    """The membership of a simulated cluster, which stores the ring record."""

    def read(self, order: instructions.ReadRing) -> None:
        """Deliver the newest record as the event `RingChanged`, now or later."""

    def drained(self, order: instructions.Drained) -> None:
        """Take the node out of the record: it has handed over its primary copies."""


class Disks(Protocol):
    """The devices of a simulated node's disk tier."""

    def write(self, order: instructions.DiskWrite) -> None:
        """Write segments. The event `DiskWritten` is delivered later, exactly once."""

    def read(self, order: instructions.DiskRead) -> None:
        """Read segments. The event `FetchDone` is delivered later, exactly once."""

    def abort(self, order: instructions.AbortFetch) -> None:
        """End a read soon; does nothing for a fetch that is no read."""

    def forget(self, order: instructions.DiskForget) -> None:
        """The segments at some places are void."""

    def erase(self, order: instructions.DiskErase) -> None:
        """The segments at some places must never be found again. The event `DiskErased` is delivered later, exactly
        once."""

    def trim(self, order: instructions.DiskTrim) -> None:
        """Shorten a slab."""


class ColdStore(Protocol):
    """The cold tier, as one simulated node reaches it."""

    def look(self, order: instructions.ColdLook) -> None:
        """Look some segments up in the index. The event `ColdLooked` is delivered later, exactly once."""

    def read(self, order: instructions.ColdRead) -> None:
        """Read segments. The event `FetchDone` is delivered later, exactly once."""

    def abort(self, order: instructions.AbortFetch) -> None:
        """End a read soon; does nothing for a fetch that is no read."""

    def write(self, order: instructions.ColdWrite) -> None:
        """Write segments. The event `ColdWritten` is delivered later, exactly once."""

    def erase(self, order: instructions.ColdErase) -> None:
        """Remove segments."""


class Pull(abc.ABC):
    """One transfer of segments from `sender` to `receiver`, from `StartFetch` to `FetchDone` and `SendDone`.

    ::

        receiver:  StartFetch ------------------------ AbortFetch ~~~~ FetchDone
        sender:         ask: PullRequested   send: SendBulk ------------------- SendDone
    """

    def __init__(self, receiver: NodeDriver, order: instructions.StartFetch, stream: int) -> None:
        """`stream`: number of this transfer at its sender; no two transfers of a cluster have the same."""
        self.receiver = receiver
        self.order = order
        self.stream = stream
        self.sender: NodeDriver | None = None
        """The driver of the sending node since it was asked to send, one per start of that node; None until then."""
        self.answered = False
        """True once the sender's rules have answered."""
        self.aborted = False
        """True once the receiver's rules have aborted the transfer."""
        self.returned = False
        """True once `FetchDone` was delivered; from then on bytes are written into slots only that it reports as
        held."""

    @abc.abstractmethod
    def send(self, bulk: instructions.SendBulk) -> None:
        """Called when the sender's rules have answered `PullRequested`: the bytes of the slots begin to travel."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Called when the receiver's rules want the transfer to end: `FetchDone` must be delivered without the missing
        bytes, now or soon."""

    def ask(self, sender: NodeDriver) -> None:
        """Ask the sending node for the segments, by the event `PullRequested`."""
        order = self.order
        self.sender = sender
        sender.sends[self.stream] = self
        node = self.receiver.core.config.node
        sender.deliver(events.PullRequested(self.stream, node, order.tenant, order.keys, order.background))

    def end_sending(self) -> None:
        """Deliver the event `SendDone` to the sender; does nothing if it was delivered before."""
        if self.sender is not None and self.sender.sends.pop(self.stream, None) is not None:
            self.sender.deliver(events.SendDone(self.stream))

    def end_receiving(self, codes: bytes, checksums: bytes, held: bytes = b"") -> None:
        """Deliver the event `FetchDone` with these codes, checksums and held slots to the receiver. Must be called
        once."""
        self.returned = True
        del self.receiver.receives[self.order.fetch]
        answered = self.answered or (None if self.aborted else False)
        self.receiver.deliver(events.FetchDone(self.order.fetch, codes, checksums, answered, held))


class NodeDriver:
    """Driver of one simulated node from its start to its end: its rules, its next timer, and its transfers under
    way."""

    def __init__(
        self,
        core: NodeCore,
        clock: Clock,
        *,
        engines: Engines,
        network: Network,
        memory: Memory,
        membership: Membership | None = None,
        disks: Disks | None = None,
        cold: ColdStore | None = None,
        saved: Callable[[instructions.Saved], None] = lambda order: None,
        observer: Observer | None = None,
    ) -> None:
        """`membership`: None where the ring never changes. `disks`, `cold`: None for a node without that tier.
        `saved`: the segments in memory are written, so that the daemon may end."""
        self.core = core
        self.stopped = False
        self.receives: dict[int, Pull] = {}
        """By number of the fetch, the transfers to this node until `FetchDone` is delivered."""
        self.sends: dict[int, Pull] = {}
        """By number of the transfer at its sender, the transfers from this node between `PullRequested` and
        `SendDone`."""
        self._clock = clock
        self._network = network
        self._observer = observer
        self._handle = core.handle
        self._next_wake = core.next_wake
        self._armed = float("inf")
        self._backlog: list[events.Event] | None = None
        """Events that arrived while the node was suspended; None while it runs."""
        self._carry: dict[type, Callable[[Any], None]] = {
            instructions.Answer: engines.answer,
            instructions.Welcomed: engines.welcome,
            instructions.SendToPeer: network.say,
            instructions.StartFetch: self._start_fetch,
            instructions.AbortFetch: self._abort_fetch,
            instructions.SendBulk: self._send_bulk,
            instructions.Stamp: memory.stamp,
            instructions.CheckSlot: memory.check,
            instructions.MakeRegion: memory.make,
            # Simulated memory has no pages to give back.
            instructions.CutRegion: lambda order: None,
            instructions.CloseRegion: lambda order: None,
            # The instruction to log is ignored, because a simulated node keeps no log.
            instructions.Note: lambda order: None,
            # The observer sees these answers; no other part of a simulated node waits for them.
            instructions.Located: lambda order: None,
            instructions.EvictionDone: lambda order: None,
            instructions.PrefetchDone: lambda order: None,
            instructions.UnpinDone: lambda order: None,
            instructions.Saved: saved,
        }
        if membership is not None:
            self._carry |= {instructions.ReadRing: membership.read, instructions.Drained: membership.drained}
        self._disks = disks
        if disks is not None:
            self._carry |= {
                instructions.DiskWrite: disks.write,
                instructions.DiskRead: disks.read,
                instructions.DiskForget: disks.forget,
                instructions.DiskErase: disks.erase,
                instructions.DiskTrim: disks.trim,
            }
        self._cold = cold
        if cold is not None:
            self._carry |= {
                instructions.ColdLook: cold.look,
                instructions.ColdRead: cold.read,
                instructions.ColdWrite: cold.write,
                instructions.ColdErase: cold.erase,
            }

    # -- life

    @property
    def frozen(self) -> bool:
        """Whether the node is suspended, between `freeze` and `thaw`."""
        return self._backlog is not None

    def start(self) -> None:
        """Start the timers of the node's rules. Must be called once, before the first event."""
        self.core.start(self._clock.now)
        self._arm()

    def stop(self) -> None:
        """End the node as SIGKILL does: events are lost from now on, and no timer fires."""
        self.stopped = True
        self._backlog = None

    def freeze(self) -> None:
        """Suspend the node as SIGSTOP does: events wait, and no timer fires."""
        if not self.stopped and self._backlog is None:
            self._backlog = []

    def thaw(self) -> None:
        """Resume the node as SIGCONT does: it handles first the events that waited, then the timers that are due."""
        if self._backlog is not None:
            backlog, self._backlog = self._backlog, None
            for event in [*backlog, events.Tick()]:
                self.deliver(event)

    # -- events in

    def deliver(self, event: events.Event) -> None:
        """Hand one event to the node's rules at the clock's time, and carry out the instructions that they return. An
        event is lost if the node has ended, and waits while it is suspended."""
        if self._backlog is not None:
            self._backlog.append(event)
        if self._backlog is not None or self.stopped:
            return
        orders = self._handle(event, self._clock.now)
        if self._observer is not None:
            self._observer(event, orders)
        carry = self._carry
        for order in orders:
            carry[type(order)](order)
        self._arm()

    def _arm(self) -> None:
        wake = self._next_wake()
        if wake is not None and wake < self._armed:
            self._armed = wake
            self._clock.at(wake, self._tick, wake)

    def _tick(self, wake: float) -> None:
        # This timer has no effect if the rules were given an earlier or the same deadline since: only the latest one
        # that was set counts.
        if self.stopped or wake != self._armed:
            return
        self._armed = float("inf")
        if self._backlog is not None:
            return
        due = self._next_wake()
        if due is not None and due <= self._clock.now:
            self.deliver(events.Tick())
        else:
            self._arm()

    # -- instructions out

    def _start_fetch(self, order: instructions.StartFetch) -> None:
        self.receives[order.fetch] = self._network.pull(order)

    def _abort_fetch(self, order: instructions.AbortFetch) -> None:
        pull = self.receives.get(order.fetch)
        if pull is not None:
            pull.aborted = True
            pull.abort()
            return
        if self._disks is not None:
            self._disks.abort(order)
        if self._cold is not None:
            self._cold.abort(order)

    def _send_bulk(self, order: instructions.SendBulk) -> None:
        pull = self.sends.get(order.stream)
        if pull is not None:
            pull.answered = True
            pull.send(order)
