"""State machine of a ring that changes: nodes join, drain, leave, die and return while engines read and write.

Several changes may come at once, a node may miss a change and hear of it from its peers only, and a drain may be taken
back. Links lose no frames and are not cut, so that only the rules of the change bring the directories up to date: at
the end, without any new connection, each segment that a node owns is named by its directory node, no segment has two
primary copies, each one is found from every node, and every node has the newest record. After each step every core is
whole. The planted bugs below are found by it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.profiles import examples
from tests.sim.cluster import Cluster
from tests.sim.engine import Reading, Storing
from tests.sim.plants import Plant, planted
from tests.sim.prompts import PROMPTS
from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cluster.ring_change import CHANGES, RingChange
from tokenlake.core.node import HandlerFailed
from tokenlake.directory.ring_record import RingRecord

FIRST, MOST = 3, 6
"""Nodes at the start, and at most."""
SPREADS = st.sampled_from((0.0, 0.02, 0.3))
PAUSES = st.sampled_from((0.0, 0.002, 0.02, 0.3))
which = st.integers(0, 1 << 16)


class RingMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(0)

    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed: int) -> None:
        self.cluster = Cluster(FIRST, seed, regions=6)
        self.cluster.calm()
        for node in range(FIRST):
            self.cluster.join(node)
        self.cluster.run_for(0.1)

    @property
    def present(self) -> list[str]:
        """The nodes that have not left."""
        return [name for name, node in self.cluster.nodes.items() if not node.retired]

    def one(self, number: int) -> str:
        return self.present[number % len(self.present)]

    def missed(self, number: int) -> tuple[str, ...]:
        """One node that misses the change, half of the time."""
        return (self.one(number // 2),) if number % 2 else ()

    # -- changes of the ring

    @rule(spread=SPREADS, number=which, pause=PAUSES)
    def join(self, spread: float, number: int, pause: float) -> None:
        if len(self.present) < MOST:
            self.cluster.add(spread, self.missed(number))
        self.cluster.run_for(pause)

    @rule(node=which, spread=SPREADS, number=which, pause=PAUSES)
    def drain(self, node: int, spread: float, number: int, pause: float) -> None:
        name, record = self.one(node), self.cluster.record
        if not record.members[name].draining and len(record.weights()) > 2:
            self.cluster.drain(name, spread, self.missed(number))
        self.cluster.run_for(pause)

    @rule(node=which, spread=SPREADS, number=which, pause=PAUSES)
    def take_back(self, node: int, spread: float, number: int, pause: float) -> None:
        name, record = self.one(node), self.cluster.record
        if record.members[name].draining:
            back = record.with_member(name, record.members[name].weight)
            self.cluster.change(back, spread, self.missed(number))
        self.cluster.run_for(pause)

    @rule(node=which, pause=PAUSES)
    def remove(self, node: int, pause: float) -> None:
        """An operator removes a node, alive or dead."""
        name = self.one(node)
        if len(self.cluster.record.without(name).weights()) > 1 and len(self.present) > 2:
            self.cluster.leave(name)
        self.cluster.run_for(pause)

    @rule(node=which, spread=SPREADS, number=which)
    def two_at_once(self, node: int, spread: float, number: int) -> None:
        """The second change comes while the first one spreads."""
        self.join(spread, number, 0.0)
        self.drain(node, spread, number // 3, 0.01)

    @rule(number=which)
    def old_record(self, number: int) -> None:
        """An old answer of the membership arrives late."""
        node = self.cluster.nodes[self.one(number)]
        if node.core is not None and not node.frozen and node.core.record.epoch:
            record = node.core.record
            late = RingRecord(record.epoch - 1, record.unit, dict(list(record.members.items())[:1]))
            node.core._ring_change.changed(late)
            assert node.core.record is record

    @rule(node=which, fault=st.sampled_from(("crash", "freeze")), seconds=st.sampled_from((0.05, 0.5)), pause=PAUSES)
    def death(self, node: int, fault: str, seconds: float, pause: float) -> None:
        target = self.cluster.nodes[self.one(node)]
        if target.core is not None and not target.frozen:
            life = target.incarnation
            if fault == "freeze":
                target.freeze()
                self.cluster.clock.after(seconds, lambda: target.thaw() if target.incarnation == life else None)
            else:
                target.crash()
                self.cluster.clock.after(seconds, lambda: target.start() if target.core is None else None)
        self.cluster.run_for(pause)

    # -- engines

    @rule(actions=st.integers(3, 15))
    def traffic(self, actions: int) -> None:
        random = self.cluster.clock.random
        for _ in range(actions):
            alive = self.cluster.alive()
            if len(alive) < FIRST:
                self.cluster.join(random.randrange(1 << 16))
            else:
                engine, prompt = random.choice(alive), random.choice(PROMPTS)
                engine.read(prompt, Reading(hold_s=random.choice((0.001, 0.02))))
                engine.store(prompt, 0, Storing(fill_s=0.002))
            self.cluster.run_for(random.choice((0.0, 0.003, 0.02)))

    @rule(seconds=st.sampled_from((0.003, 0.03, 0.3, 1.5)))
    def wait(self, seconds: float) -> None:
        self.cluster.run_for(seconds)

    # -- checks

    @invariant()
    def whole(self) -> None:
        self.cluster.check()

    def teardown(self) -> None:
        cluster = self.cluster
        for node in cluster.nodes.values():
            node.thaw()
            if node.core is None:
                node.start()
        # Longer than a drain, the previous ring, and the time in which a node hears of a ring from others.
        cluster.run_for(6.0)
        for engine in cluster.engines:
            engine.die()
        cluster.run_for(2.0)
        SEEN["changes"] += sum(node.core.counters[CHANGES] for node in cluster.nodes.values() if node.core is not None)
        SEEN["left"] += len(cluster.nodes) - len(self.present)
        if not cluster.nodes:
            return
        cluster.check_settled()
        for name in self.present:
            core = cluster.nodes[name].core
            assert core is not None
            assert core._context.previous_ring is None
            assert set(core.ring_states().values()) <= {"same"}, core.ring_states()
            for tenant, key in core._directory_node._directory._owners:
                assert name in core.ring.candidates(key)[0], f"{name} keeps an entry of a key of {tenant} that moved"


SEEN = {"changes": 0, "left": 0}


def test_the_ring_changes_and_nothing_breaks() -> None:
    SEEN.update(changes=0, left=0)
    run_state_machine_as_test(RingMachine, settings=settings(max_examples=examples(40), stateful_step_count=25))
    assert SEEN["changes"] > 50
    assert SEEN["left"] > 10


# -- planted bugs


def nobody_is_told(patch: pytest.MonkeyPatch) -> None:
    """Owners do not tell new directory nodes what moved to them."""
    original = DirectoryNode.after_ring_change

    def after_ring_change(self: DirectoryNode, left: Any) -> None:
        original(self, left)
        self._walks.clear()

    patch.setattr(DirectoryNode, "after_ring_change", after_ring_change)


def only_the_last_change_is_told(patch: pytest.MonkeyPatch) -> None:
    """A second change during the walk of the first one takes its place: what the first one moved is not told."""
    patch.setattr(DirectoryNode, "telling", property(lambda self: False))


def an_old_record_is_followed(patch: pytest.MonkeyPatch) -> None:
    """A record of an earlier epoch takes the place of a newer one."""
    original = RingChange.changed

    def changed(self: RingChange, record: RingRecord) -> None:
        if record.epoch < self._context.record.epoch:
            self._context.record = RingRecord(0, record.unit, record.members)
            record = RingRecord(1, record.unit, record.members)
        original(self, record)

    patch.setattr(RingChange, "changed", changed)


def a_missed_change_is_never_read(patch: pytest.MonkeyPatch) -> None:
    """A node that hears of a newer ring does not read the membership."""
    patch.setattr(RingChange, "differs", lambda self, peer: None)


def calls_of_a_member_that_left_wait(patch: pytest.MonkeyPatch) -> None:
    """The peer is forgotten with its calls, whose callers wait for ever."""

    def end(self: Peers, peer: Any) -> None:
        peer.up = False
        for call in peer.calls.values():
            call.timer.cancel()
        peer.calls.clear()

    patch.setattr(Peers, "end", end)


def moved_entries_are_kept(patch: pytest.MonkeyPatch) -> None:
    """A directory node keeps the entries of keys that moved away, and finds them again, out of date, when the ring is
    changed back."""
    patch.setattr(DirectoryNode, "forget_moved", lambda self: None)


def own_directory_ignored(patch: pytest.MonkeyPatch) -> None:
    """A node tells its own directory what another node owns already, and keeps its primary copy."""
    ignored = property(lambda self: lambda message: None, lambda self, handler: None)
    patch.setattr(DirectoryNode, "on_redundant", ignored, raising=False)


PLANTS: tuple[Plant, ...] = (
    nobody_is_told,
    only_the_last_change_is_told,
    an_old_record_is_followed,
    a_missed_change_is_never_read,
    calls_of_a_member_that_left_wait,
    moved_entries_are_kept,
    own_directory_ignored,
)
"""Found after many more examples than the others: up to ten seconds each."""


@pytest.mark.parametrize("plant", planted(PLANTS))
def test_planted_bugs_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found_by = settings(max_examples=300, stateful_step_count=25, phases=[Phase.generate], deadline=None)
    with pytest.raises((AssertionError, KeyError, ValueError, HandlerFailed)):
        run_state_machine_as_test(RingMachine, settings=found_by)
