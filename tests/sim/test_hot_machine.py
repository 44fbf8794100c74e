"""The cluster machine, with rules that make every segment read on another node hot and let it cool within a second:
replicas come and go while nodes crash, freeze and lose frames."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from tests.sim.cluster import Cluster
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import PROMPTS
from tests.sim.test_cluster_machine import NODES, ClusterMachine
from tokenlake.core import replicas, replication, serve
from tokenlake.core.replicas import COPIED
from tokenlake.core.replication import DEMOTED, PROMOTED
from tokenlake.core.serve import DEFERRED, REDIRECTED
from tokenlake.core.waiting import IN_FLIGHT_CLAIMS, IN_FLIGHT_WAITS
from tokenlake.hot import rule as hot_rule

SEEN = dict.fromkeys((PROMOTED, DEMOTED, COPIED, IN_FLIGHT_WAITS, IN_FLIGHT_CLAIMS, REDIRECTED, DEFERRED), 0)
"""Counts over all examples: each of these must have happened."""


class HotMachine(ClusterMachine):
    """See the module's docstring."""

    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed: int) -> None:
        self.cluster = Cluster(NODES, seed, replica_share=0.3, sync_grace_s=0.2)
        for node in range(NODES):
            self.cluster.join(node, processes=1 + node % 2)
        self.cluster.run_for(0.3)

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), rounds=st.integers(1, 4), wait_s=st.sampled_from((0.0, 0.4)))
    def crowd(self, prompt: int, rounds: int, wait_s: float) -> None:
        """All engines read the same prompt several times; matches that can wait may be deferred."""
        for _ in range(rounds):
            for engine in self.cluster.alive():
                engine.read(PROMPTS[prompt], Reading(hold_s=0.002, in_flight_wait_s=wait_s))
            self.cluster.run_for(0.03)

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), writer=st.integers(0, 7), pause=st.sampled_from((0.0, 0.02, 0.1)))
    def stampede(self, prompt: int, writer: int, pause: float) -> None:
        """All engines wait for one that computes a prompt; some have found a part of it."""
        for engine in self.cluster.alive():
            engine.read(PROMPTS[prompt], Reading(hold_s=0.002, in_flight_wait_s=0.4))
        self.cluster.run_for(pause)
        chosen = self.engine(writer)
        if chosen is not None:
            chosen.store(PROMPTS[prompt], 0, Storing(fill_s=0.1))
        self.cluster.run_for(pause)

    def teardown(self) -> None:
        for node in self.cluster.nodes.values():
            for metric in SEEN:
                SEEN[metric] += node.core.counters[metric] if node.core is not None else 0
        super().teardown()


def test_copies_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_rule, "LEAST_READS", 0.5)
    monkeypatch.setattr(hot_rule, "DECIDES_S", 0.2)
    monkeypatch.setattr(hot_rule, "REACTS_S", 0.1)
    monkeypatch.setattr(hot_rule, "DROP_S", 0.3)
    monkeypatch.setattr(replicas, "UNLISTED_S", 0.3)
    monkeypatch.setattr(replication, "REFUSED_S", 0.1)
    monkeypatch.setattr(replicas, "SILENT_S", 0.5)
    monkeypatch.setattr(serve, "FAN_OUT", 1)
    run_state_machine_as_test(HotMachine, settings=settings(max_examples=40, stateful_step_count=30))
    assert all(SEEN.values()), {metric.name: count for metric, count in SEEN.items()}
