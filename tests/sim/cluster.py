"""Nodes with a NodeCore each, on simulated time, a simulated network and simulated memory."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence

from tests.sim.arena import REGION_BYTES
from tests.sim.engine import Engine, Reading
from tests.sim.link import Link
from tests.sim.node import SimNode
from tests.sim.world import World
from tokenlake.core import NodeCore
from tokenlake.directory.ring_record import RingRecord
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.location import parse_location
from tokenlake.memory import Kind, State
from tokenlake.memory.store import ORPHANED
from tokenlake.wire import Code
from tokenlake.wire.slots import join_keys


class Cluster(World):
    """Nodes, links and engines; call `check` after each step, `settle` at the end."""

    def __init__(
        self,
        nodes: int = 3,
        seed: int = 0,
        *,
        regions: int = 3,
        recording: bool = False,
        disk_places: int = 0,
        keep: bool = False,
        has_cold: bool = False,
        locations: Sequence[str] = (),
        **rules: float,
    ) -> None:
        """`disk_places`: segments that the disk of each node holds. `keep`: the memory of a node outlives its daemon.
        `has_cold`: the nodes have a cold tier. `locations`: of the first nodes. `rules`: fields of `CoreConfig` that
        differ from the defaults of `World`, which are shorter than a daemon's."""
        names = [f"n{index}" for index in range(nodes)]
        of = {name: parse_location(location) for name, location in zip(names, locations, strict=False)}
        super().__init__(
            names,
            seed,
            regions=regions,
            recording=recording,
            disk_places=disk_places,
            keep=keep,
            has_cold=has_cold,
            locations=of,
            **rules,
        )
        self.engines: list[Engine] = []
        self.nodes = {name: SimNode(self, name) for name in self._names}
        pairs = itertools.combinations(self._names, 2)
        self._links = {frozenset(pair): Link(*(self.nodes[name] for name in pair)) for pair in pairs}
        self._know_links()

    def _know_links(self) -> None:
        for node in self.nodes.values():
            node.links = {other: self.link(node.name, other) for other in self.nodes if other != node.name}

    # -- changes of the ring

    def change(self, record: RingRecord, spread_s: float = 0.0, missed: Container[str] = ()) -> None:
        """The membership stores `record`. Each node reads it within `spread_s`; the nodes in `missed` do not, and hear
        of it from others."""
        self.record = record
        for name, node in self.nodes.items():
            if name not in missed:
                self.clock.after(self.clock.random.uniform(0.0, spread_s), node.follow)

    def add(self, spread_s: float = 0.0, missed: Container[str] = ()) -> SimNode:
        """Start another node, as large as the others."""
        name = f"n{len(self.nodes)}"
        self.change(self.record.with_member(name, self.regions * REGION_BYTES), spread_s, missed)
        node = self.nodes[name] = SimNode(self, name)
        for other in self.nodes.values():
            if other is not node:
                self._links[frozenset((name, other.name))] = Link(other, node)
        self._know_links()
        return node

    def drain(self, name: str, spread_s: float = 0.0, missed: Container[str] = ()) -> None:
        """A node begins to drain. When it has drained it leaves."""
        self.change(self.record.draining(name), spread_s, missed)

    def leave(self, name: str) -> None:
        """Take a node out of the ring record, and end it."""
        node = self.nodes[name]
        if name in self.record.members:
            self.change(self.record.without(name))
        if node.core is not None:
            node.crash()
        node.retired = True

    # -- parts

    def link(self, a: str, b: str) -> Link:
        """The link between two nodes."""
        return self._links[frozenset((a, b))]

    def links(self) -> list[Link]:
        """The links of all pairs of nodes."""
        return list(self._links.values())

    def links_of(self, name: str) -> list[Link]:
        """The links of one node."""
        return [link for link in self._links.values() if name in link.ends]

    def node(self, index: int) -> SimNode:
        """A node by its position among those that have not left."""
        present = [node for node in self.nodes.values() if not node.retired]
        return present[index % len(present)]

    def core(self, index: int) -> NodeCore:
        """The rules of a live node."""
        core = self.node(index).core
        assert core is not None
        return core

    def join(self, node: int, tenant: str = "red", processes: int = 1) -> Engine:
        """Start an engine at a node."""
        engine = Engine(self.node(node), tenant, processes)
        self.engines.append(engine)
        return engine

    def alive(self) -> list[Engine]:
        """Engines that live, at daemons that live."""
        return [engine for engine in self.engines if engine.alive]

    def calm(self) -> None:
        """Make all frames and transfers fast from here on."""
        self.clock.slow_share = self.clock.stall_share = 0.0

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.run_for(seconds)

    # -- checks

    def check(self, cores: bool = True) -> None:
        """Every view holds right bytes, every slot that a process may write is still its own, and `cores` are
        consistent."""
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
                orphaned = node.core.counters.by_labels(ORPHANED)
                # The ledger does not say which segment continues which.
                kept = bool(orphaned.get(("primary",))) and not self.keep
                assert not kept, f"{node.name}: parents left before their children: {orphaned}"
                if node.kept is not None:
                    node.kept.check(node.core)

    # -- the end

    def settle(self) -> None:
        """End all faults and all engines, let every deadline pass, and have every primary copy advertised again."""
        for node in self.nodes.values():
            if node.kept is not None:
                node.kept.ends, node.kept.dies_in = False, None
            node.thaw()
            node.speak()
            if node.core is None:
                node.start()
            node.follow()
        for link in self._links.values():
            link.heal()
        for engine in self.engines:
            engine.die()
        self.run_for(self.rules["reservation_s"] + self.rules["peer_lease_s"])
        for link in self._links.values():
            link.cut()
        self.run_for(1.5)

    def check_settled(self) -> None:
        """Nothing leaked: no pins, no quarantine, no grown maps; no segment has two primary copies; each
        segment that a node owns is named by its directory node, and each with a primary copy is found from every
        node."""
        self.check()
        for name, node in self.nodes.items():
            core = node.core
            if node.retired:
                continue
            assert core is not None
            assert core.record == self.record
            assert core.idle(), f"{name} is not idle: {core.census()}"
            census = core.census()
            assert census.pop("calls") <= len(self.nodes) - 1
            assert census.pop("segments with quotas") <= sum(1 for _ in core.store.segments())
            assert census.pop("timers") <= 8 * len(self.nodes), f"{name}: timers are left"
            # Hints, and records for explanations, stay; their number has a bound of its own.
            for memory in (
                "directory",
                "explained requests",
                "segments they missed",
                "segments that went",
                "refused segments",
                "segments that the cold tier lacks",
            ):
                del census[memory]
            assert not any(census.values()), f"{name}: {census}"
        keepers = self.keepers()
        assert all(len(names) == 1 for names in keepers.values()), f"two primary copies: {keepers}"
        self._check_directory()
        self._find_all(list(keepers))

    def check_stand_ins(self, dead: int) -> None:
        """After `check_settled`: a node dies, and each segment that hashes to it and that another node owns is named by
        its other candidate, so that each node finds it."""
        self.node(dead).crash()
        self.run_for(0.3)
        self.check()
        self._check_directory()
        self._find_all(list(self.keepers()))

    def _check_directory(self) -> None:
        """Each segment that a node owns is named by the node that keeps its directory entry now; of one that is on
        disk, a node is named that has it."""
        cores = {name: node.core for name, node in self.nodes.items() if node.core is not None}
        for name, core in cores.items():
            owned = [each for each in core.store.segments() if each.owned]
            pairs = core.ring.candidates(join_keys(each.key for each in owned))
            for segment, (first, other) in zip(owned, pairs, strict=True):
                keeper = first if first in cores else other
                named = cores[keeper]._directory_node.recorded_owner(segment.tenant, segment.key)
                assert named == name, f"{segment} of {name}: {keeper} names {named}"
            tier = core._context.disk
            for entry in tier.walk(0, 1 << 16)[0]:
                tenant, key = tier.slab(entry).tenant, tier.key(entry)
                ((first, other),) = core.ring.candidates(key)
                keeper = first if first in cores else other
                named = cores[keeper]._directory_node.recorded_owner(tenant, key)
                owner = None if named is None else cores.get(str(named))
                has = owner is not None and (owner.store.get(tenant, key) or owner._context.disk.find(tenant, key) >= 0)
                assert has, f"{key.hex()[:8]} on the disk of {name}: {keeper} names {named}"

    def keepers(self) -> dict[tuple[TenantId, SegmentKey], list[str]]:
        """The nodes with a primary copy, by segment."""
        keepers: dict[tuple[TenantId, SegmentKey], list[str]] = {}
        for name, node in self.nodes.items():
            for segment in node.core.store.segments() if node.core is not None else ():
                if segment.state is State.READY and segment.kind is Kind.PRIMARY:
                    keepers.setdefault((segment.tenant, segment.key), []).append(name)
        return keepers

    def _find_all(self, kept: list[tuple[TenantId, SegmentKey]]) -> None:
        """Find every kept segment from every node that is alive. Engines that join may take regions from tenants
        without engines, so only segments that stay must be found."""
        self.calm()
        for tenant in dict.fromkeys(tenant for tenant, _ in kept):
            alive = [number for number, node in enumerate(self.nodes.values()) if node.core and not node.retired]
            engines = [self.join(number, tenant) for number in alive]
            self.run_for(0.1)
            for key in (key for owner, key in kept if owner == tenant):
                for engine in engines:
                    # One after the other: a node leases only a share of its slots to others, here perhaps one.
                    engine.answers.clear()
                    before = self.keepers().get((tenant, key))
                    engine.read([key], Reading(fetch=False, hold_s=0.002))
                    self.run_for(0.015)
                    code = engine.answers[0].codes[0]
                    # A node without a region for this tenant can lease nothing, wherever the segment lies.
                    found = code in (Code.LOCAL, Code.REMOTE, Code.SESSION_LIMIT)
                    # A node whose cached copy outlived the owner's owns the segment soon.
                    moved = before is None or self.keepers().get((tenant, key)) != before
                    assert found or moved, f"{engine.node.name} does not find {key.hex()[:8]}: {Code(code).name}"
            for engine in engines:
                engine.die()
