"""One simulated daemon: a driver per life, and a memory of real bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tests.sim.arena import SHARDS, SLOT_BYTES, Arena
from tests.sim.clock import Channel
from tests.sim.disk import Disk, Life
from tests.sim.kept import KeptMemory
from tests.sim.transfer import FROZEN_POLL_S, Transfer
from tests.sim.world import World
from tokenlake.core import NodeCore, events, instructions
from tokenlake.core.cluster.drain import LEFT_BEHIND
from tokenlake.core.cluster.handover import HANDED_OVER
from tokenlake.core.cluster.owner import DUPLICATES
from tokenlake.disk import slab_bytes
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import SlotRef, unpack_slots
from tokenlake_testing.driver import NodeDriver, Pull


class Process(Protocol):
    """An engine process that joined a node."""

    down: Channel[Any]
    """Replies to the process."""

    def disconnected(self) -> None:
        """The node crashed."""

    def back(self) -> None:
        """The next daemon of the node runs, and has kept the memory."""


class Connection(Protocol):
    """The link between two nodes."""

    up: bool
    ends: Mapping[str, SimNode]

    def say(self, sender: str, message: peer.PeerMessage) -> None:
        """Send a frame from `sender` to the other end."""

    def cut(self, seconds: float = 0.0) -> None:
        """Lose all frames and transfers under way; connect again after `seconds` at the earliest, if both ends are
        members for each other."""


class SimNode:
    """A daemon that can crash (the pool loses its memory), freeze, and start again."""

    def __init__(self, cluster: World, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.incarnation = 0
        self.retired = False
        """It left the cluster and does not start again."""
        self.account: instructions.Drained | None = None
        """The account of its drain."""
        self.processes: dict[int, Process] = {}
        """By connection."""
        self.links: Mapping[str, Connection] = {}
        """By the other node's name."""
        self.silent = False
        """Its bulk path is dead: it answers no transfer, and every message."""
        self.answers_probes = False
        """While it is silent it still answers transfers of no segments."""
        self.disk: Disk | None = None
        """Outlives crashes; None if the node has none."""
        if cluster.disk_places:
            self.disk = Disk(cluster.clock, slab_bytes(SLOT_BYTES, cluster.disk_places))
        self.arena = Arena(0 if cluster.keep else cluster.regions)
        self.kept = KeptMemory(self) if cluster.keep else None
        self.start()

    # -- life

    def start(self) -> None:
        """Begin a new life, empty, or with the memory of the one before. A node that left the cluster stays down."""
        if self.retired:
            return
        self.incarnation += 1
        self.config = config = self.cluster.config(self.name, self.incarnation)
        self.started = self.cluster.clock.now
        self.arena = Arena(0 if config.keep else config.regions, self.kept.regions() if self.kept is not None else {})
        self.log: list[tuple[float, events.Event]] = []
        """Every event of this life with its time, when the cluster records."""
        self.emitted: list[list[instructions.Instruction]] = []
        """The instructions of each event in `log`."""
        self.found_wrong: set[SlotRef] = set()
        """Slots of this life whose bytes a check found wrong: no process may be given one any more."""
        self.life = NodeDriver(
            NodeCore(config),
            self.cluster.clock,
            engines=self,
            network=self,
            memory=self,
            membership=self,
            disks=self.disk,
            ledger=self.kept,
            observer=self._observe,
        )
        carry = self.life._carry
        if self.kept is not None:
            carry[instructions.EvictionDone] = self.kept.evicted
        carry.update({kind: self._mortal(carried) for kind, carried in carry.items()})
        self.life.start()
        if self.kept is not None:
            self.kept.recover()
        self.find_disk()
        for survivor in list(self.kept.survivors.values()) if self.kept is not None else ():
            survivor.back()

    def _mortal(self, carried: Callable[[Any], None]) -> Callable[[Any], None]:
        """`carried`, before which the node may be killed; the rest of the event's instructions has no effect then."""
        life = self.life

        def carry(order: Any) -> None:
            if self.kept is not None and self.kept.dies_in is not None and not life.stopped:
                self.kept.dies_in -= 1
                if self.kept.dies_in < 0:
                    self.crash()
            if not life.stopped:
                carried(order)

        return carry

    def find_disk(self) -> None:
        """The disk, if the node has one, reports what is on it."""
        if self.disk is not None:
            self.disk.start(Life(self.life, self.arena))

    @property
    def core(self) -> NodeCore | None:
        """The rules of this life; None after a crash."""
        return None if self.life.stopped else self.life.core

    @property
    def frozen(self) -> bool:
        """Between `freeze` and `thaw`."""
        return self.life.frozen

    def end(self) -> None:
        """The daemon ends in order, soon, and leaves its memory to the next one."""
        if self.kept is not None and self.core is not None:
            self.kept.ends = True
            self.deliver(events.SealRequested())

    def crash(self, *, clean: bool = False) -> None:
        """SIGKILL: connections break, its threads are gone, its memory stays with the processes that map it. `clean`:
        it had ended in order."""
        self.life.stop()
        if self.kept is not None:
            self.kept.clean = clean
        for link in self.links.values():
            link.cut()
        for process in self.processes.values():
            process.disconnected()
        self.processes.clear()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.life.freeze()

    def speak(self) -> None:
        """The bulk path answers again."""
        self.silent = False

    def thaw(self) -> None:
        """SIGCONT."""
        self.life.thaw()

    def connected(self, other: str) -> bool:
        """The link to the other node carries frames."""
        return self.links[other].up

    def deliver(self, event: events.Event) -> None:
        """Hand an event to the rules of the node, in its present life; see `NodeDriver`."""
        self.life.deliver(event)

    def _observe(self, event: events.Event, orders: list[instructions.Instruction]) -> None:
        if self.cluster.recording:
            self.log.append((self.cluster.clock.now, event))
            self.emitted.append(orders)
        self.cluster.watcher(self.name, event, orders)
        for order in orders:
            self._expect_sound(order)

    def _expect_sound(self, order: instructions.Instruction) -> None:
        """No answer to an engine, and no transfer, names a copy that a check found wrong."""
        if isinstance(order, instructions.SendBulk):
            given = unpack_slots(order.slots)
        elif isinstance(order, instructions.Answer) and isinstance(order.message, engine.Matched | engine.Fetched):
            named = zip(order.message.codes, unpack_slots(order.message.slots), strict=False)
            given = [slot for code, slot in named if code == Code.LOCAL]
        else:
            return
        wrong = [slot for slot in given if slot in self.found_wrong]
        self.cluster.expect(not wrong, f"{self.name} gives out wrong bytes after a check found them: {wrong}")

    # -- engines

    def answer(self, order: instructions.Answer) -> None:
        """Send a reply to an engine's process; see `tokenlake_testing.driver.Engines`."""
        process = self.processes.get(order.connection)
        if process is not None:
            process.down.send(order.message)

    def welcome(self, order: instructions.Welcomed) -> None:
        """Tell an engine's process which session it joined; see `tokenlake_testing.driver.Engines`."""
        process = self.processes.get(order.connection)
        if process is not None:
            process.down.send(order)

    # -- network

    def say(self, order: instructions.SendToPeer) -> None:
        """Send a frame to a peer; see `tokenlake_testing.driver.Network`."""
        self.links[order.node].say(self.name, order.message)

    def pull(self, order: instructions.StartFetch) -> Pull:
        """Begin a transfer of segments from a peer; see `tokenlake_testing.driver.Network`."""
        return Transfer(self, self.links[order.node].ends[order.node], order, self.cluster.next_id())

    # -- membership

    def knows(self, other: str) -> bool:
        """The node lives, and its ring record has the other node."""
        core = self.core
        return core is not None and {self.name, other} <= core.record.members.keys()

    def follow(self) -> None:
        """The node reads the ring record; it waits with that while it is suspended."""
        core, record = self.core, self.cluster.record
        if self.frozen:
            self.cluster.clock.after(FROZEN_POLL_S, self.follow)
        elif core is not None and record.epoch > core.record.epoch:
            self.deliver(events.RingChanged(record))
            for other, link in self.links.items():
                if not self.knows(other):
                    link.cut()

    def read(self, order: instructions.ReadRing) -> None:
        """Read the ring record soon; see `tokenlake_testing.driver.Membership`."""
        self.cluster.clock.after(self.cluster.clock.delay_s(), self.follow)

    def drained(self, order: instructions.Drained) -> None:
        """Leave the ring record, then end; see `tokenlake_testing.driver.Membership`."""
        assert self.core is not None
        counters, moved = self.core.counters, [segments for node, segments, _ in order.moved if node != self.name]
        assert len(moved) == len(order.moved)
        assert 0 < sum(moved) <= counters[HANDED_OVER] + counters[DUPLICATES] or not moved
        assert order.lost_segments <= counters[LEFT_BEHIND]
        self.account = order
        # Not within the event that led here.
        self.cluster.clock.after(0.0, self.cluster.leave, self.name)

    # -- memory

    def stamp(self, order: instructions.Stamp) -> None:
        """Write the generation numbers of slots into the arena; see `tokenlake_testing.driver.Memory`."""
        places = unpack_slots(order.slots)
        if self.kept is not None:
            self.kept.stamped(places)
        self.arena.stamp(places)

    def check(self, order: instructions.CheckSlot) -> None:
        """Compare the bytes of a slot with its checksums, after a random delay, and record a slot with wrong bytes; see
        `tokenlake_testing.driver.Memory`."""
        life, arena, clock = self.life, self.arena, self.cluster.clock
        (slot,) = unpack_slots(order.slot)

        def checked() -> None:
            if life.stopped:
                return
            if life.frozen:
                clock.after(FROZEN_POLL_S, checked)
                return
            found = b"".join(arena.read(slot, shard) for shard in range(SHARDS))
            if found != order.checksums:
                self.found_wrong.add(slot)
            life.deliver(events.SlotChecked(order.check, found == order.checksums))

        clock.after(clock.delay_s(), checked)

    def make(self, order: instructions.MakeRegion) -> None:
        """Add the new region to the arena, 10 ms later; see `tokenlake_testing.driver.Memory`."""
        life = self.life

        def ready() -> None:
            if not life.stopped:
                self.arena.add(order.region)
                if self.kept is not None:
                    self.kept.made(order.region, order.nbytes)
                life.deliver(events.RegionReady(order.region))

        self.cluster.clock.after(0.01, ready)
