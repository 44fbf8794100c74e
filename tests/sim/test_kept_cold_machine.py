"""The machines of `test_kept_machine` and `test_cold_machine` at once: memory that outlives the daemons, disks, and a
cold tier with its faults."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from tests.profiles import examples
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import prompt
from tests.sim.test_cluster_machine import NODES, ClusterMachine, readings, which
from tests.sim.test_cold_machine import ColdClusterMachine
from tests.sim.test_kept_machine import KeptClusterMachine
from tokenlake.core.cold import WRITTEN
from tokenlake.core.cold_reads import READ
from tokenlake.core.kept import KEPT

SEEN = dict.fromkeys((KEPT, WRITTEN, READ), 0)
"""Counts over all examples: each of these must have happened."""


class KeptColdMachine(KeptClusterMachine, ColdClusterMachine):
    """See the module's docstring."""

    disk_places = 12

    @initialize(seed=st.integers(0, 1 << 32), number=which, how=readings)
    def begin(self, seed: int, number: int, how: Reading) -> None:
        ClusterMachine.begin(self, seed)
        self.cluster.watcher = self._watch
        for node in range(NODES):
            self.skew(node, 8)
            self.cluster.join(node, "blue").store(prompt("blue", 2), 0, Storing())
        self.traffic(20)
        self.cold_fault("full", number, 0.03, how, 0.1)

    def teardown(self) -> None:
        for node in self.cluster.nodes.values():
            for metric in SEEN:
                SEEN[metric] += node.core.counters[metric] if node.core is not None else 0
        super().teardown()


def test_nothing_breaks_with_kept_memory_and_a_cold_tier() -> None:
    SEEN.update(dict.fromkeys(SEEN, 0))
    run_state_machine_as_test(KeptColdMachine, settings=settings(max_examples=examples(40), stateful_step_count=30))
    assert all(SEEN.values()), {metric.name: count for metric, count in SEEN.items()}
