"""One bulk pull: piece by piece, with a sender and a receiver that each live, freeze and die on their own.

::

    receiver: StartFetch ------------------------- AbortFetch ~~~~~~ FetchDone   (bytes land until then)
    sender:          PullRequested  SendBulk --- pieces ---------------- SendDone
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.arena import SHARDS
from tokenlake.core import events
from tokenlake.core.instructions import SendBulk, StartFetch
from tokenlake.wire import Code
from tokenlake.wire.slots import SlotRef, unpack_slots

if TYPE_CHECKING:
    from tests.sim.node import SimNode

__all__ = ["FROZEN_POLL_S", "Transfer"]

STALL_S = 0.2
"""At most."""
FROZEN_POLL_S = 0.01


class Transfer:
    """Pulls `order.keys` from `sender` into slots of `receiver`."""

    def __init__(self, receiver: SimNode, sender: SimNode, order: StartFetch, stream: int) -> None:
        self.clock = receiver.cluster.clock
        self.receiver = receiver
        self.sender = sender
        self.order = order
        self.stream = stream
        self.targets = unpack_slots(order.slots)
        self.sending = False
        """Between PullRequested and SendDone."""
        self.returned = False
        """FetchDone is out: nothing lands any more."""
        self.codes = bytearray([Code.LOST]) * len(self.targets)
        self.checksums: dict[int, bytes] = {}
        self.landed = [0] * len(self.targets)
        self._flipped = False
        """A bit flipped in a slot of the sender."""
        self._pieces: list[tuple[int, int, SlotRef]] = []
        self._stall = self.clock.random.random() < self.clock.stall_share
        self.clock.after(self.clock.delay_s(), self._ask)

    # -- the sender's side

    def _ask(self) -> None:
        if self.returned:
            return
        if self.sender.core is None or not self.receiver.connected(self.sender):
            self.fail()
            return
        self.sending = True
        self.sender.sends[self.stream] = self
        order = self.order
        asked = events.PullRequested(self.stream, self.receiver.name, order.tenant, order.keys, order.background)
        self.sender.deliver(asked)

    def send(self, bulk: SendBulk) -> None:
        """The sender's rules answered: bytes begin to flow."""
        places = iter(unpack_slots(bulk.slots))
        size = 8 * SHARDS
        for index, code in enumerate(bulk.codes):
            if code == Code.LOCAL:
                at = len(self.checksums)
                self.checksums[index] = bulk.checksums[at * size : (at + 1) * size]
                place = next(places)
                self._pieces += [(index, shard, place) for shard in range(SHARDS)]
        self._pieces.reverse()
        self._next()

    def _next(self) -> None:
        if not self.sending:
            return
        if self.sender.frozen or self.receiver.frozen:
            self.clock.after(FROZEN_POLL_S, self._next)
        elif not self._pieces or self.returned:
            self._stop_sending()
            self.clock.after(self.clock.delay_s(), self._return)
        elif self._stall and len(self._pieces) == 1:
            self._stall = False
            self.clock.after(self.clock.random.uniform(0.0, STALL_S), self._next)
        else:
            index, shard, place = self._pieces.pop()
            value = self.sender.arena.read(place, shard)
            self._flipped = self._flipped or self.sender.arena.flipped(place)
            self.clock.after(self.clock.delay_s(), lambda: self._land(index, shard, value))

    def _land(self, index: int, shard: int, value: bytes) -> None:
        if not self.returned:
            self.receiver.arena.write(self.targets[index], shard, value)
            self.landed[index] += 1
        self._next()

    def _stop_sending(self) -> None:
        if self.sending:
            self.sending = False
            if self.sender.sends.pop(self.stream, None) is not None:
                self.sender.deliver(events.SendDone(self.stream))

    # -- the receiver's side

    def abort(self) -> None:
        """The receiver is told to return, and does so in its own time."""
        self.clock.after(self.clock.random.uniform(0.0, 0.1), self._return)

    def fail(self) -> None:
        """The connection broke: both ends return."""
        self.clock.after(self.clock.delay_s(), self._return)
        self.clock.after(self.clock.delay_s(), self._stop_sending)

    def _return(self) -> None:
        if self.returned:
            return
        if self.receiver.frozen:
            self.clock.after(FROZEN_POLL_S, self._return)
            return
        self.returned = True
        if self.receiver.receives.pop(self.order.fetch, None) is None:
            return
        checksums = b""
        for index, target in enumerate(self.targets):
            expected = self.checksums.get(index, bytes(8 * SHARDS))
            whole = self.landed[index] == SHARDS
            if whole:
                found = b"".join(self.receiver.arena.read(target, shard) for shard in range(SHARDS))
                whole_or_flipped = found == expected or self._flipped
                self.receiver.cluster.expect(whole_or_flipped, f"{self.receiver.name} received other bytes than sent")
                self.codes[index] = Code.LOCAL if found == expected else Code.BAD_CHECKSUM
            checksums += expected if whole else bytes(8 * SHARDS)
        self.receiver.deliver(events.FetchDone(self.order.fetch, bytes(self.codes), checksums))
        self.clock.after(self.clock.delay_s(), self._stop_sending)
