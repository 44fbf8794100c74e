"""The machine of `test_cluster_machine` on nodes whose memory outlives their daemons.

A daemon ends in order, is killed, or is killed between two instructions of one event, and its successor finds what the
ledger and the headers of the regions say. Processes of engines return to it soon or late, drop their mappings, or die.
The views of those that have not returned are checked like all others: no slot that they may use gets another segment.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from tests.profiles import examples
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import PROMPTS, prompt
from tests.sim.test_cluster_machine import NODES, PAUSES, ClusterMachine, nodes, prompts
from tokenlake.core import events
from tokenlake.core.kept import DROPPED, KEPT
from tokenlake.identity import SegmentKey
from tokenlake.wire import engine as wire

SEEN = dict.fromkeys((KEPT, DROPPED), 0)
"""Counts over all examples: each of these must have happened."""
returned: list[wire.Regrant] = []
"""What processes said that they hold."""

RETURNS = st.sampled_from((0.0, 0.0, 0.001, 0.05, 0.4, 1.5, None))
"""Seconds after which a process connects to the next daemon; None: it drops its mappings."""


class KeptClusterMachine(ClusterMachine):
    """See the module's docstring."""

    keep = True

    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.cluster.watcher = self._watch
        for node in range(NODES):
            self.skew(node, 4)
            self.cluster.join(node, "blue").store(prompt("blue", 2), 0, Storing())
        self.cluster.run_for(0.1)

    def _watch(self, node: str, event: events.Event, orders: Any) -> None:
        if isinstance(event, events.Requested) and isinstance(event.message, wire.Regrant):
            returned.append(event.message)

    @rule(
        node=nodes,
        how=st.sampled_from(("in order", "in order", "killed", "killed", "within an event", "within an event")),
        left=st.integers(0, 6),
        seconds=st.sampled_from((0.0, 0.001, 0.03, 0.4)),
        returns=st.lists(RETURNS, min_size=4, max_size=4),
        busy=st.integers(0, 3),
        ordered=st.sampled_from((None, None, None, [], PROMPTS[0])),
        pause=PAUSES,
    )
    def restart(
        self,
        node: int,
        how: str,
        left: int,
        seconds: float,
        returns: list[float | None],
        busy: int,
        ordered: list[SegmentKey] | None,
        pause: float,
    ) -> None:
        """The daemon of a node ends and starts again, mostly while engines read and write at it. `ordered`: segments
        that an operator evicts from the next one at once, all for an empty list."""
        target = self.cluster.node(node)
        kept = target.kept
        assert kept is not None
        for engine in [each for each in self.cluster.alive() if each.node is target and busy]:
            here = (
                [each.key for each in target.core.store.segments() if each.tenant == engine.tenant]
                if target.core
                else []
            )
            engine.read(here[:6], Reading(attach=busy > 1, hold_s=0.5, independent=True))
            self.cluster.run_for(0.005)
            new = prompt(f"restart {self.cluster.next_id()}", 2)
            engine.store(new, 0, Storing(fill_s=0.3, shared=busy > 2))
        self.cluster.run_for(0.005 * busy)
        if target.core is None or target.frozen:
            return
        for number, process in enumerate(kept.survivors.values()):
            process.returns_after_s = returns[number % len(returns)]
        if how == "in order":
            target.end()
        elif how == "killed":
            target.crash()
        else:
            kept.dies_in = left

        def start() -> None:
            if target.core is None:
                target.start()
                if ordered is not None:
                    kept.evict("red", ordered)
            elif kept.ends or kept.dies_in is not None:
                self.cluster.clock.after(0.003, start)

        self.cluster.clock.after(seconds + 0.003, start)
        self.cluster.run_for(pause)

    @rule(node=nodes, regions=st.integers(1, 4))
    def resize(self, node: int, regions: int) -> None:
        """The next daemon of a node has another size of memory."""
        self.cluster.sizes[self.cluster.node(node).name] = regions

    @rule(node=nodes, tenant=st.sampled_from(("red", "blue")), number=prompts, every=st.booleans(), pause=PAUSES)
    def operator_evicts(self, node: int, tenant: str, number: int, every: bool, pause: float) -> None:
        """An operator evicts segments of a node."""
        kept = self.cluster.node(node).kept
        assert kept is not None
        kept.evict(tenant, [] if every else PROMPTS[number])
        self.cluster.run_for(pause)

    def teardown(self) -> None:
        for node in self.cluster.nodes.values():
            for metric in SEEN:
                SEEN[metric] += node.core.counters[metric] if node.core is not None else 0
        super().teardown()


def test_nothing_breaks_with_kept_memory() -> None:
    SEEN.update(dict.fromkeys(SEEN, 0))
    returned.clear()
    found = settings(max_examples=examples(60), stateful_step_count=30)
    run_state_machine_as_test(KeptClusterMachine, settings=found)
    assert all(SEEN.values()), {metric.name: count for metric, count in SEEN.items()}
    assert any(each.leases for each in returned)
    assert any(each.writes for each in returned)
