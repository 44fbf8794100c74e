"""The number of copies, when it changes, and the effect of false reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tokenlake.hot import Change, HotItem, HotRule, Shape, fair_mean
from tokenlake.hot.rule import MOST_HOT
from tokenlake.identity import NodeId, SegmentKey, TenantId

SIZE = 1 << 20
SHAPE = Shape(0, SIZE, 1)
NODES = [NodeId(f"n{number}") for number in range(8)]
EVEN = dict.fromkeys(NODES, 100.0 * SIZE)


def item(number: int) -> HotItem:
    return TenantId("red"), SegmentKey(bytes([number]) * 32)


def at_first(_: HotItem) -> Sequence[NodeId]:
    return NODES[:1]


def read(rule: HotRule, segment: HotItem, per_s: float, from_s: float, to_s: float) -> None:
    """A steady stream of reads."""
    for step in range(int((to_s - from_s) * per_s)):
        rule.read(segment, SHAPE, 1, from_s + step / per_s)
    rule.check_integrity()


def busy(load: float) -> dict[NodeId, float]:
    """Loads of all nodes: the first has `load` times that of each other."""
    return {**EVEN, NODES[0]: load * EVEN[NODES[0]]}


def test_the_rate_sets_the_number_of_copies() -> None:
    rule = HotRule()
    read(rule, item(1), 35.0, 0.0, 30.0)
    assert rule.decide(30.0, busy(1.05), at_first) == []
    # A share of the mean load is a tenth of 100 segments a second: 35 reads a second need four copies.
    assert rule.decide(30.0, busy(1.35), at_first) == [Change(item(1), 4)]
    assert rule.decide(30.0, busy(1.35), at_first) == []


def test_busy_while_a_rate_is_high_or_copies_exist() -> None:
    rule = HotRule()
    assert not rule.busy(0.0)
    read(rule, item(1), 1.0, 0.0, 1.0)
    assert not rule.busy(1.0)
    read(rule, item(1), 35.0, 1.0, 30.0)
    assert rule.busy(30.0)
    assert not rule.busy(10_000.0)
    read(rule, item(1), 35.0, 10_000.0, 10_030.0)
    assert rule.busy(10_030.0)
    rule.decide(10_030.0, busy(1.35), at_first)
    assert rule.busy(20_000.0)


def test_a_low_rate_gets_no_copies_on_a_busy_node() -> None:
    rule = HotRule()
    read(rule, item(1), 8.0, 0.0, 30.0)
    assert rule.decide(30.0, busy(5.0), at_first) == []


def test_the_hottest_segment_first_until_it_suffices() -> None:
    rule = HotRule()
    for step in range(600):
        for number, times in ((1, 4), (2, 2), (3, 2)):
            rule.read(item(number), SHAPE, times, step * 0.1)
    changes = rule.decide(60.0, busy(1.35), at_first)
    assert [change.item for change in changes] == [item(1)]
    assert [change.item for change in HotRule().decide(60.0, busy(9.0), at_first)] == []


def test_copies_grow_while_a_node_stays_above() -> None:
    """The number of copies grows to a quarter more than the rate needs."""
    rule = HotRule()
    read(rule, item(1), 35.0, 0.0, 30.0)
    copies: list[int] = []
    for step in range(50):
        changes = rule.decide(30.0 + step / 10, busy(1.5), at_first)
        read(rule, item(1), 35.0, 30.0 + step / 10, 30.1 + step / 10)
        copies += [change.copies for change in changes]
    assert copies == [4, 5]


def test_copies_are_dropped_after_a_quiet_time() -> None:
    rule = HotRule()
    read(rule, item(1), 35.0, 0.0, 30.0)
    assert rule.decide(30.0, busy(1.5), at_first)
    changes = {at_s: rule.decide(at_s, EVEN, at_first) for at_s in range(31, 400)}
    (dropped_s,) = [at_s for at_s, change in changes.items() if change == [Change(item(1), 1)]]
    # The rate is a quarter of a share (ten reads a second) after 135 s. The copies are dropped 20 s later.
    assert 180 <= dropped_s <= 192
    assert item(1) not in rule


def test_copies_shrink_after_a_crowd() -> None:
    """Some copies are dropped after the crowd; others stay, since the segment is still hot."""
    rule = HotRule()
    read(rule, item(1), 75.0, 0.0, 30.0)
    assert rule.decide(30.0, busy(1.5), at_first) == [Change(item(1), 8)]
    changes: list[Change] = []
    for second in range(30, 400):
        read(rule, item(1), 21.0, float(second), second + 1.0)
        changes += rule.decide(second + 1.0, EVEN, at_first)
    assert [change.copies for change in changes] == sorted((change.copies for change in changes), reverse=True)
    assert changes[-1].copies in (3, 4)


def test_a_single_read_on_idle_nodes_makes_nothing_hot() -> None:
    rule = HotRule()
    rule.read(item(1), SHAPE, 1, 0.0)
    assert rule.decide(0.1, {**dict.fromkeys(NODES, 0.0), NODES[0]: SIZE / 3}, at_first) == []


def test_a_crowd_on_idle_nodes_gets_copies_in_seconds() -> None:
    rule = HotRule()
    read(rule, item(1), 8.0, 0.0, 1.0)
    changes = rule.decide(1.0, {**dict.fromkeys(NODES, 0.0), NODES[0]: 8.0 * SIZE}, at_first)
    assert changes == [Change(item(1), len(NODES))]


@given(st.floats(0.0, 1e15), st.integers(0, 7))
def test_a_false_load_moves_the_mean_by_one_part(lie: float, liar: int) -> None:
    loads = list(EVEN.values())
    loads[liar] = lie
    assert 6 / 7 * EVEN[NODES[0]] <= fair_mean(loads) * (1 + 1e-12)
    assert fair_mean(loads) <= EVEN[NODES[0]] * (1 + 1e-12)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 1 << 32)), max_size=300), st.floats(0.0, 1e15))
def test_memory_is_bounded_for_any_reports(reads: list[tuple[int, int]], lie: float) -> None:
    rule = HotRule()
    for step, (number, times) in enumerate(reads):
        rule.read(item(number), SHAPE, times, step * 0.1)
        rule.check_integrity()
    changes = rule.decide(60.0, {**EVEN, NODES[0]: lie}, at_first)
    assert all(2 <= change.copies <= len(NODES) for change in changes)
    assert sum(item(number) in rule for number in range(201)) <= MOST_HOT
    assert all(math.isfinite(change.copies) for change in changes)


def test_false_crowds_make_at_most_most_hot_segments_hot() -> None:
    rule = HotRule()
    reported: list[HotItem] = []
    for step in range(60):
        now = step * 0.25
        for number in range(16):
            made_up = TenantId("red"), SegmentKey((16 * step + number).to_bytes(32, "big"))
            rule.read(made_up, SHAPE, 1000, now)
            reported.append(made_up)
        rule.decide(now, busy(50.0), at_first)
        rule.check_integrity()
    assert sum(each in rule for each in reported) == MOST_HOT
