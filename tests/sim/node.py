"""One simulated daemon: carries out what its rules say and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.sim.arena import SHARDS, Arena
from tests.sim.transfer import FROZEN_POLL_S, Transfer
from tokenlake.core import NodeCore, events, instructions
from tokenlake.core.context import CoreConfig
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import SlotRef, unpack_slots

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.engine import SimProcess

__all__ = ["SimNode"]


class SimNode:
    """A daemon that can crash (its memory lost to the pool), freeze, and start again."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.incarnation = 0
        self.core: NodeCore | None = None
        self.arena = Arena(0)
        self.frozen = False
        self.receives: dict[int, Transfer] = {}
        """By fetch."""
        self.sends: dict[int, Transfer] = {}
        """By stream."""
        self.processes: dict[int, SimProcess] = {}
        """By connection."""
        self.log: list[tuple[float, events.Event]] = []
        """Every event of this life, when the cluster records."""
        self.emitted: list[list[instructions.Instruction]] = []
        self.found_wrong: set[SlotRef] = set()
        """Copies of this life that a check found wrong: nobody may be given one any more."""
        self._backlog: list[events.Event] = []
        self._armed: float | None = None
        self._carry: dict[type, Callable[[Any], None]] = {
            instructions.Answer: lambda i: self._reply(i.connection, i.message),
            instructions.Welcomed: lambda i: self._reply(i.connection, i),
            instructions.SendToPeer: lambda i: cluster.link(name, i.node).say(name, i.message),
            instructions.StartFetch: self._start_fetch,
            instructions.AbortFetch: lambda i: self.receives[i.fetch].abort() if i.fetch in self.receives else None,
            instructions.SendBulk: lambda i: self.sends[i.stream].send(i) if i.stream in self.sends else None,
            instructions.Stamp: lambda i: self.arena.stamp(unpack_slots(i.slots)),
            instructions.ReplaceRegion: self._replace,
            instructions.CheckSlot: self._check_slot,
            instructions.Note: lambda i: None,
        }

    # -- life

    def start(self) -> None:
        """Begin a new life, empty."""
        self.incarnation += 1
        config = self.config
        self.core = NodeCore(config)
        self.arena = Arena(config.regions)
        self.log, self.emitted, self.found_wrong = [], [], set()
        self._armed = None
        self.core.start(self.cluster.clock.now)
        self._arm(self.incarnation)

    @property
    def config(self) -> CoreConfig:
        """Of this life."""
        return self.cluster.config(self.name, self.incarnation)

    def crash(self) -> None:
        """SIGKILL: connections break, its threads are gone, its memory stays with those who map it."""
        self.core = None
        self.frozen = False
        self._backlog.clear()
        for link in self.cluster.links_of(self.name):
            link.cut()
        for process in self.processes.values():
            process.disconnected()
        self.processes.clear()
        self.receives.clear()
        self.sends.clear()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = self.core is not None

    def thaw(self) -> None:
        """SIGCONT: all that came meanwhile first, then late timers."""
        if not self.frozen:
            return
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for event in [*backlog, events.Tick()]:
            self.deliver(event)

    def connected(self, other: SimNode) -> bool:
        """Does the network carry anything between the two?"""
        return self.cluster.link(self.name, other.name).up

    # -- events in

    def deliver(self, event: events.Event) -> None:
        """Something happened; lost on a dead daemon, waits for a frozen one."""
        if self.frozen:
            self._backlog.append(event)
        elif self.core is not None:
            life = self.incarnation
            out = self.core.handle(event, self.cluster.clock.now)
            if self.cluster.recording:
                self.log.append((self.cluster.clock.now, event))
                self.emitted.append(out)
            for instruction in out:
                self._expect_sound(instruction)
                self._carry[type(instruction)](instruction)
            self._arm(life)

    def _arm(self, life: int) -> None:
        wake = self.core.next_wake() if self.core is not None and life == self.incarnation else None
        if wake is not None and (self._armed is None or wake < self._armed):
            self._armed = wake
            self.cluster.clock.at(wake, lambda: self._tick(life, wake))

    def _tick(self, life: int, wake: float) -> None:
        if life != self.incarnation or wake != self._armed:
            return
        self._armed = None
        if self.core is None or self.frozen:
            return
        due = self.core.next_wake()
        if due is not None and due <= self.cluster.clock.now:
            self.deliver(events.Tick())
        else:
            self._arm(life)

    # -- instructions out

    def _reply(self, connection: int, message: object) -> None:
        process = self.processes.get(connection)
        if process is not None:
            process.down.send(message)

    def _check_slot(self, order: instructions.CheckSlot) -> None:
        life = self.incarnation
        (place,) = unpack_slots(order.slot)

        def checked() -> None:
            if life != self.incarnation or self.core is None:
                return
            if self.frozen:
                self.cluster.clock.after(FROZEN_POLL_S, checked)
                return
            found = b"".join(self.arena.read(place, shard) for shard in range(SHARDS))
            if found != order.checksums:
                self.found_wrong.add(place)
            self.deliver(events.SlotChecked(order.check, found == order.checksums))

        self.cluster.clock.after(self.cluster.clock.delay_s(), checked)

    def _expect_sound(self, instruction: instructions.Instruction) -> None:
        """No answer to an engine, and no transfer, names a copy that a check found wrong."""
        if isinstance(instruction, instructions.SendBulk):
            given = unpack_slots(instruction.slots)
        elif isinstance(instruction, instructions.Answer) and isinstance(
            instruction.message, engine.Matched | engine.Fetched
        ):
            message = instruction.message
            named = zip(message.codes, unpack_slots(message.slots), strict=False)
            given = [place for code, place in named if code == Code.LOCAL]
        else:
            return
        wrong = [place for place in given if place in self.found_wrong]
        self.cluster.expect(not wrong, f"{self.name} gives out wrong bytes after a check found them: {wrong}")

    def _start_fetch(self, order: instructions.StartFetch) -> None:
        sender = self.cluster.nodes[order.node]
        self.receives[order.fetch] = Transfer(self, sender, order, self.cluster.next_id())

    def _replace(self, order: instructions.ReplaceRegion) -> None:
        life = self.incarnation

        def ready() -> None:
            if life == self.incarnation and self.core is not None:
                self.arena.add(order.fresh)
                self.deliver(events.RegionReady(order.fresh))

        self.cluster.clock.after(0.01, ready)
