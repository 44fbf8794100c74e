"""The cheapest part of a hit is loaded, as far as times are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.identity import NodeId
from tokenlake.planner import PrefillFit, Rates, TransferFit
from tokenlake_client.engines.vllm.known.load_cost import HERE, LOCAL, RETRY_S, LoadCosts, Owner, PrefillSteps
from tokenlake_client.engines.vllm.known.request import ScheduledPart
from tokenlake_client.engines.vllm.load_worker import LoadTime

SEGMENT, BYTES = 8, 1000
TOKEN_S = 1e-3
"""The prefill time per token, for every prefix."""
SEGMENT_S = SEGMENT * TOKEN_S


class Machine:
    """An engine whose prefill takes `TOKEN_S` per token. `segment_s`: the seconds per segment of each node."""

    def __init__(self, *, prefills: int = 8, **segment_s: float) -> None:
        self.rates = Rates()
        self.now = 0.0
        self.costs = LoadCosts(self.rates, SEGMENT, BYTES, lambda: self.now)
        for count in range(1, prefills + 1):
            self.rates.prefill.add(100 * count, 50 * (count % 3), 100 * count * TOKEN_S, 0.0)
        for source, seconds in segment_s.items():
            self.sample(self.fit(source), seconds)

    def fit(self, source: str) -> TransferFit:
        return self.rates.copy if source == "here" else self.rates.peer(NodeId(source)).fetch

    def sample(self, fit: TransferFit, segment_s: float, count: int = 8) -> None:
        for segments in range(1, count + 1):
            fit.add(segments * BYTES, segments * segment_s, self.now)

    def stop(self, owners: Sequence[Owner], start: int = 0, total: int | None = None) -> int:
        """The chosen end of the load; by default, of a prompt with one more token than its hit."""
        until = len(owners) * SEGMENT
        return self.costs.cheapest_stop(owners, start, until, until + 1 if total is None else total)


def test_every_hit_is_loaded_below_eight_prefills() -> None:
    assert Machine(prefills=7, here=1000.0).stop([LOCAL] * 4) == 32
    assert Machine(prefills=8, here=1000.0).stop([LOCAL] * 4) == 0


@pytest.mark.parametrize("node", [HERE, "fast"])
def test_the_time_of_a_disk_counts(node: str) -> None:
    machine = Machine(here=0.1 * SEGMENT_S, fast=0.1 * SEGMENT_S)
    assert machine.stop([LOCAL] * 2 + [Owner(node, 0.5 * SEGMENT_S)] * 2) == 32
    assert machine.stop([LOCAL] * 2 + [Owner(node, 2 * SEGMENT_S)] * 2) == 16
    before = machine.stop([Owner("fast")] * 4)
    machine.costs.add_load([Owner(node, 1e-9)] * 4, LoadTime(100 * SEGMENT_S, 0.1 * SEGMENT_S))
    assert machine.stop([Owner("fast")] * 4) == before == 32


def test_memory_and_disk_of_a_node_are_one_read() -> None:
    """A node that has segments in memory and on disk is asked once."""
    machine = Machine(here=0.1 * SEGMENT_S)
    for segments in range(1, 9):
        machine.fit("far").add(segments * BYTES, (2 + 0.1 * segments) * SEGMENT_S, 0.0)
    assert machine.stop([Owner("far")] * 3) == 24
    assert machine.stop([Owner("far")] * 2 + [Owner("far", 1e-9)]) == 24


def test_a_source_with_few_samples_is_used() -> None:
    machine = Machine(here=0.1 * SEGMENT_S)
    machine.sample(machine.fit("new"), 5 * SEGMENT_S, count=7)
    assert machine.stop([Owner("new")] * 4) == 32
    machine.sample(machine.fit("new"), 5 * SEGMENT_S, count=1)
    assert machine.stop([Owner("new")] * 4) == 0


@given(
    owners=st.lists(st.sampled_from([LOCAL, Owner("a"), Owner("b")]), min_size=1, max_size=12),
    here=st.floats(0.01, 3),
    a=st.floats(0.01, 3),
    b=st.floats(0.01, 3),
    local=st.integers(0, 5),
    rest=st.integers(1, 100),
)
def test_no_other_stop_is_cheaper(owners: list[Owner], here: float, a: float, b: float, local: int, rest: int) -> None:
    machine = Machine(here=here * SEGMENT_S, a=a * SEGMENT_S, b=b * SEGMENT_S)
    until = len(owners) * SEGMENT
    start = min(4 * local, until)
    total = until + rest

    def cost(stop: int) -> float:
        if stop == start:
            return machine.rates.prefill.seconds(total - start, start)
        needed = Counter(owners[start // SEGMENT : -(-stop // SEGMENT)])
        loading = machine.rates.copy.seconds(needed.total() * BYTES)
        loading += sum(
            machine.fit(owner.node).seconds(count * BYTES) for owner, count in needed.items() if owner != LOCAL
        )
        return loading + machine.rates.prefill.seconds(total - stop, stop)

    stop = machine.stop(owners, start, total)
    ends = [end for end in range(0, until + 1, SEGMENT) if end > start]
    assert stop in [start, *ends]
    assert cost(stop) <= min(map(cost, [start, *ends])) * (1 + 1e-9)


def test_a_slow_source_is_retried() -> None:
    machine = Machine(here=0.1 * SEGMENT_S, slow=5 * SEGMENT_S)
    assert machine.stop([Owner("slow")] * 4) == 0
    machine.now = RETRY_S + 1
    assert machine.stop([Owner("slow")] * 4) == 32
    assert machine.stop([Owner("slow")] * 4) == 0
    machine.now = 2 * RETRY_S + 3
    assert machine.stop([Owner("slow")] * 4) == 32


@pytest.mark.parametrize(("took", "then"), [(1.0, 32), (19.0, 0)])
def test_a_source_that_became_faster_is_measured_again(took: float, then: int) -> None:
    """The samples begin anew: 64 slow samples would outweigh the new ones."""
    machine = Machine(here=0.1 * SEGMENT_S)
    for _ in range(8):
        machine.sample(machine.fit("peer"), 5 * SEGMENT_S)
    machine.now = RETRY_S + 1
    assert machine.stop([Owner("peer")] * 4) == 32
    machine.costs.add_load([Owner("peer")] * 4, LoadTime(took * SEGMENT_S, 0.4 * SEGMENT_S))
    assert machine.stop([Owner("peer")] * 4) == then


def test_loads_are_samples_of_their_sources() -> None:
    machine = Machine()
    for count in range(1, 9):
        machine.costs.add_load([LOCAL] * count, LoadTime(0.01 * count, 0.02 * count))
        machine.costs.add_load([Owner("a")] * count, LoadTime(0.5 * count, 0.03 * count))
    # The copy times of local loads include the fetch; those of loads from another node are of the copy alone.
    assert machine.rates.copy.seconds(10 * BYTES) == pytest.approx(0.3, rel=1e-3)
    assert machine.fit("a").seconds(10 * BYTES) == pytest.approx(5.0, rel=1e-3)


def test_time_is_divided_by_the_predictions() -> None:
    machine = Machine(here=0.1, slow=1.0, fast=0.01)
    for _ in range(64):
        machine.costs.add_load([LOCAL, Owner("slow"), Owner("fast")], LoadTime(2.02, 0.3))
    assert machine.fit("slow").seconds(BYTES) == pytest.approx(2.0, rel=0.02)
    assert machine.fit("fast").seconds(BYTES) == pytest.approx(0.02, rel=0.02)


def test_eight_surprises_replace_the_samples() -> None:
    before, after = 0.1, 5.0
    machine = Machine(here=before * SEGMENT_S)
    for _ in range(8):
        machine.sample(machine.rates.copy, before * SEGMENT_S)

    def load(segment_s: float, count: int) -> None:
        for segments in range(1, count + 1):
            machine.costs.add_load([LOCAL] * segments, LoadTime(0, segment_s * SEGMENT_S * segments))

    # A sample that matches the prediction ends the series of deviating samples: those before it count as outliers.
    load(after, 7)
    load(before, 1)
    load(after, 7)
    assert machine.stop([LOCAL] * 4) == 32
    load(after, 1)
    assert machine.stop([LOCAL] * 4) == 0


def test_a_late_load_makes_its_node_slow() -> None:
    machine = Machine(here=0.1 * SEGMENT_S)
    for _ in range(8):
        # A load that fails at once tells nothing about the speed of the node.
        machine.costs.add_load([Owner("gone")] * 4, LoadTime(0.0, 0.0, lost=4))
        machine.costs.add_load([Owner("late")] * 4, LoadTime(2.5 * SEGMENT_S, 0.0, lost=3))
    assert not machine.fit("gone").known
    # One of the four segments arrived and the second did not: the time counts for two segments.
    assert machine.fit("late").seconds(4 * BYTES) == pytest.approx(5 * SEGMENT_S)
    assert machine.stop([Owner("late")] * 4) == 0
    assert machine.rates.copy.seconds(4 * BYTES) == pytest.approx(0.4 * SEGMENT_S)


def part(new: int, computed: int = 0) -> ScheduledPart:
    return ScheduledPart("r", computed, new, (), whole=False)


def test_all_kinds_of_steps_share_one_fit() -> None:
    fit = PrefillFit()
    prefills = PrefillSteps(fit, lambda: 0.0)
    steps = [
        [part(100)],
        [part(300)],
        [part(200, 400)],
        [part(300, 1000)],
        [part(50, 100), part(80)],
        [part(100), part(1, 500), part(1, 700)],
        [part(10, 2000)],
        [part(400, 100), part(1, 900)],
    ]

    def seconds(parts: list[ScheduledPart]) -> float:
        pairs = sum(one.new * (one.computed + one.new / 2) for one in parts)
        return 0.01 + 1e-3 * sum(one.new for one in parts) + 2e-7 * pairs + 1e-6 * sum(one.computed for one in parts)

    for step, parts in enumerate(steps):
        assert not fit.known
        prefills.begin(step, parts)
        prefills.end(step, seconds(parts))
    assert fit.known
    assert fit.seconds(1000, 0) == pytest.approx(0.01 + 1.0 + 0.1, rel=1e-3)
    assert fit.coefficients == pytest.approx((0.01, 1e-3, 2e-7, 1e-6), rel=1e-2)


def test_decode_steps_are_no_samples() -> None:
    fit = PrefillFit()
    prefills = PrefillSteps(fit, lambda: 0.0)
    for step in range(20):
        # A step that only decodes, a step with more decodes than prompt tokens, and an empty step.
        prefills.begin(step, [[part(1, 100)], [part(3), *[part(1, 100)] * 4], []][step % 3])
        prefills.end(step, 1.0)
    assert not fit.known
    for step in range(20, 28):
        prefills.begin(step, [part(10)])
        assert not fit.known
        prefills.end(step, 1.0)
        prefills.end(step, 1.0)
    assert fit.known
