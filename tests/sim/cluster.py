"""N NodeCores on simulated time, a simulated network and simulated memory."""

from __future__ import annotations

import itertools
from collections import deque

from tests.sim.arena import REGION_BYTES, View
from tests.sim.clock import Clock
from tests.sim.engine import Engine, Reading
from tests.sim.link import Link
from tests.sim.node import SimNode
from tokenlake.core import NodeCore
from tokenlake.core.context import CoreConfig
from tokenlake.core.fetch import FETCHED, MISSING
from tokenlake.core.grants import SKIPPED
from tokenlake.core.match import ASKED, LOCAL, PENDING
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.store import Kind, State
from tokenlake.wire import Code

__all__ = ["Cluster"]

SHORT_RULES = {
    "lease_s": 0.6,
    "reservation_s": 0.8,
    "peer_lease_s": 1.0,
    "sync_grace_s": 0.6,
    "dirty_share": 0.4,
    "cached_share": 0.2,
    "session_reserve_share": 0.6,
}
"""Deadlines that a short run reaches, shares that leave something in an arena of a dozen slots."""
REMEMBERED = 64
"""Released views that are looked at again: wrong bytes must show in the generation."""


class Cluster:
    """Nodes, links and engines; `check` after each step, `settle` at the end."""

    def __init__(self, nodes: int = 3, seed: int = 0, *, regions: int = 3, recording: bool = False, **rules: float):
        """`rules`: fields of `CoreConfig` other than the defaults here, which are shorter than a daemon's."""
        self.clock = Clock(seed)
        self.recording = recording
        self.regions = regions
        self.rules = {**SHORT_RULES, **rules}
        self.lease_s = self.rules["lease_s"]
        self.wrong: list[str] = []
        self.refusals: list[str] = []
        self.engines: list[Engine] = []
        self._ids = itertools.count(1000)
        self._copies: deque[View] = deque(maxlen=REMEMBERED)
        self._names = [f"n{index}" for index in range(nodes)]
        self.nodes = {name: SimNode(self, name) for name in self._names}
        for node in self.nodes.values():
            node.start()
        pairs = itertools.combinations(self._names, 2)
        self._links = {frozenset(pair): Link(*(self.nodes[name] for name in pair)) for pair in pairs}

    # -- parts

    def config(self, name: str, incarnation: int) -> CoreConfig:
        """Of one life of a node."""
        memory = self.regions * REGION_BYTES
        members = dict.fromkeys(self._names, memory)
        return CoreConfig(name, incarnation, members, self.regions, REGION_BYTES, **self.rules)  # type: ignore[arg-type]

    def next_id(self) -> int:
        """Never used twice in this cluster."""
        return next(self._ids)

    def link(self, a: str, b: str) -> Link:
        """Between two nodes."""
        return self._links[frozenset((a, b))]

    def links(self) -> list[Link]:
        """All of them."""
        return list(self._links.values())

    def links_of(self, name: str) -> list[Link]:
        """Of one node."""
        return [link for link in self._links.values() if name in link.ends]

    def node(self, index: int) -> SimNode:
        """By position."""
        return self.nodes[self._names[index]]

    def core(self, index: int) -> NodeCore:
        """The rules of a live node."""
        core = self.node(index).core
        assert core is not None
        return core

    def join(self, node: int, tenant: str = "red", processes: int = 1) -> Engine:
        """An engine starts."""
        engine = Engine(self.node(node), tenant, processes)
        self.engines.append(engine)
        return engine

    def alive(self) -> list[Engine]:
        """Engines that live, on daemons that do."""
        return [engine for engine in self.engines if engine.alive]

    def calm(self) -> None:
        """Frames and transfers are fast from here on."""
        self.clock.slow_share = self.clock.stall_share = 0.0

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.run_for(seconds)

    # -- checks

    def expect(self, truth: bool, wrong: str) -> None:
        """Something that a thread saw; reported by the next `check`."""
        if not truth:
            self.wrong.append(wrong)

    def remember(self, view: View) -> None:
        """A released slot that somebody looks at again, as a copy out does."""
        self._copies.append(view)

    def check(self, cores: bool = True) -> None:
        """Right bytes wherever somebody may look, slots still owned by whoever may write, `cores` whole."""
        assert not self.wrong, self.wrong
        for engine in self.engines:
            for process in engine.processes:
                for (lease, index), view in process.views.items():
                    where = f"{process.node.name}: lease {lease}, item {index}"
                    assert view.right or view.flipped, f"wrong bytes under {where}"
                    assert not view.reissued, f"reissued under {where}"
                for (write, index), view in process.fills.items():
                    assert not view.reissued, f"{process.node.name}: slot of write {write}, item {index} was reissued"
        for view in self._copies:
            assert view.right or view.reissued or view.flipped, "wrong bytes under the generation that was read before"
        for node in self.nodes.values():
            if node.core is not None and cores:
                node.core.check_integrity()

    # -- the end

    def settle(self) -> None:
        """Heal everything, end all engines, let every deadline pass, have every primary copy advertised anew."""
        for node in self.nodes.values():
            node.thaw()
            if node.core is None:
                node.start()
        for link in self._links.values():
            link.heal()
        for engine in self.engines:
            engine.die()
        self.run_for(self.rules["reservation_s"] + self.rules["peer_lease_s"])
        for link in self._links.values():
            link.cut()
        self.run_for(1.5)

    def check_settled(self) -> None:
        """Nothing leaked: no pins, no quarantine, no maps that grew; tokens add up; each segment that some node
        keeps is found from every node and has one primary copy."""
        self.check()
        for name, node in self.nodes.items():
            core = node.core
            assert core is not None
            assert core.idle(), f"{name} is not idle: {core.census()}"
            census = core.census()
            assert census.pop("calls") <= len(self.nodes) - 1
            assert census.pop("timers") <= 8 * len(self.nodes), f"{name}: timers are left"
            # Hints, and what is remembered for whoever asks, stay; their number has a bound of its own.
            for memory in ("directory", "explained requests", "segments they missed", "segments that went"):
                del census[memory]
            assert not any(census.values()), f"{name}: {census}"
            counters = core.counters
            answered = (LOCAL, FETCHED, SKIPPED, PENDING, MISSING)
            assert counters[ASKED] == sum(counters[metric] for metric in answered), f"{name}: tokens do not add up"
        keepers = self.keepers()
        assert all(len(names) == 1 for names in keepers.values()), f"two primary copies: {keepers}"
        self._find_all(list(keepers))

    def keepers(self) -> dict[tuple[TenantId, SegmentKey], list[str]]:
        """Which nodes have a primary copy, per segment."""
        keepers: dict[tuple[TenantId, SegmentKey], list[str]] = {}
        for name, node in self.nodes.items():
            for segment in node.core.store.segments() if node.core is not None else ():
                if segment.state is State.READY and segment.kind is Kind.PRIMARY:
                    keepers.setdefault((segment.tenant, segment.key), []).append(name)
        return keepers

    def _find_all(self, kept: list[tuple[TenantId, SegmentKey]]) -> None:
        """Engines that join may take regions from tenants that have none: only what stays must be found."""
        self.calm()
        for tenant in dict.fromkeys(tenant for tenant, _ in kept):
            engines = [self.join(node, tenant) for node in range(len(self.nodes))]
            self.run_for(0.1)
            for key in (key for of, key in kept if of == tenant):
                for engine in engines:
                    # One after the other: a node leases a share of its slots to others, here perhaps one.
                    engine.answers.clear()
                    engine.read([key], Reading(fetch=False, hold_s=0.002))
                    self.run_for(0.015)
                    code = engine.answers[0].codes[0]
                    # A node without a region for this tenant can lease nothing, wherever it is.
                    found = code in (Code.LOCAL, Code.REMOTE, Code.SESSION_LIMIT)
                    gone = (tenant, key) not in self.keepers()
                    assert found or gone, f"{engine.node.name} does not find {key.hex()[:8]}: {Code(code).name}"
            for engine in engines:
                engine.die()
