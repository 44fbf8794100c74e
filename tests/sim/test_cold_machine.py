"""The machine of `test_cluster_machine` on nodes with a cold tier, with disks and without.

The tier goes and comes back, refuses each operation, is slow, answers late, has other bytes, and its index names
objects that are gone, or lacks some that are there. It outlives the crashes of all nodes.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from tests.profiles import examples
from tests.sim.cold import Cold
from tests.sim.engine import Reading
from tests.sim.prompts import PROMPTS
from tests.sim.test_cluster_machine import NODES, PAUSES, ClusterMachine, nodes, readings, which
from tokenlake.core import events
from tokenlake.core.cold import EXISTED, FAILED, WRITTEN
from tokenlake.core.cold_reads import ABSENT, DAMAGED, READ
from tokenlake.core.cold_tier import ASIDE
from tokenlake.core.report.account import SUPPLIED, Source

SEEN = dict.fromkeys((WRITTEN, EXISTED, FAILED, READ, DAMAGED, ABSENT, ASIDE), 0)
"""Counts over all examples: each of these must have happened."""

supplied: list[int] = []
"""Tokens that engines read from the tier."""


class ColdClusterMachine(ClusterMachine):
    """See the module's docstring."""

    has_cold = True

    @property
    def cold(self) -> Cold:
        assert self.cluster.cold is not None
        return self.cluster.cold

    @initialize(seed=st.integers(0, 1 << 32), number=which, how=readings)
    def begin(self, seed: int, number: int, how: Reading) -> None:
        super().begin(seed)
        for node in range(NODES):
            # Some segments are in the tier from the beginning.
            self.skew(node, 8)
        self.traffic(20)
        self.cold_fault("full", number, 0.03, how, 0.1)
        self.all_restart(("slow", "damage", "lost")[number % 3], number)

    @rule(
        fault=st.sampled_from(("gone", "fails", "full", "slow", "late", "damage", "lost", "unknown")),
        number=which,
        seconds=st.sampled_from((0.03, 0.4, 1.5)),
        how=readings,
        pause=PAUSES,
    )
    def cold_fault(self, fault: str, number: int, seconds: float, how: Reading, pause: float) -> None:
        """While engines read, something is wrong with the tier."""
        cold, clock = self.cold, self.cluster.clock
        if fault in ("gone", "fails") and not cold.fails:
            cold.fails = True
            if fault == "gone":
                for node in self.cluster.nodes.values():
                    assert node.cold is not None
                    node.cold.gone()
            clock.after(seconds + 0.4, self.returns)
            self.skew(number % NODES, 8)
        elif fault == "full":
            cold.full = True
            clock.after(2.0, lambda: setattr(cold, "full", False))
            self.skew(number % NODES, 12)
        elif fault == "slow":
            cold.slow_s = seconds
            clock.after(2 * seconds, lambda: setattr(cold, "slow_s", 0.0))
        elif fault == "late":
            cold.late_s = seconds / 10
            clock.after(seconds, lambda: setattr(cold, "late_s", 0.0))
        else:
            self.spoil(fault, number)
        for engine in self.cluster.alive():
            for keys in PROMPTS:
                engine.read(keys, how)
        self.cluster.run_for(pause)

    def spoil(self, fault: str, number: int) -> None:
        """Half of the objects have other bytes, or are gone, or the index lacks them."""
        cold = self.cold
        for name in list(cold.objects)[number % 2 :: 2]:
            if fault == "damage":
                cold.objects[name] = cold.objects[name]._replace(shards=(b"other by", *cold.objects[name].shards[1:]))
            elif fault == "lost":
                del cold.objects[name]
            else:
                cold.index.pop(name, None)

    def count(self) -> None:
        """Add the counters of the nodes that live to `SEEN`."""
        for node in self.cluster.nodes.values():
            if node.core is not None:
                for metric in SEEN:
                    SEEN[metric] += node.core.counters[metric]
                sums = node.core.counters.by_labels(SUPPLIED)
                supplied.append(sum(tokens for (_, source), tokens in sums.items() if source == Source.COLD))

    def returns(self) -> None:
        """The tier can be used again."""
        self.cold.fails = False
        for node in self.cluster.nodes.values():
            if node.core is not None and node.cold is not None:
                node.cold.back()

    @rule(node=nodes, pause=PAUSES)
    def operator_evicts(self, node: int, pause: float) -> None:
        """An operator evicts all segments of a tenant at a node."""
        self.cluster.node(node).deliver(events.EvictRequested(1, "red", b""))
        self.cluster.run_for(pause)

    @rule(fault=st.sampled_from(("", "slow", "damage", "lost")), number=which)
    def all_restart(self, fault: str, number: int) -> None:
        """All nodes crash at once, and start with the tier alone, in which something may be wrong."""
        self.traffic(15)
        self.count()
        for node in self.cluster.nodes.values():
            node.thaw()
            if node.core is not None:
                node.crash()
            node.start()
        self.cluster.run_for(0.7)
        if fault == "slow":
            self.cold.slow_s = 1.5
            self.cluster.clock.after(0.5, lambda: setattr(self.cold, "slow_s", 0.0))
        elif fault:
            self.spoil(fault, number)
        for number in range(NODES):
            self.cluster.join(number)
        for engine in self.cluster.alive():
            for keys in PROMPTS:
                engine.read(keys, Reading(hold_s=0.01))
        self.cluster.run_for(0.3)

    def teardown(self) -> None:
        self.returns()
        self.cold.late_s = self.cold.slow_s = 0.0
        self.cluster.run_for(3.0)
        self.count()
        super().teardown()


class ColdAndDiskMachine(ColdClusterMachine):
    """The same with disks."""

    disk_places = 12


def test_nothing_breaks_with_a_cold_tier() -> None:
    SEEN.update(dict.fromkeys(SEEN, 0))
    supplied.clear()
    found = settings(max_examples=examples(40), stateful_step_count=30)
    run_state_machine_as_test(ColdClusterMachine, settings=found)
    assert all(SEEN.values()), {metric.name: count for metric, count in SEEN.items()}
    assert sum(supplied)


def test_nothing_breaks_with_a_cold_tier_behind_disks() -> None:
    run_state_machine_as_test(ColdAndDiskMachine, settings=settings(max_examples=examples(15), stateful_step_count=30))
