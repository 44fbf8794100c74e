"""The machine of `test_cluster_machine` on nodes with a cold tier, with disks and without.

The tier goes and comes back, refuses each operation, is slow, answers late, has other bytes, and its index names
objects that are gone, or lacks some that are there. It outlives the crashes of all nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from tests.profiles import examples
from tests.sim.cold import Cold as Tier
from tests.sim.engine import Reading, Storing
from tests.sim.plants import Plant, planted
from tests.sim.prompts import PROMPTS, prompt
from tests.sim.test_cluster_machine import NODES, PAUSES, ClusterMachine, nodes, readings, which
from tokenlake.core import events
from tokenlake.core.cluster.transfers import Transfers
from tokenlake.core.cold import EXISTED, FAILED, WRITTEN, Cold
from tokenlake.core.cold_reads import ABSENT, COLD, DAMAGED, READ, ColdReads
from tokenlake.core.cold_tier import ASIDE, ColdTier
from tokenlake.core.node import HandlerFailed
from tokenlake.core.report.account import SUPPLIED, Source
from tokenlake.wire import Code

SEEN = dict.fromkeys((WRITTEN, EXISTED, FAILED, READ, DAMAGED, ABSENT, ASIDE), 0)
"""Counts over all examples: each of these must have happened."""

supplied: list[int] = []
"""Tokens that engines read from the tier."""


class ColdClusterMachine(ClusterMachine):
    """See the module's docstring."""

    has_cold = True

    @property
    def cold(self) -> Tier:
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
        self.all_restart(("slow", "damage", "lost", "gone")[number % 4], number)

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
        if fault == "gone":
            self.goes(seconds)
        elif fault == "fails" and not cold.fails:
            cold.fails = True
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

    def goes(self, seconds: float) -> None:
        """The tier goes for so long. Its reads and writes that are under way go on."""
        for node in self.cluster.nodes.values():
            assert node.cold is not None
            node.cold.gone()
        self.cluster.clock.after(seconds, self.returns)

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
        self.cold.fails, self.cold.slow_s = False, 0.0
        for node in self.cluster.nodes.values():
            if node.core is not None and node.cold is not None:
                node.cold.back()

    @rule(node=nodes, pause=PAUSES)
    def operator_evicts(self, node: int, pause: float) -> None:
        """An operator evicts all segments of a tenant at a node."""
        self.cluster.node(node).deliver(events.EvictRequested(1, "red", b""))
        self.cluster.run_for(pause)

    @rule(fault=st.sampled_from(("", "slow", "damage", "lost", "gone")), number=which)
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
        elif fault == "gone":
            self.cold.slow_s = 0.04
        elif fault:
            self.spoil(fault, number)
        for number in range(NODES):
            self.cluster.join(number)
        for engine in self.cluster.alive():
            for keys in PROMPTS:
                engine.read(keys, Reading(hold_s=0.01))
        if fault == "gone":
            # While engines read from the tier, it goes, and they want slots.
            self.cluster.run_for(0.02)
            self.goes(0.4)
            for engine in self.cluster.alive():
                engine.store(prompt(f"gone {self.cluster.next_id()}", 4), 0, Storing())
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


# -- planted bugs


def slots_free_during_a_write(patch: pytest.MonkeyPatch) -> None:
    """Segments that are being written to the tier are not pinned: their slots may get others meanwhile."""
    original = Cold._write

    def write(self: Cold, segments: Any) -> None:
        before = set(self._writes)
        original(self, segments)
        for number in set(self._writes) - before:
            self._context.store.unpin(*self._writes[number].segments)

    def written(self: Cold, event: events.ColdWritten) -> None:
        self._context.store.pin(*self._writes[event.write].segments)
        ended(self, event)

    ended = Cold.written
    patch.setattr(Cold, "_write", write)
    patch.setattr(Cold, "written", written)


def slots_free_when_the_tier_goes(patch: pytest.MonkeyPatch) -> None:
    """When the tier goes, the slots of its reads are given away, while their threads may still write into them."""
    original = ColdTier.went

    def went(self: ColdTier, event: events.ColdGone) -> None:
        original(self, event)
        on_gone[self]()

    def init(self: ColdReads, context: Any, tier: Any, begin: Any, lose: Any, own: Any) -> None:
        made(self, context, tier, begin, lose, own)

        def free() -> None:
            transfers = lose.__self__
            for fetch, transfer in list(transfers._under_way.items()):
                if transfer.device == COLD:
                    count = len(transfer.segments)
                    transfers.done(fetch, bytes([Code.LOST]) * count, bytes(16 * count), None)

        on_gone[tier] = free

    def done(self: Transfers, fetch: int, *fields: Any) -> None:
        if fetch in self._under_way:
            returned(self, fetch, *fields)

    on_gone: dict[ColdTier, Callable[[], None]] = {}
    made, returned = ColdReads.__init__, Transfers.done
    patch.setattr(ColdTier, "went", went)
    patch.setattr(ColdReads, "__init__", init)
    patch.setattr(Transfers, "done", done)


def arrivals_are_not_told(patch: pytest.MonkeyPatch) -> None:
    """No directory node learns that this node owns what it read from the tier."""
    original = ColdReads.__init__

    def init(self: ColdReads, context: Any, tier: Any, begin: Any, lose: Any, own: Any) -> None:
        original(self, context, tier, begin, lose, lambda tenant, segments: None)

    patch.setattr(ColdReads, "__init__", init)


PLANTS: tuple[Plant, ...] = (slots_free_during_a_write, slots_free_when_the_tier_goes, arrivals_are_not_told)


@pytest.mark.parametrize("plant", planted(PLANTS))
def test_planted_bugs_of_the_cold_tier_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found_by = settings(max_examples=300, stateful_step_count=30, phases=[Phase.generate], deadline=None)
    with pytest.raises((AssertionError, KeyError, ValueError, HandlerFailed)):
        run_state_machine_as_test(ColdClusterMachine, settings=found_by)
