"""State that all parts of a simulated cluster share: clock, settings, ids, and the findings of the checks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from tests.sim.arena import REGION_BYTES, View
from tests.sim.clock import RandomClock
from tests.sim.cold import Cold
from tokenlake.core import CoreConfig, events, instructions
from tokenlake.directory.ring_record import RingRecord
from tokenlake.location import NOWHERE, Location

SHORT_RULES = {
    "lease_s": 0.6,
    "reservation_s": 0.8,
    "peer_lease_s": 1.0,
    "sync_grace_s": 0.6,
    "dirty_share": 0.4,
    "session_reserve_share": 0.6,
    "previous_ring_s": 1.2,
    "drain_s": 2.0,
    "disk_writes_per_day": 0.0,
}
"""Deadlines that a short run reaches, and shares of at least one slot in an arena of a dozen."""
REMEMBERED = 64
"""Number of released views that are checked again: wrong bytes must show in the slot's generation."""


class World:
    """`Cluster` without its nodes; nodes, engines and links depend on this part alone."""

    def __init__(
        self,
        names: Iterable[str],
        seed: int,
        *,
        regions: int,
        recording: bool,
        disk_places: int = 0,
        has_cold: bool = False,
        locations: Mapping[str, Location] = MappingProxyType({}),
        **rules: float,
    ) -> None:
        """`has_cold`: the nodes have a cold tier. `locations`: of nodes, by name."""
        self.clock = RandomClock(seed)
        self.disk_places = disk_places
        """Segments that the disk of each node holds; 0: no node has a disk."""
        self.cold = Cold(self.clock) if has_cold else None
        """The cold tier of all nodes, if they have one."""
        self.recording = recording
        self.watcher: Callable[[str, events.Event, list[instructions.Instruction]], None] = lambda *_: None
        """Called with the name of a node, each of its events and the instructions that its rules returned for it."""
        self.regions = regions
        self.rules = {**SHORT_RULES, **rules}
        self.lease_s = self.rules["lease_s"]
        self._locations = dict(locations)
        self.wrong: list[str] = []
        """Violations seen so far; the next check reports them."""
        self.refusals: list[str] = []
        """Reasons of refused joins."""
        self._names = list(names)
        self.record = RingRecord.of(dict.fromkeys(self._names, regions * REGION_BYTES))
        """The ring record, as the membership stores it."""
        self._ids = itertools.count(1000)
        self._copies: deque[View] = deque(maxlen=REMEMBERED)

    def config(self, name: str, incarnation: int) -> CoreConfig:
        """The configuration of a life of a node that begins now."""
        location = self._locations.get(name, NOWHERE)
        rules = {**self.rules, "location": location}
        return CoreConfig(name, incarnation, self.record, self.regions, REGION_BYTES, **rules)  # type: ignore[arg-type]

    def leave(self, name: str) -> None:
        """Take a node out of the ring record, and end it."""
        raise NotImplementedError

    def next_id(self) -> int:
        """An id that is never used twice in this cluster."""
        return next(self._ids)

    def expect(self, truth: bool, wrong: str) -> None:
        """Record the violation `wrong` unless `truth`; the next check reports it."""
        if not truth:
            self.wrong.append(wrong)

    def remember(self, view: View) -> None:
        """Check a released view again later, as a process that copies out of it does."""
        self._copies.append(view)
