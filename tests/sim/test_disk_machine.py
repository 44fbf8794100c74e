"""The machine of `test_cluster_machine` on nodes with disks, which fail, become slow, and lose bytes.

A disk outlives the crashes of its node: segments come back with the bytes that were written, or not at all.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from tests.profiles import examples
from tests.sim.disk import Disk
from tests.sim.engine import Reading
from tests.sim.node import SimNode
from tests.sim.prompts import PROMPTS
from tests.sim.test_cluster_machine import NODES, PAUSES, ClusterMachine, nodes, readings, which
from tokenlake.core import events, instructions
from tokenlake.core.disk import ERASED, EVICTED, KEPT, WRITTEN
from tokenlake.core.disk_reads import DAMAGED, READ

SEEN = dict.fromkeys((WRITTEN, KEPT, EVICTED, ERASED, READ, DAMAGED), 0)
"""Counts over all examples: each of these must have happened."""

counted: list[int] = []
"""Orders of operators that reached the disk."""


class DiskClusterMachine(ClusterMachine):
    """See the module's docstring."""

    disk_places = 24

    @initialize(seed=st.integers(0, 1 << 32), damaged=nodes, number=which, how=readings)
    def begin(self, seed: int, damaged: int, number: int, how: Reading) -> None:
        super().begin(seed)
        for node in range(NODES):
            # Some segments are on disk from the beginning.
            self.skew(node, 12)
            self.traffic(10)
        self.disk_fault(damaged, "damage", number, 0.03, how, 0.1)

    @rule(
        node=nodes,
        fault=st.sampled_from(("gone", "fails", "slow", "damage")),
        number=which,
        seconds=st.sampled_from((0.03, 0.4, 1.5)),
        how=readings,
        pause=PAUSES,
    )
    def disk_fault(self, node: int, fault: str, number: int, seconds: float, how: Reading, pause: float) -> None:
        """While engines read, the disk of their node is set aside, refuses each operation, is slow, or has other bytes
        in half of its places."""
        target = self.cluster.node(node)
        disk = target.disk
        assert disk is not None
        if fault == "gone" and target.core is not None and not target.frozen and not disk.fails:
            disk.fails = True
            target.deliver(events.DiskGone(0, "gone"))
            life = target.incarnation
            self.cluster.clock.after(seconds, lambda: self.returns(target, disk, life))
        elif fault == "fails" and not disk.fails:
            disk.fails = True
            self.cluster.clock.after(seconds, lambda: setattr(disk, "fails", False))
        elif fault == "slow":
            disk.slow_s = seconds
            self.cluster.clock.after(2 * seconds, lambda: setattr(disk, "slow_s", 0.0))
        elif fault == "damage":
            for name in list(disk.places)[number % 2 :: 2]:
                written = disk.places[name]
                disk.places[name] = written._replace(shards=(b"other bytes", *written.shards[1:]))
        for engine in self.cluster.alive():
            if engine.node is target:
                for keys in PROMPTS:
                    engine.read(keys, how)
        self.cluster.run_for(pause)

    @rule(node=nodes, pause=PAUSES)
    def operator_evicts(self, node: int, pause: float) -> None:
        """An operator evicts all segments of a node. Once the node says that it has reached the disk, none of them is
        there any more."""
        target = self.cluster.node(node)
        disk = target.disk
        assert disk is not None
        if target.core is None or target.frozen:
            return
        there = {name: (each.key, each.generation) for name, each in disk.places.items() if name in disk.index}

        def done(answer: instructions.EvictionDone) -> None:
            if not answer.reached:
                return
            counted.append(answer.request)
            for name, named in there.items():
                now = disk.places.get(name)
                assert name[0] != "red" or now is None or (now.key, now.generation) != named, name

        target.life._carry[instructions.EvictionDone] = done
        target.deliver(events.EvictRequested(1, "red", b""))
        self.cluster.run_for(pause)

    def returns(self, target: SimNode, disk: Disk, life: int) -> None:
        """A disk that was set aside is found again. A node that has started since has found it then."""
        disk.fails = False
        if target.core is not None and target.incarnation == life:
            target.find_disk()

    def teardown(self) -> None:
        self.cluster.run_for(3.0)
        for node in self.cluster.nodes.values():
            for metric in SEEN:
                SEEN[metric] += node.core.counters[metric] if node.core is not None else 0
        super().teardown()


def test_nothing_breaks_with_disks() -> None:
    SEEN.update(dict.fromkeys(SEEN, 0))
    counted.clear()
    found = settings(max_examples=examples(40), stateful_step_count=30)
    run_state_machine_as_test(DiskClusterMachine, settings=found)
    assert counted
    assert all(SEEN.values()), {metric.name: count for metric, count in SEEN.items()}
