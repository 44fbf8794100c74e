"""The cold tier of a simulated cluster: which segments it has, and how long reads and writes take, without bytes.

Each node has a connection of its own: reads wait for each other, and so do writes. When the tier is full, the segments
that were written first leave it: the daemons record uses by the day, and a trace is shorter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenlake.core import events, instructions
from tokenlake.disk import NOTE_BYTES
from tokenlake.wire import Code
from tokenlake.wire.slots import split_keys
from tokenlake_bench.simulation.disk import CHECKSUM
from tokenlake_testing.clock import Clock

LATENCY_S, RATE = 2e-3, 5.0e9
"""Seconds until the first byte of a read comes, and bytes per second of each node's connection: those of a file server
over 40 Gb/s or more."""
Name = tuple[str, int, bytes]


@dataclass(eq=False)
class ColdContent:
    """The segments in the cold tier, which outlive a cluster."""

    capacity: int
    """Bytes."""
    latency_s: float = LATENCY_S
    rate: float = RATE
    written_bytes: int = 0
    used: int = 0
    objects: OrderedDict[Name, bytes] = field(default_factory=OrderedDict)
    """The note of each segment, by (tenant, bytes, key), the oldest first."""

    def add(self, name: Name, note: bytes) -> None:
        """A segment was written."""
        self.objects[name] = note
        self.used += name[1]
        self.written_bytes += name[1]
        while self.used > self.capacity:
            (_, nbytes, _), _ = self.objects.popitem(last=False)
            self.used -= nbytes

    def remove(self, name: Name) -> None:
        """Remove a segment, if it is there."""
        if self.objects.pop(name, None) is not None:
            self.used -= name[1]


class SimCold:
    """The cold tier, as one node reaches it."""

    def __init__(self, content: ColdContent, clock: Clock, deliver: Callable[[events.Event], None]) -> None:
        """`deliver`: hands an event to the rules of the node."""
        self.content = content
        self._clock = clock
        self._deliver = deliver
        self._reads_until = self._writes_until = 0.0

    def start(self) -> None:
        """Report the tier to the node's rules, which must have been started."""
        content = self.content
        self._deliver(events.ColdReady(content.latency_s, content.rate, content.rate))

    def look(self, order: instructions.ColdLook) -> None:
        names = _names(order.tenant, order.slot_bytes, order.keys)
        found = bytes(name in self.content.objects for name in names)
        self._clock.after(0.0, self._deliver, events.ColdLooked(order.look, found))

    def read(self, order: instructions.ColdRead) -> None:
        names = _names(order.tenant, order.slot_bytes, order.keys)
        nbytes = len(names) * order.slot_bytes
        self._reads_until = max(self._clock.now, self._reads_until) + nbytes / self.content.rate
        self._clock.at(self._reads_until + self.content.latency_s, self._read, order, names)

    def _read(self, order: instructions.ColdRead, names: list[Name]) -> None:
        objects, checksum = self.content.objects, CHECKSUM * order.shards
        there = [name in objects for name in names]
        codes = bytes(Code.LOCAL if each else Code.LOST for each in there)
        checksums = b"".join(checksum if each else bytes(len(checksum)) for each in there)
        notes = b"".join(objects.get(name, bytes(NOTE_BYTES)) for name in names)
        self._deliver(events.FetchDone(order.fetch, codes, checksums, notes=notes))

    def abort(self, order: instructions.AbortFetch) -> None: ...

    def write(self, order: instructions.ColdWrite) -> None:
        names = _names(order.tenant, order.slot_bytes, order.keys)
        new = [name for name in names if name not in self.content.objects]
        self._writes_until = max(self._clock.now, self._writes_until) + len(new) * order.slot_bytes / self.content.rate
        codes = bytes(Code.EXISTS if name in self.content.objects else Code.COMMITTED for name in names)

        def done() -> None:
            for at, name in enumerate(names):
                if codes[at] == Code.COMMITTED and name not in self.content.objects:
                    self.content.add(name, order.notes[at * NOTE_BYTES : (at + 1) * NOTE_BYTES])
            self._deliver(events.ColdWritten(order.write, codes))

        self._clock.at(self._writes_until + (self.content.latency_s if new else 0.0), done)

    def erase(self, order: instructions.ColdErase) -> None:
        for name in _names(order.tenant, order.slot_bytes, order.keys):
            self.content.remove(name)


def _names(tenant: str, slot_bytes: int, keys: bytes) -> list[Name]:
    return [(tenant, slot_bytes, key) for key in split_keys(keys)]
