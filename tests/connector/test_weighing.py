"""How much of a hit is loaded, with rates that a test made up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.identity import NodeId
from tokenlake.planner import Rates, TransferFit
from tokenlake_client.engines.vllm.lookup import HERE
from tokenlake_client.engines.vllm.plan import LoadTime
from tokenlake_client.engines.vllm.weighing import RETRY_S, Loads

SEGMENT, BYTES = 8, 1000
TOKEN_S = 1e-3
"""Of prefill, whatever is before it."""
SEGMENT_S = SEGMENT * TOKEN_S


class Machine:
    """An engine whose prefill takes `TOKEN_S` per token, and nodes whose segments take so many seconds each."""

    def __init__(self, *, prefills: int = 8, **segment_s: float) -> None:
        self.rates = Rates()
        self.now = 0.0
        self.loads = Loads(self.rates, SEGMENT, BYTES, lambda: self.now)
        for count in range(1, prefills + 1):
            self.rates.prefill.add(100 * count, 50 * (count % 3), 100 * count * TOKEN_S, 0.0)
        for source, seconds in segment_s.items():
            self.sample(self.fit(source), seconds)

    def fit(self, source: str) -> TransferFit:
        return self.rates.copy if source == "here" else self.rates.peer(NodeId(source)).fetch

    def sample(self, fit: TransferFit, segment_s: float, count: int = 8) -> None:
        for segments in range(1, count + 1):
            fit.add(segments * BYTES, segments * segment_s, self.now)

    def worth(self, owners: list[str], start: int = 0, total: int | None = None) -> int:
        """Tokens, of a prompt with one more token than its hit."""
        until = len(owners) * SEGMENT
        return self.loads.worth(owners, start, until, until + 1 if total is None else total)


def test_what_is_faster_to_load_is_loaded_and_what_is_slower_is_not() -> None:
    assert Machine(here=0.5 * SEGMENT_S).worth([HERE] * 4) == 32
    assert Machine(here=2 * SEGMENT_S).worth([HERE] * 4) == 0


def test_below_eight_prefills_everything_is_loaded() -> None:
    assert Machine(prefills=7, here=1000.0).worth([HERE] * 4) == 32
    assert Machine(prefills=8, here=1000.0).worth([HERE] * 4) == 0


def test_what_is_here_is_loaded_and_the_slow_rest_computed() -> None:
    machine = Machine(here=0.1 * SEGMENT_S, slow=2 * SEGMENT_S, fast=0.2 * SEGMENT_S)
    assert machine.worth([HERE, HERE, "slow", "slow"]) == 16
    assert machine.worth([HERE, "fast", "fast", "slow"]) == 24
    assert machine.worth(["slow", "slow", HERE, "fast"]) == 0


def test_what_is_slow_is_loaded_where_enough_behind_it_is_fast() -> None:
    machine = Machine(here=0.1 * SEGMENT_S, slow=2 * SEGMENT_S)
    assert machine.worth(["slow", HERE]) == 0
    assert machine.worth(["slow", HERE, HERE]) == 24


def test_what_vllm_has_is_not_weighed() -> None:
    machine = Machine(here=0.1 * SEGMENT_S, slow=2 * SEGMENT_S)
    # The slow segments before it are not needed.
    assert machine.worth(["slow", "slow", HERE, HERE], start=16) == 32
    assert machine.worth([HERE, HERE, "slow", "slow"], start=20) == 20


def test_a_source_that_was_seldom_read_is_read() -> None:
    machine = Machine(here=0.1 * SEGMENT_S)
    machine.sample(machine.fit("new"), 5 * SEGMENT_S, count=7)
    assert machine.worth(["new"] * 4) == 32
    machine.sample(machine.fit("new"), 5 * SEGMENT_S, count=1)
    assert machine.worth(["new"] * 4) == 0


@given(
    owners=st.lists(st.sampled_from([HERE, "a", "b"]), min_size=1, max_size=12),
    here=st.floats(0.01, 3),
    a=st.floats(0.01, 3),
    b=st.floats(0.01, 3),
    local=st.integers(0, 5),
    rest=st.integers(1, 100),
)
def test_no_other_stop_is_cheaper(owners: list[str], here: float, a: float, b: float, local: int, rest: int) -> None:
    machine = Machine(here=here * SEGMENT_S, a=a * SEGMENT_S, b=b * SEGMENT_S)
    until = len(owners) * SEGMENT
    start = min(4 * local, until)
    total = until + rest

    def cost(stop: int) -> float:
        if stop == start:
            return machine.rates.prefill.seconds(total - start, start)
        needed = Counter(owners[start // SEGMENT : -(-stop // SEGMENT)])
        loading = machine.rates.copy.seconds(needed.total() * BYTES)
        loading += sum(machine.fit(node).seconds(count * BYTES) for node, count in needed.items() if node != HERE)
        return loading + machine.rates.prefill.seconds(total - stop, stop)

    stop = machine.worth(owners, start, total)
    ends = [end for end in range(0, until + 1, SEGMENT) if end > start]
    assert stop in [start, *ends]
    assert cost(stop) <= min(map(cost, [start, *ends])) * (1 + 1e-9)


def test_a_slow_source_is_tried_again_once_a_while() -> None:
    machine = Machine(here=0.1 * SEGMENT_S, slow=5 * SEGMENT_S)
    assert machine.worth(["slow"] * 4) == 0
    machine.now = RETRY_S + 1
    assert machine.worth(["slow"] * 4) == 32
    assert machine.worth(["slow"] * 4) == 0
    machine.now = 2 * RETRY_S + 3
    assert machine.worth(["slow"] * 4) == 32


@pytest.mark.parametrize(("took", "then"), [(1.0, 32), (19.0, 0)])
def test_what_became_faster_is_measured_anew(took: float, then: int) -> None:
    """64 slow samples would outweigh what is true now."""
    machine = Machine(here=0.1 * SEGMENT_S)
    for _ in range(8):
        machine.sample(machine.fit("peer"), 5 * SEGMENT_S)
    machine.now = RETRY_S + 1
    assert machine.worth(["peer"] * 4) == 32
    machine.loads.measured(["peer"] * 4, LoadTime(took * SEGMENT_S, 0.4 * SEGMENT_S))
    assert machine.worth(["peer"] * 4) == then


def test_loads_are_measured_by_where_they_came_from() -> None:
    machine = Machine()
    for count in range(1, 9):
        machine.loads.measured([HERE] * count, LoadTime(0.01 * count, 0.02 * count))
        machine.loads.measured(["a"] * count, LoadTime(0.5 * count, 0.03 * count))
    # Both read and copied; of what came from elsewhere the copy alone.
    assert machine.rates.copy.seconds(10 * BYTES) == pytest.approx(0.3, rel=1e-3)
    assert machine.fit("a").seconds(10 * BYTES) == pytest.approx(5.0, rel=1e-3)


def test_of_several_nodes_the_one_that_is_known_to_be_slow_took_the_time() -> None:
    machine = Machine(here=0.1, slow=1.0, fast=0.01)
    for _ in range(64):
        machine.loads.measured([HERE, "slow", "fast"], LoadTime(2.02, 0.3))
    assert machine.fit("slow").seconds(BYTES) == pytest.approx(2.0, rel=0.02)
    assert machine.fit("fast").seconds(BYTES) == pytest.approx(0.02, rel=0.02)


def test_eight_surprises_in_a_row_are_a_change() -> None:
    before, after = 0.1, 5.0
    machine = Machine(here=before * SEGMENT_S)
    for _ in range(8):
        machine.sample(machine.rates.copy, before * SEGMENT_S)

    def load(segment_s: float, count: int) -> None:
        for segments in range(1, count + 1):
            machine.loads.measured([HERE] * segments, LoadTime(0, segment_s * SEGMENT_S * segments))

    # One that is as expected among them: these are outliers.
    load(after, 7)
    load(before, 1)
    load(after, 7)
    assert machine.worth([HERE] * 4) == 32
    load(after, 1)
    assert machine.worth([HERE] * 4) == 0


def test_a_load_that_was_given_up_late_tells_that_its_node_is_slow() -> None:
    machine = Machine(here=0.1 * SEGMENT_S)
    for _ in range(8):
        # Lost at once: nothing is known of how fast the node is.
        machine.loads.measured(["gone"] * 4, LoadTime(0.0, 0.0, lost=4))
        machine.loads.measured(["late"] * 4, LoadTime(2.5 * SEGMENT_S, 0.0, lost=3))
    assert not machine.fit("gone").known
    # One of four came in the time, and the second did not.
    assert machine.fit("late").seconds(4 * BYTES) == pytest.approx(5 * SEGMENT_S)
    assert machine.worth(["late"] * 4) == 0
    assert machine.rates.copy.seconds(4 * BYTES) == pytest.approx(0.4 * SEGMENT_S)
