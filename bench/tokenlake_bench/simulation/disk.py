"""The disk of one simulated node: sizes and times, and which segment lies at which place, without bytes.

Reads wait for each other, and so do writes; both have a rate of their own, as on an NVMe drive whose queues are not
full of the other kind.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenlake.core import events, instructions
from tokenlake.disk import stride, unpack_places
from tokenlake.wire import Code
from tokenlake.wire.slots import split_keys
from tokenlake_testing.clock import Clock

CHECKSUM = b"checksum"
"""The checksum that every segment and shard has, because simulated segments have no bytes."""


READ_RATE, WRITE_RATE = 6.0e9, 3.0e9
"""Bytes per second of one NVMe drive with four PCIe 4 lanes."""
LATENCY_S = 200e-6
"""Seconds that each read or write takes beyond its bytes."""


class SimDisk:
    """Carries out the instructions about the device 0 of a node. Its places keep the key and the generation that were
    written last, and a read of other ones finds wrong bytes."""

    def __init__(self, capacity: int, clock: Clock, deliver: Callable[[events.Event], None]) -> None:
        """`capacity`: bytes. `deliver`: hands an event to the rules of the node."""
        self.capacity = capacity
        self._clock = clock
        self._deliver = deliver
        self._places: dict[tuple[str, int, int], tuple[bytes, int]] = {}
        self._reads_until = self._writes_until = 0.0
        self._reads: set[int] = set()
        self.written_bytes = 0

    def start(self) -> None:
        """Report the empty device to the node's rules, which must have been started."""
        self._deliver(events.DiskReady(0, self.capacity, READ_RATE, WRITE_RATE))
        self._deliver(events.DiskRecovered(0))

    def write(self, order: instructions.DiskWrite) -> None:
        keys, places = split_keys(order.keys), unpack_places(order.places)
        nbytes = len(keys) * stride(order.slot_bytes)
        self.written_bytes += nbytes
        self._writes_until = max(self._clock.now, self._writes_until) + nbytes / WRITE_RATE

        def done() -> None:
            for key, place in zip(keys, places, strict=True):
                self._places[order.tenant, order.slot_bytes, place.slot] = key, place.generation
            self._deliver(events.DiskWritten(order.write, bytes([Code.COMMITTED]) * len(keys)))

        self._clock.at(self._writes_until + LATENCY_S, done)

    def read(self, order: instructions.DiskRead) -> None:
        keys, places = split_keys(order.keys), unpack_places(order.places)
        self._reads.add(order.fetch)
        nbytes = len(keys) * stride(order.slot_bytes)
        self._reads_until = max(self._clock.now, self._reads_until) + nbytes / READ_RATE
        codes = bytearray()
        for key, place in zip(keys, places, strict=True):
            right = self._places.get((order.tenant, order.slot_bytes, place.slot)) == (key, place.generation)
            codes.append(Code.LOCAL if right else Code.BAD_CHECKSUM)
        self._clock.at(self._reads_until + LATENCY_S, self._read, order, bytes(codes))

    def _read(self, order: instructions.DiskRead, codes: bytes) -> None:
        if order.fetch in self._reads:
            self._reads.discard(order.fetch)
            checksum = CHECKSUM * order.shards
            found = b"".join(checksum if code == Code.LOCAL else bytes(len(checksum)) for code in codes)
            self._deliver(events.FetchDone(order.fetch, codes, found))

    def abort(self, order: instructions.AbortFetch) -> None: ...

    def forget(self, order: instructions.DiskForget) -> None:
        for place in unpack_places(order.places):
            self._places.pop((order.tenant, order.slot_bytes, place.slot), None)

    def erase(self, order: instructions.DiskErase) -> None:
        slots = [place.slot for place in unpack_places(order.places)]
        for slot in slots:
            self._places.pop((order.tenant, order.slot_bytes, slot), None)
        done = events.DiskErased(order.erase, bytes([Code.COMMITTED]) * len(slots))
        self._clock.at(self._clock.now + LATENCY_S, self._deliver, done)

    def trim(self, order: instructions.DiskTrim) -> None: ...
