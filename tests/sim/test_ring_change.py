"""While the ring changes, and afterwards, the segments of the pool are found. Each is matched by itself, so that no
neighbour leads to its owner."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.sim.cluster import Cluster
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import prompt
from tokenlake.core.cluster.drain import LEFT_BEHIND
from tokenlake.directory.ring import Ring
from tokenlake.identity import SegmentKey
from tokenlake.memory import Kind
from tokenlake.memory.vacancy import MAX_RETENTION_VALUE, Vacancy
from tokenlake.wire import Code

NODES, KEYS = 8, 400
DURING, AFTER = 0.99, 0.995
FOUND = (Code.LOCAL, Code.REMOTE)
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]


class Pool:
    """Nodes with segments at random owners, and readers at all nodes."""

    def __init__(self, seed: int, **rules: Any) -> None:
        self.random = random.Random(seed)
        rules = {"lease_s": 60.0, "reservation_s": 30.0, "dirty_share": 1.0, "session_reserve_share": 1.0, **rules}
        self.cluster = Cluster(NODES, seed, regions=40, recording=True, **rules)
        self.cluster.calm()
        self.cluster.run_for(0.5)
        writers = [self.cluster.join(node) for node in range(NODES)]
        self.cluster.run_for(0.1)
        self.keys = prompt("moves", KEYS)
        self.owner = {key: writers[self.random.randrange(NODES)] for key in self.keys}
        for key, writer in self.owner.items():
            writer.store([key], 0, Storing(fill_s=0.001))
            self.cluster.run_for(0.005)
        self.cluster.run_for(0.5)

    def found(self, keys: list[SegmentKey]) -> float:
        """The share of these segments that readers at random nodes find, each in a match of its own; 10 ms each."""
        readers = [self.cluster.join(node) for node in range(NODES)]
        self.cluster.run_for(0.02)
        answers = []
        for key in keys:
            reader = self.random.choice([each for each in readers if each.alive])
            reader.read([key], Reading(fetch=False, hold_s=0.001))
            self.cluster.run_for(0.010)
            answers += reader.answers
            reader.answers.clear()
        self.cluster.run_for(0.06)
        answers += [answer for reader in readers for answer in reader.answers]
        for reader in readers:
            reader.die()
        return sum(answer.codes[0] in FOUND for answer in answers) / len(keys)


def moved(before: Ring, after: Ring) -> float:
    """The share of the directory keys that a change moved."""
    many = b"".join(prompt("many", 4000))
    return sum(after.moved(before, many)) / 4000


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_joins_hides_nothing(seed: int) -> None:
    """The others hear of it one after the other within a second, and one of them only from its peers."""
    pool = Pool(seed)
    assert pool.found(pool.keys) == 1.0
    before = pool.cluster.core(0).ring
    pool.cluster.add(1.0, missed=("n3",))
    during = [pool.found(pool.random.sample(pool.keys, 40)) for _ in range(4)]
    assert sum(during) / len(during) >= DURING, during
    assert pool.found(pool.keys) >= AFTER
    # The ideal share of the newcomer is a ninth; it has 128 virtual nodes of its own.
    assert moved(before, pool.cluster.core(0).ring) <= 1.2 / (NODES + 1)
    assert {core.record.epoch for core in map(pool.cluster.core, range(NODES + 1))} == {1}
    pool.cluster.run_for(2.0)
    assert pool.found(pool.keys) >= AFTER, "after the previous ring"
    pool.cluster.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_drains_hides_nothing(seed: int) -> None:
    """Its segments are handed over, and found while that goes on and after it has left."""
    pool = Pool(seed, drain_s=20.0)
    leaving = pool.cluster.node(NODES - 1)
    core = pool.cluster.core(NODES - 1)
    owned = sum(segment.kind is Kind.PRIMARY for segment in core.store.segments())
    pool.cluster.drain(leaving.name, 1.0, missed=("n3",))
    during = [pool.found(pool.random.sample(pool.keys, 40)) for _ in range(6)]
    assert sum(during) / len(during) >= DURING, during
    pool.cluster.run_for(5.0)
    assert leaving.retired
    assert core.counters[LEFT_BEHIND] == 0
    account = leaving.account
    assert account is not None
    assert sum(segments for _, segments, _ in account.moved) >= owned
    assert account.lost_segments == 0
    assert pool.found(pool.keys) >= AFTER
    pool.cluster.run_for(2.0)
    assert pool.found(pool.keys) >= AFTER, "after the previous ring"
    pool.cluster.check()


def test_a_node_drains_within_its_time_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node drains within its time where the others have no room."""
    pool = Pool(1, drain_s=3.0)
    node, core = pool.cluster.node(2), pool.cluster.core(2)
    monkeypatch.setattr(Vacancy, "full", property(lambda self: True))
    monkeypatch.setattr(Vacancy, "victim_value", property(lambda self: MAX_RETENTION_VALUE))
    pool.cluster.drain(node.name)
    pool.cluster.run_for(2.5)
    assert node.name in pool.cluster.record.members
    pool.cluster.run_for(1.0)
    assert node.name not in pool.cluster.record.members
    owned = sum(each.node is node for each in pool.owner.values())
    assert core.counters[LEFT_BEHIND] == owned > 0


def test_a_full_cluster_keeps_valuable_segments() -> None:
    """In place of segments that no engine has read for long. It offers those that are read no more than others to no
    node."""
    cluster = Cluster(3, 1, regions=10, lease_s=600.0, dirty_share=1.0, session_reserve_share=1.0, drain_s=6.0)
    cluster.calm()
    cluster.run_for(0.5)
    engines = [cluster.join(node) for node in range(3)]
    cluster.run_for(0.1)
    cold = {node: prompt(f"cold {node}", 30 if node < 2 else 10) for node in range(3)}
    hot = prompt("hot", 20)

    def fill(node: int, keys: list[SegmentKey]) -> None:
        for key in keys:
            engines[node].store([key], 0, Storing(fill_s=0.001))
            cluster.run_for(0.01)

    for node, keys in cold.items():
        fill(node, keys)
    cluster.run_for(60.0)
    fill(2, hot)
    for _ in range(3):
        cluster.run_for(5.0)
        for key in hot:
            engines[2].read([key], Reading(fetch=False, hold_s=0.001))
            cluster.run_for(0.005)
    cluster.run_for(1.0)
    core = cluster.core(2)
    here = {segment.key for segment in core.store.segments()}
    assert all(cluster.core(node).store.vacancy(cluster.clock.now).full for node in range(3))
    cluster.drain("n2")
    cluster.run_for(10.0)
    assert cluster.nodes["n2"].retired
    kept = {segment.key for node in range(2) for segment in cluster.core(node).store.segments()}
    assert {*hot} & here <= kept
    assert not {*cold[2]} & kept
    assert core.counters[LEFT_BEHIND] == len(here - {*hot}) >= len(cold[2])
    account = cluster.nodes["n2"].account
    assert account is not None
    assert account.lost_segments == core.counters[LEFT_BEHIND]
    assert sum(segments for _, segments, _ in account.moved) == len({*hot} & here)
    cluster.check()


def test_a_drain_that_is_taken_back_ends() -> None:
    pool = Pool(1, drain_s=30.0)
    name = pool.cluster.node(2).name
    pool.cluster.drain(name)
    pool.cluster.run_for(0.05)
    pool.cluster.change(pool.cluster.record.with_member(name, pool.cluster.record.members[name].weight))
    pool.cluster.run_for(40.0)
    assert pool.cluster.node(2).account is None
    assert not pool.cluster.node(2).retired
    assert pool.found(pool.keys) >= AFTER
    pool.cluster.check()
