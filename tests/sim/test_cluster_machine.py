"""Three NodeCores on a network that delays, drops, doubles and cuts, with crashes, freezes and restarts.

100 examples of 30 steps. A step lets an engine join, read, store, pin, fall silent or die, a router prefetch and pin, a
node freeze or crash, a link break, a frame get lost or arrive twice, a bit of a copy flip, or time pass, or sends a
node every kind of malformed event, each of which it must refuse without a change of its state; reads and writes go on
through the steps that follow. After each step every view that some process may look at holds the bytes that were
written for its tenant and key (but for copies in which a bit flipped), every slot that some process may write is still
its own, no answer has named a copy since a check found it wrong, and every core is whole: slots and pins are conserved.
At the end all is healed and every engine ends: nothing is pinned, quarantined, waited for or left in a map, each token
asked for was counted once, no segment has two primary copies, and the directory node of each segment that a node owns
names that node. Then one node dies, and the other candidate names the owners in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.profiles import examples
from tests.sim.arena import SHARDS, SLOT_BYTES
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Reading, Storing
from tests.sim.malformed import malformed
from tests.sim.prompts import PROMPTS, prompt
from tests.sim.snapshot import changes, snapshot
from tokenlake.core import NodeCore, events
from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.handover import HANDED_OVER
from tokenlake.core.cluster.owner import DUPLICATES
from tokenlake.core.engines.pins import PINNED
from tokenlake.core.engines.prefetch import PREFETCHED
from tokenlake.core.engines.salt_quotas import TRIMMED
from tokenlake.core.node import HandlerFailed
from tokenlake.core.report.account import ENGINE_HAD, SUPPLIED
from tokenlake.hints import Hints
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.memory import State
from tokenlake.wire import Code, peer
from tokenlake.wire import engine as wire
from tokenlake.wire.slots import join_keys

NODES = 3
MAX_ENGINES = 8
SEEN = dict.fromkeys((SUPPLIED, ENGINE_HAD, HANDED_OVER, DUPLICATES, PREFETCHED, PINNED, TRIMMED), 0)
"""Counts over all examples: each of these must have happened."""
PAUSES = st.sampled_from((0.0, 0.001, 0.004, 0.02, 0.06))

readings = st.builds(
    Reading,
    attach=st.booleans(),
    fetch=st.integers(0, 3).map(bool),
    hold_s=st.sampled_from((0.005, 0.1, 0.5, 1.5)),
    split=st.integers(0, 3),
    verify=st.booleans(),
    independent=st.integers(0, 3).map(lambda number: number == 3),
    took=st.none() | st.tuples(st.integers(0, 40), st.integers(40, 90), st.just(0.01)),
)
storings = st.builds(
    Storing,
    ending=st.sampled_from(("commit", "commit", "commit", "commit", "singly", "singly", "abort", "die", "leave")),
    fill_s=st.sampled_from((0.002, 0.002, 0.01, 0.2, 1.2)),
    shared=st.booleans(),
    account=st.sampled_from(("", "", "a", "b")),
)
which = st.integers(0, 1 << 16)
nodes = st.integers(0, NODES - 1)
prompts = st.integers(0, len(PROMPTS) - 1)
lengths = st.integers(1, len(PROMPTS[0]))


class ClusterMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    look_inside = True
    """Are the cores checked too, or only the bytes that engines see?"""
    disk_places = 0
    """Segments that the disk of each node holds."""
    has_cold = False
    """Do the nodes have a cold tier?"""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(0)

    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed: int) -> None:
        quotas: dict[str, Any] = {"quotas": {"red": 1.0}, "salt_quotas": {"red": 0.2}}
        self.cluster = Cluster(NODES, seed, disk_places=self.disk_places, has_cold=self.has_cold, **quotas)
        for node in range(NODES):
            self.cluster.join(node, processes=1 + node % 2)
        self.cluster.run_for(0.05)

    def engine(self, number: int) -> Engine | None:
        alive = self.cluster.alive()
        return alive[number % len(alive)] if alive else None

    # -- engines

    @rule(node=nodes, tenant=st.sampled_from(("red", "red", "blue")), processes=st.integers(1, 2))
    def join(self, node: int, tenant: str, processes: int) -> None:
        if len(self.cluster.alive()) < MAX_ENGINES:
            self.cluster.join(node, tenant, processes)
        self.cluster.run_for(0.005)

    @rule(number=which, prompt=prompts, length=lengths, how=readings, pause=PAUSES)
    def read(self, number: int, prompt: int, length: int, how: Reading, pause: float) -> None:
        engine = self.engine(number)
        if engine is not None:
            engine.read(PROMPTS[prompt][:length], how)
        self.cluster.run_for(pause)

    @rule(prompt=prompts, how=readings, pause=PAUSES)
    def read_everywhere(self, prompt: int, how: Reading, pause: float) -> None:
        for engine in self.cluster.alive():
            engine.read(PROMPTS[prompt], how)
        self.cluster.run_for(pause)

    @rule(number=which, prompt=prompts, start=st.integers(0, 3), how=storings, pause=PAUSES)
    def store(self, number: int, prompt: int, start: int, how: Storing, pause: float) -> None:
        engine = self.engine(number)
        if engine is not None:
            engine.store(PROMPTS[prompt][start:], start, how)
        self.cluster.run_for(pause)

    @rule(actions=st.integers(5, 40))
    def traffic(self, actions: int) -> None:
        """Turns of conversations at any engine: read what is there, store the rest."""
        random = self.cluster.clock.random
        for _ in range(actions):
            engine = self.engine(random.randrange(1 << 16))
            prompt = random.choice(PROMPTS)
            if engine is None or len(self.cluster.alive()) < MAX_ENGINES // 2:
                self.cluster.join(random.randrange(NODES), processes=random.randrange(1, 3))
            else:
                hold_s, independent = random.choice((0.001, 0.004, 0.02, 0.1)), random.random() < 0.25
                had = min(random.randrange(64), random.randrange(64))
                took = (had, had + random.randrange(64), 0.01) if random.random() < 0.5 else None
                engine.read(prompt, Reading(hold_s=hold_s, independent=independent, took=took))
                start = random.randrange(4)
                ending = random.choice(("commit",) * 6 + ("singly", "abort", "die"))
                fill_s = random.choice((0.002,) * 6 + (0.02, 0.2, 1.2))
                engine.store(
                    prompt[start:],
                    start,
                    Storing(ending, fill_s, shared=random.random() < 0.5, account=random.choice(("", "a"))),
                )
            self.cluster.run_for(random.choice((0.0, 0.0, 0.003, 0.02, 0.1)))

    @rule(node=nodes, turns=st.integers(4, 12))
    def skew(self, node: int, turns: int) -> None:
        """The engines of one node compute new prompts, until its memory is full and that of others is emptier."""
        for _ in range(turns):
            engines = [engine for engine in self.cluster.alive() if engine.node is self.cluster.node(node)]
            if engines:
                engines[0].store(prompt(f"skew {self.cluster.next_id()}", 3), 0, Storing())
            elif len(self.cluster.alive()) < MAX_ENGINES:
                self.cluster.join(node)
            self.cluster.run_for(0.06)

    @rule(
        node=nodes,
        prompt=prompts,
        length=lengths,
        source=st.sampled_from(("", "", "n0", "n1", "nobody")),
        pin_s=st.sampled_from((0.0, 0.05, 1.5)),
        pause=PAUSES,
    )
    def prefetch(self, node: int, prompt: int, length: int, source: str, pin_s: float, pause: float) -> None:
        """A router brings the beginning of a prompt to a node, and may pin it there."""
        keys = join_keys(PROMPTS[prompt][:length])
        self.cluster.node(node).deliver(events.PrefetchRequested(1, "red", keys, SLOT_BYTES, SHARDS, 0, source, pin_s))
        self.cluster.run_for(pause)

    @rule(number=which, prompt=prompts, pin_s=st.sampled_from((0.0, 0.05, 1.5)), pause=PAUSES)
    def hint(self, number: int, prompt: int, pin_s: float, pause: float) -> None:
        """An engine pins what its node has of a prompt, or ends such pins."""
        engine = self.engine(number)
        if engine is not None and not engine.processes[0].dead:
            keys = join_keys(PROMPTS[prompt])
            engine.processes[0].tell(wire.Hint(keys, Hints(pin_s=pin_s)) if pin_s else wire.Unpin(keys))
        self.cluster.run_for(pause)

    @rule(node=nodes, tenant=st.sampled_from(("red", "blue")))
    def unpin_all(self, node: int, tenant: str) -> None:
        self.cluster.node(node).deliver(events.UnpinRequested(1, tenant, b""))
        self.cluster.run_for(0.01)

    @rule(number=which, fault=st.sampled_from(("silence", "silence", "kill", "kill the second process")))
    def engine_fault(self, number: int, fault: str) -> None:
        engine = self.engine(number)
        if engine is None:
            return
        if fault == "silence":
            engine.silent_until = self.cluster.clock.now + 1.0
        elif fault == "kill":
            engine.die()
        else:
            engine.second.die()

    # -- nodes and network

    @rule(
        node=nodes,
        fault=st.sampled_from(("freeze", "crash", "silent")),
        seconds=st.sampled_from((0.03, 0.4, 1.5)),
        pause=PAUSES,
    )
    def node_fault(self, node: int, fault: str, seconds: float, pause: float) -> None:
        target = self.cluster.node(node)
        if target.core is not None and not target.frozen:
            life = target.incarnation
            if fault == "freeze":
                target.freeze()
                self.cluster.clock.after(seconds, lambda: target.thaw() if target.incarnation == life else None)
            elif fault == "silent":
                target.silent = True
                self.cluster.clock.after(seconds, target.speak)
            else:
                target.crash()
                self.cluster.clock.after(seconds, lambda: target.start() if target.core is None else None)
        self.cluster.run_for(pause)

    @rule(
        link=st.integers(0, NODES - 1),
        fault=st.sampled_from(("cut", "drop", "double")),
        seconds=st.sampled_from((0.0, 0.3, 1.0)),
        frames=st.integers(1, 3),
    )
    def network_fault(self, link: int, fault: str, seconds: float, frames: int) -> None:
        target = self.cluster.links()[link]
        if fault == "cut":
            target.cut(seconds)
        elif fault == "drop":
            target.drop = frames
        else:
            target.double = frames

    @rule(node=nodes, sender=st.integers(1, NODES - 1), number=which)
    def nonsense(self, node: int, sender: int, number: int) -> None:
        """Send every kind of malformed event, with the calls that the node has under way."""
        target = self.cluster.node(node)
        # Two snapshots take as long as many steps: not each time.
        if number % 3 or target.core is None or target.frozen or not self.look_inside:
            return
        processes = list(target.core._sessions._processes)
        if not processes:
            return
        connection = processes[number % len(processes)]
        before = snapshot(target.core)
        for event in list(malformed(target.core, connection, self.cluster.node((node + sender) % NODES).name)):
            self.refused(target.core, event)
        changed = changes(before, snapshot(target.core))
        assert not changed, f"refused events left a trace: {changed}"

    def refused(self, core: NodeCore, event: events.Event) -> None:
        try:
            core.handle(event, self.cluster.clock.now)
        except ValueError:
            return
        except HandlerFailed as failure:
            raise AssertionError(f"{name_of(event)} was not refused before a handler failed on it") from failure
        raise AssertionError(f"{name_of(event)} was not refused: {event}")

    @rule(node=nodes, number=which, shard=st.integers(0, SHARDS - 1), lie=st.booleans(), pause=PAUSES)
    def flip(self, node: int, number: int, shard: int, lie: bool, pause: float) -> None:
        """A bit flips in one copy. Or another node lies: it reports a copy of which it knows nothing."""
        target, other = self.cluster.node(node), self.cluster.node((node + 1) % NODES)
        ready = [s for s in target.core.store.segments() if s.state is State.READY] if target.core is not None else []
        if ready:
            segment = ready[number % len(ready)]
            if lie:
                message = peer.Corrupt(segment.tenant, segment.key)
                self.cluster.link(target.name, other.name).say(other.name, message)
            else:
                target.arena.flip(segment.place, shard)
        self.cluster.run_for(pause)

    @rule(seconds=st.sampled_from((0.003, 0.03, 0.3, 1.0)))
    def wait(self, seconds: float) -> None:
        self.cluster.run_for(seconds)

    # -- checks

    @invariant()
    def whole(self) -> None:
        self.cluster.check(self.look_inside)

    def teardown(self) -> None:
        for node in self.cluster.nodes.values():
            for metric in SEEN:
                SEEN[metric] += node.core.counters[metric] if node.core is not None else 0
        self.cluster.settle()
        if self.look_inside:
            self.cluster.check_settled()
            self.cluster.check_stand_ins(self.cluster.clock.random.randrange(NODES))


def name_of(event: events.Event) -> str:
    """The type of an event and of its message, for error messages."""
    message = getattr(event, "message", None)
    return type(event).__name__ + ("" if message is None else f" with a {type(message).__name__}")


def test_nothing_breaks_and_every_rule_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.update(dict.fromkeys(SEEN, 0))
    original, stood_in = DirectoryNode.answers, 0

    def counted(self: DirectoryNode, tenant: TenantId, keys: Sequence[SegmentKey]) -> list[tuple[Code, NodeId | None]]:
        """Counts the owners that a stand-in names."""
        nonlocal stood_in
        answers = original(self, tenant, keys)
        pairs = self._context.ring.candidates(join_keys(keys))
        named = zip(pairs, answers, strict=True)
        stood_in += sum(code is Code.ELSEWHERE and other == self._context.node for (_, other), (code, _) in named)
        return answers

    monkeypatch.setattr(DirectoryNode, "answers", counted)
    run_state_machine_as_test(ClusterMachine, settings=settings(max_examples=examples(60), stateful_step_count=30))
    assert all(SEEN.values()), {metric.name: count for metric, count in SEEN.items()}
    assert stood_in
