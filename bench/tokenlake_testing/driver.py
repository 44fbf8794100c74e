"""Drives the rules of one node on simulated time: hands events in, carries instructions out, and decides nothing.

The tests and the simulator use the same driver and pass in the parts that differ::

    engines  --> NodeDriver.deliver --> NodeCore.handle --> instructions
                                                              Answer, Welcomed      --> engines
                                                              Say, StartFetch       --> network
                                                              Stamp, CheckSlot, ... --> memory

Real bytes, delays drawn at random and faults: `tests/sim`. Sizes and times alone: `tokenlake_bench.simulation`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Protocol

from tokenlake.core import NodeCore, events, instructions
from tokenlake_testing.clock import Clock

__all__ = ["Engines", "Memory", "Network", "NodeDriver", "Observer", "Pull"]

Observer = Callable[[events.Event, list[instructions.Instruction]], None]
"""Called with each event and the instructions it led to, before they are carried out."""


class Engines(Protocol):
    """The connections of one node's engine processes."""

    def answer(self, order: instructions.Answer) -> None:
        """Send a reply to a process; without effect where the process is gone."""

    def welcome(self, order: instructions.Welcomed) -> None:
        """Tell a process which session it joined; without effect where the process is gone."""


class Network(Protocol):
    """The connections of one node to its peers."""

    def say(self, order: instructions.SendToPeer) -> None:
        """Send a frame to a peer, which receives it as `PeerSent`."""

    def pull(self, order: instructions.StartFetch) -> Pull:
        """Begin the transfer that the order asks for; it must not deliver anything before it returned."""


class Memory(Protocol):
    """The arena of one node."""

    def stamp(self, order: instructions.Stamp) -> None:
        """Write the generations of slots that have new owners."""

    def check(self, order: instructions.CheckSlot) -> None:
        """Compare a slot with its checksums; `SlotChecked` is delivered later, exactly once."""

    def replace(self, order: instructions.ReplaceRegion) -> None:
        """Replace a region; `RegionReady` is delivered later, exactly once."""


class Pull(abc.ABC):
    """One transfer of segments from `sender` to `receiver`, from `StartFetch` to `FetchDone` and `SendDone`.

    ::

        receiver:  StartFetch ------------------------ AbortFetch ~~~~ FetchDone
        sender:         ask: PullRequested   send: SendBulk ------------------- SendDone
    """

    def __init__(self, receiver: NodeDriver, order: instructions.StartFetch, stream: int) -> None:
        """`stream` names the transfer at its sender; no two transfers of a cluster have the same."""
        self.receiver = receiver
        self.order = order
        self.stream = stream
        self.sender: NodeDriver | None = None
        """The life of the sending node that was asked; None until then."""
        self.returned = False
        """`FetchDone` was delivered: no byte is written into the receiver's slots any more."""

    @abc.abstractmethod
    def send(self, bulk: instructions.SendBulk) -> None:
        """The sender's rules answered `PullRequested`: the slots' bytes travel from now on."""

    @abc.abstractmethod
    def abort(self) -> None:
        """The receiver's rules ask for `FetchDone` without the missing bytes, now or soon."""

    def ask(self, sender: NodeDriver) -> None:
        """Hand the order to its sender."""
        order = self.order
        self.sender = sender
        sender.sends[self.stream] = self
        node = self.receiver.core.config.node
        sender.deliver(events.PullRequested(self.stream, node, order.tenant, order.keys, order.background))

    def end_sending(self) -> None:
        """Deliver `SendDone` to the sender, once."""
        if self.sender is not None and self.sender.sends.pop(self.stream, None) is not None:
            self.sender.deliver(events.SendDone(self.stream))

    def end_receiving(self, codes: bytes, checksums: bytes) -> None:
        """Deliver `FetchDone` to the receiver; `codes` and `checksums` as in that event. Call it once."""
        self.returned = True
        del self.receiver.receives[self.order.fetch]
        self.receiver.deliver(events.FetchDone(self.order.fetch, codes, checksums))


class NodeDriver:
    """One life of a node: its core, its next timer, and its transfers under way."""

    def __init__(
        self,
        core: NodeCore,
        clock: Clock,
        *,
        engines: Engines,
        network: Network,
        memory: Memory,
        observer: Observer | None = None,
    ) -> None:
        self.core = core
        self.stopped = False
        self.receives: dict[int, Pull] = {}
        """By fetch; transfers to this node until `FetchDone`."""
        self.sends: dict[int, Pull] = {}
        """By stream; transfers from this node between `PullRequested` and `SendDone`."""
        self._clock = clock
        self._network = network
        self._observer = observer
        self._handle = core.handle
        self._next_wake = core.next_wake
        self._armed = float("inf")
        self._backlog: list[events.Event] | None = None
        """Events that arrived while the node was frozen; None while it runs."""
        self._carry: dict[type, Callable[[Any], None]] = {
            instructions.Answer: engines.answer,
            instructions.Welcomed: engines.welcome,
            instructions.SendToPeer: network.say,
            instructions.StartFetch: self._start_fetch,
            instructions.AbortFetch: self._abort_fetch,
            instructions.SendBulk: self._send_bulk,
            instructions.Stamp: memory.stamp,
            instructions.CheckSlot: memory.check,
            instructions.ReplaceRegion: memory.replace,
            # A simulated node keeps no log.
            instructions.Note: lambda order: None,
        }

    # -- life

    @property
    def frozen(self) -> bool:
        """Between `freeze` and `thaw`."""
        return self._backlog is not None

    def start(self) -> None:
        """Begin the rules' timers. Call it once, before the first event."""
        self.core.start(self._clock.now)
        self._arm()

    def stop(self) -> None:
        """End this life, as SIGKILL does: later events are lost, and no timer fires."""
        self.stopped = True
        self._backlog = None

    def freeze(self) -> None:
        """Suspend the node, as SIGSTOP does: events wait, and no timer fires."""
        if not self.stopped and self._backlog is None:
            self._backlog = []

    def thaw(self) -> None:
        """Resume the node, as SIGCONT does: first the events that waited, then the timers that are due."""
        if self._backlog is not None:
            backlog, self._backlog = self._backlog, None
            for event in [*backlog, events.Tick()]:
                self.deliver(event)

    # -- events in

    def deliver(self, event: events.Event) -> None:
        """Hand one event to the rules at the clock's time and carry out what they return. An event is lost on a node
        that stopped, and waits for one that is frozen."""
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
        # An earlier deadline was armed since, or this one was: only the latest armed time counts.
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
            pull.abort()

    def _send_bulk(self, order: instructions.SendBulk) -> None:
        pull = self.sends.get(order.stream)
        if pull is not None:
            pull.send(order)
