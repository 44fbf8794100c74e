"""One transfer of segments, piece by piece, between a sender and a receiver that freeze and die independently.

A piece is one shard of one segment. After `AbortFetch` pieces keep arriving until the receiver returns, as its thread
stops only then. In every second transfer the piece that travels at that moment cannot be stopped: it is written later,
into a slot that is reported as held.
"""

from __future__ import annotations

from typing import Protocol

from tests.sim.arena import SHARDS, Arena
from tests.sim.clock import RandomClock
from tests.sim.world import World
from tokenlake.core import NodeCore
from tokenlake.core.events import FetchSettled
from tokenlake.core.instructions import SendBulk, StartFetch
from tokenlake.wire import Code
from tokenlake.wire.slots import SlotRef, unpack_slots
from tokenlake_testing.driver import NodeDriver, Pull

LATE_S = 0.05
"""Seconds after which a piece is written that could not be stopped."""
STALL_S = 0.2
"""The longest stall of a transfer."""
FROZEN_POLL_S = 0.01


class End(Protocol):
    """A node at either end of a transfer."""

    cluster: World
    name: str
    life: NodeDriver
    arena: Arena
    silent: bool
    answers_probes: bool

    @property
    def core(self) -> NodeCore | None:
        """The rules; None after a crash."""

    def connected(self, other: str) -> bool:
        """The link to the other node carries frames."""


class Transfer(Pull):
    """Copies the segments of `order.keys` from the arena of `source` into slots of `target`."""

    def __init__(self, target: End, source: End, order: StartFetch, stream: int) -> None:
        super().__init__(target.life, order, stream)
        self.clock: RandomClock = target.cluster.clock
        self.target = target
        self.source = source
        self.slots = unpack_slots(order.slots)
        self.codes = bytearray([Code.LOST]) * len(self.slots)
        self.checksums: dict[int, bytes] = {}
        self.landed = [0] * len(self.slots)
        self._into: Arena = target.arena
        self._from: Arena = source.arena
        self._one_sided = stream % 2 == 0
        """The receiver reads out of the sender's memory, and cannot stop a read."""
        self._travels: int | None = None
        """The segment whose piece travels now."""
        self._held: int | None = None
        """The segment into whose slot a piece is still written after `FetchDone`."""
        self._flipped = False
        """A bit flipped in a slot of the sender."""
        self._pieces: list[tuple[int, int, SlotRef]] = []
        self._stall = self.clock.random.random() < self.clock.stall_share
        self.clock.after(self.clock.delay_s(), self._ask)
        self.clock.after(order.answer_s, self._give_up)

    # -- the sender's side

    @property
    def sending(self) -> bool:
        """Between `PullRequested` and `SendDone`."""
        return self.sender is not None and self.stream in self.sender.sends

    def _ask(self) -> None:
        if self.returned:
            return
        if self.source.core is None or not self.target.connected(self.source.name):
            self.fail()
            return
        if self.source.silent and (self.order.keys or not self.source.answers_probes):
            return
        self._from = self.source.arena
        self.ask(self.source.life)

    def send(self, bulk: SendBulk) -> None:
        """Send the segments that the sender has, shard by shard, each after a random delay; see `Pull`."""
        slots = iter(unpack_slots(bulk.slots))
        size = 8 * SHARDS
        for index, code in enumerate(bulk.codes):
            if code == Code.LOCAL:
                at = len(self.checksums)
                self.checksums[index] = bulk.checksums[at * size : (at + 1) * size]
                slot = next(slots)
                self._pieces += [(index, shard, slot) for shard in range(SHARDS)]
        self._pieces.reverse()
        self._next()

    def _next(self) -> None:
        if not self.sending:
            return
        if _frozen(self.sender) or self.receiver.frozen:
            self.clock.after(FROZEN_POLL_S, self._next)
        elif not self._pieces or self.returned:
            self.end_sending()
            self.clock.after(self.clock.delay_s(), self._return)
        elif self._stall and len(self._pieces) == 1:
            self._stall = False
            stall_s = self.clock.random.uniform(0.0, STALL_S)
            if self._one_sided:
                self._travel(stall_s)
            else:
                self.clock.after(stall_s, self._next)
        else:
            self._travel(self.clock.delay_s())

    def _travel(self, seconds: float) -> None:
        index, shard, slot = self._pieces.pop()
        value = self._from.read(slot, shard)
        self._flipped = self._flipped or self._from.flipped(slot)
        self._travels = index
        self.clock.after(seconds, self._land, index, shard, value)

    def _land(self, index: int, shard: int, value: bytes) -> None:
        self._travels = None
        if not self.returned:
            self._into.write(self.slots[index], shard, value)
            self.landed[index] += 1
        elif self._held == index:
            self.clock.after(LATE_S, self._settle, shard, value)
        self._next()

    def _settle(self, shard: int, value: bytes) -> None:
        """The piece that could not be stopped is written."""
        assert self._held is not None
        if not self.receiver.stopped:
            self._into.write(self.slots[self._held], shard, value)
        self.receiver.deliver(FetchSettled(self.order.fetch))

    # -- the receiver's side

    def abort(self) -> None:
        """End the transfer without the missing bytes. The receiver's thread takes its own time to return. See
        `Pull`."""
        self.clock.after(self.clock.random.uniform(0.0, 0.1), self._return)

    def _give_up(self) -> None:
        if not self.answered:
            self._return()

    def fail(self) -> None:
        """The connection broke: both ends return."""
        self.clock.after(self.clock.delay_s(), self._return)
        self.clock.after(self.clock.delay_s(), self.end_sending)

    def _return(self) -> None:
        if self.returned:
            return
        if self.receiver.frozen:
            self.clock.after(FROZEN_POLL_S, self._return)
            return
        if self.receiver.stopped:
            self.returned = True
            return
        checksums = b""
        for index, slot in enumerate(self.slots):
            expected = self.checksums.get(index, bytes(8 * SHARDS))
            whole = self.landed[index] == SHARDS
            if whole:
                found = b"".join(self._into.read(slot, shard) for shard in range(SHARDS))
                whole_or_flipped = found == expected or self._flipped
                self.target.cluster.expect(whole_or_flipped, f"{self.target.name} received other bytes than sent")
                self.codes[index] = Code.LOCAL if found == expected else Code.BAD_CHECKSUM
            checksums += expected if whole else bytes(8 * SHARDS)
        held = bytearray(len(self.slots))
        if self._one_sided and self._travels is not None and self.codes[self._travels] == Code.LOST:
            self._held = self._travels
            held[self._held] = 1
        self.end_receiving(bytes(self.codes), checksums, bytes(held) if any(held) else b"")
        self.clock.after(self.clock.delay_s(), self.end_sending)


def _frozen(driver: NodeDriver | None) -> bool:
    return driver is not None and driver.frozen
