"""Renders what happens in a simulated cluster as text, in the order of the simulated clock.

::

    ms  sender -> receiver  message, by its name in `tokenlake.wire` or `tokenlake.core`, with its essential fields
    ms  node                event or instruction of a node
    ms  node                * what changed there (`tests.stories.changes`)

A message between nodes stands at the time at which it is sent, a request of an engine at that of its arrival. Each
frame takes one millisecond. A line is about segments that have a name in the story, or about one of `ALWAYS`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from tests.core.scenes import calm, placed, store
from tests.sim.engine import Engine, SimProcess
from tests.stories.changes import Seen, changes, look
from tokenlake.core import NodeCore, events, instructions
from tokenlake.identity import SegmentKey
from tokenlake.memory import ledger
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import split_keys

LIFE = (events.PeerDown, events.PeerUp, events.RingChanged, events.SaveRequested)
KEPT = (events.SealRequested, instructions.Sealed, events.RegionKept, events.MemoryKept)
ALWAYS = (*LIFE, *KEPT, instructions.Drained, instructions.Saved, peer.AdvertisingDone)
NUMBERS = ("id", "call", "fetch", "stream", "check", "write")
"""Fields of a request that its reply repeats."""


class _Even(random.Random):
    """Draws the same delay for each frame, so that one frame more or less does not change the times of the others."""

    def uniform(self, a: float, b: float) -> float:
        return min(b, 0.001)


class Story:
    """A calm cluster. Its events become lines, whose times count from the first one."""

    def __init__(self, nodes: int = 4, **rules: Any) -> None:
        self.cluster = calm(nodes, **rules)
        self.cluster.clock.random = _Even()
        self.cluster.watcher = self._watch
        self._lines: list[tuple[float, str, str, str]] = []
        self._engines: dict[SimProcess, str] = {}
        """Letters of the engines, by their processes."""
        self._names: dict[SegmentKey, str] = {}
        self._seen: dict[tuple[NodeCore, SegmentKey], Seen] = {}
        """By the life of a node: one that starts anew has nothing."""
        self._asked: dict[tuple[str, str, str, int], Sequence[SegmentKey]] = {}
        """The keys of requests, by (sender, receiver, field, number)."""
        self._grants: dict[tuple[str, int], Sequence[SegmentKey]] = {}
        """The keys of leases and writes, by (node that gave them, number)."""

    def join(self, node: int) -> Engine:
        """Start an engine at a node. Engines are called a, b in the order in which they start."""
        found = self.cluster.join(node)
        self._engines[found.processes[0]] = "ab"[len(self._engines)]
        self.cluster.run_for(0.01)
        return found

    def segments(self, directory_node: int, other: int, count: int = 1) -> list[SegmentKey]:
        """Keys with this directory node and this stand-in."""
        return self.name(placed(self.cluster, directory_node, other, count, f"story {len(self._names)}"))

    def name(self, keys: list[SegmentKey]) -> list[SegmentKey]:
        """Give these keys the next of the names s0, s1, ..."""
        self._names |= {key: f"s{number}" for number, key in enumerate(keys, len(self._names))}
        return keys

    def own(self, node: int, keys: Sequence[SegmentKey]) -> None:
        """Before the story, an engine without a name stores these segments at the node."""
        store(self.cluster, self.cluster.join(node), keys)
        self.begin()

    def begin(self) -> None:
        """The story begins one second later."""
        self.cluster.run_for(1.0)
        self._lines.clear()

    def line(self, sender: str, receiver: str, text: str) -> None:
        """Add a line at the present time. `receiver` is empty for what happens at the sender."""
        self._lines.append((self.cluster.clock.now, sender, receiver, text))

    def lines(self) -> list[str]:
        """The lines. Those that follow each other and are alike but for the receiver, or for the place, are one."""
        lines, began = [], self._lines[0][0]
        for (at, sender, text), alike in groupby(self._lines, lambda line: (line[0], line[2] and line[1], line[3])):
            ends = " ".join(dict.fromkeys(line[2] or line[1] for line in alike))
            lines.append(f"{1e3 * (at - began):5.0f}  {f'{sender:<2} -> {ends}' if sender else ends:<15} {text}")
        return lines

    def _watch(self, node: str, event: events.Event, orders: list[instructions.Instruction]) -> None:
        core = self.cluster.nodes[node].life.core
        if isinstance(event, events.Requested):
            self._tell(self._letter(event.connection), node, event.message)
        else:
            self._tell(node, "", event)
        self._compare(node, core)
        for order in orders:
            match order:
                case instructions.Answer(connection, message):
                    self._tell(node, self._letter(connection), message)
                case instructions.SendToPeer(other, message):
                    self._tell(node, other, message)
                case _:
                    self._tell(node, "", order)

    def _letter(self, connection: int) -> str:
        return next((letter for process, letter in self._engines.items() if process.connection == connection), "")

    def _compare(self, node: str, core: NodeCore) -> None:
        """Add lines with what the event changed at the node."""
        before = {key: self._seen.get((core, key), Seen()) for key in self._names}
        now = {key: look(core, key) for key in self._names}
        self._seen |= {(core, key): seen for key, seen in now.items()}
        told = [(key, ", ".join(changes(core, key, before[key], now[key]))) for key in now]
        if changed := [each for each in told if each[1]]:
            self.line(node, "", f"* {self._grouped(changed)}")

    def _tell(self, sender: str, receiver: str, message: Any) -> None:
        """Add the line of a message, or of an event or instruction of a node, which has no receiver."""
        number = next(((name, getattr(message, name)) for name in NUMBERS if hasattr(message, name)), ("", 0))
        keys = self._keys_of(sender, receiver, message, number)
        if hasattr(message, "codes"):
            names = self._grouped(zip(keys, _codes(message), strict=False))
        else:
            self._asked[(sender, receiver, *number)] = keys if number[0] else ()
            names = " ".join(self._names[key] for key in keys if key in self._names)
        match message:
            case engine.Prepared(write=grant) | engine.Matched(lease=grant) | peer.LookupReply(lease=grant):
                given = zip(keys, message.codes, strict=False)
                kept = [*Code] if isinstance(message, engine.Prepared) else [Code.LOCAL, Code.REMOTE]
                self._grants[sender, grant] = [key for key, code in given if code in kept]
        if names or isinstance(message, ALWAYS):
            self.line(sender, receiver, f"{type(message).__name__} {names}{_extra(message)}".rstrip())

    def _keys_of(self, sender: str, receiver: str, message: Any, number: tuple[str, int]) -> Sequence[SegmentKey]:
        """The keys that a message is about, whether it names them, a lease or write, or the number of a request."""
        match message:
            case engine.Fetch(lease=lease, start=start, stop=stop):
                return self._grants[receiver, lease][start:stop]
            case engine.Release(ranges=ranges):
                return [key for lease, *ends in ranges for key in self._grants[receiver, lease][slice(*ends)]]
            case engine.Commit(write=write, indices=indices):
                return [self._grants[receiver, write][index] for index in indices]
            case peer.ReleaseLease(leases=leases):
                return [key for lease in leases for key in self._grants.get((receiver, lease), ())]
            case engine.Regrant(leases=leases):
                return [self._grants[receiver, lease][first] for lease, _, first, _ in leases]
            case events.SegmentsKept(records=records) | instructions.Record(records=records):
                return [found.key for each in records if (found := ledger.unpack(each)) is not None]
            case instructions.CheckSlot(slot=slot):
                segments = self.cluster.nodes[sender].life.core.store.segments()
                return [segment.key for segment in segments if segment.packed == slot]
            case _ if hasattr(message, "keys"):
                return split_keys(message.keys)
        return self._asked.get((receiver, sender, *number), self._asked.get((sender, "", *number), ()))

    def _grouped(self, told: Iterable[tuple[SegmentKey, str]]) -> str:
        """The names of the segments, each run of them with its text."""
        named = [(self._names[key], text) for key, text in told if key in self._names]
        runs = [(text, " ".join(name for name, _ in run)) for text, run in groupby(named, lambda each: each[1])]
        return ", ".join(f"{names}: {text}" for text, names in runs)


def _codes(message: Any) -> Iterable[str]:
    """The codes of a message by name, with the owner of a segment that is elsewhere."""
    owners, on_disk = iter(getattr(message, "nodes", ())), getattr(message, "on_disk", b"")
    for at, code in enumerate(message.codes):
        owner = f" {next(owners)}" if code == Code.ELSEWHERE else ""
        yield f"{Code(code).name}{owner}{' on disk' if on_disk and on_disk[at] else ''}"


def _extra(message: Any) -> str:
    """The essential fields besides the segments."""
    match message:
        case engine.Match(in_flight_wait_s=wait_s) if wait_s:
            return f", waits up to {1e3 * wait_s:.0f} ms"
        case instructions.StartFetch(node=other, background=background):
            return f" from {other}{', no engine waits' * background}"
        case events.PullRequested(node=other):
            return f" by {other}"
        case peer.Owned(previous=other) if other:
            return f", previous owner {other}"
        case peer.Redundant(nodes=nodes):
            return f", owner {' '.join(dict.fromkeys(nodes))}"
        case events.SlotChecked(right=right):
            return ": right" if right else ": wrong bytes"
        case events.PeerUp(node=other) | events.PeerDown(node=other):
            return other
        case events.RingChanged(record=record):
            members = (f"{name} (drains)" if each.draining else name for name, each in record.members.items())
            return f"epoch {record.epoch}: {' '.join(members)}"
        case instructions.Drained(moved=moved, lost_segments=lost):
            return ", ".join([f"{node} took {segments}" for node, segments, _ in moved] + [f"{lost} lost"])
        case events.MemoryKept(survivors=survivors):
            return f"{len(survivors)} survivors"
        case events.RegionKept(region=region):
            return f"{region}"
        case peer.AdvertisingDone(ring=(epoch, _)):
            return f"epoch {epoch}"
    return ""
