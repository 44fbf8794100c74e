"""Simulated nodes join and drain under load: hits as in a still cluster, no map that grows, and equal replays."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.bench.test_simulation import TOKENS, conversations, options
from tokenlake.core import NodeCore, events
from tokenlake.core.cluster.handover import HANDED_OVER
from tokenlake_bench.simulation.arrivals import arrivals_of
from tokenlake_bench.simulation.cluster import BEGINS_S, SimulatedCluster
from tokenlake_bench.simulation.engine import RequestOutcome

NODES, CHANGES, EVERY_S, RATE = 6, 6, 12.0, 4
WITHIN = 0.02


class Run:
    """One run of the same conversations, with or without changes of the ring."""

    def __init__(self, churn: bool) -> None:
        self.tokens = self.hits = 0
        self.census: list[dict[str, int]] = []
        """At each change, the largest count of any node."""
        self.cluster = SimulatedCluster(options(NODES, rules={"drain_s": 5.0}), self._finished, joining=CHANGES)
        for number in range(CHANGES):
            self.cluster.clock.at(BEGINS_S + EVERY_S * (number + 1), self._change, number, churn)
        requests = int((CHANGES + 2) * EVERY_S * RATE)
        self.cluster.run(arrivals_of(conversations(requests, seed=3, gap_s=1 / RATE)))
        self.cluster.check_integrity()
        self.present = [node for node in self.cluster.nodes if not node.driver.stopped]

    def _finished(self, outcome: RequestOutcome) -> None:
        self.tokens += outcome.arrival.tokens
        self.hits += outcome.hits * TOKENS

    def _change(self, number: int, churn: bool) -> None:
        present = [node.core.census() for node in self.cluster.nodes if not node.driver.stopped]
        self.census.append({name: max(each[name] for each in present) for name in present[0]})
        if churn and number % 2:
            self.cluster.drain(self.cluster.serving[number % len(self.cluster.serving)])
        elif churn:
            self.cluster.add()

    @property
    def hit_rate(self) -> float:
        return self.hits / self.tokens


def test_hits_survive_nodes_that_join_and_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    still = Run(churn=False)
    log: dict[NodeCore, list[tuple[events.Event, float, list[Any]]]] = defaultdict(list)
    handle, start = NodeCore.handle, NodeCore.start
    started: dict[NodeCore, float] = {}

    def recorded(self: NodeCore, event: events.Event, now: float) -> Any:
        out = handle(self, event, now)
        log[self].append((event, now, list(out)))
        return out

    def timed(self: NodeCore, now: float) -> None:
        started[self] = now
        start(self, now)

    monkeypatch.setattr(NodeCore, "handle", recorded)
    monkeypatch.setattr(NodeCore, "start", timed)
    churn = Run(churn=True)
    monkeypatch.undo()
    assert len(churn.present) == NODES
    assert len(churn.cluster.nodes) == NODES + CHANGES // 2
    assert abs(churn.hit_rate - still.hit_rate) < WITHIN * still.hit_rate, (churn.hit_rate, still.hit_rate)
    assert sum(node.core.counters[HANDED_OVER] for node in churn.cluster.nodes) > 0
    assert {node.core.record.epoch for node in churn.present} == {churn.cluster.record.epoch}
    for name in ("timers", "walks", "calls", "offers", "segments to hand over"):
        assert churn.census[-1][name] <= 2 * max(each[name] for each in churn.census[:4]) + 16, name
    for core, recording in log.items():
        again = NodeCore(core.config)
        again.start(started[core])
        assert all(again.handle(event, now) == out for event, now, out in recording)
