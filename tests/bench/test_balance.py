"""Load of nodes and of instances against cases counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.errors import ConfigurationError
from tokenlake_bench.balance import BusyLog, SendLog, Spread, load, max_over_mean_from, spread

Read = tuple[float, int, int, tuple[int, ...]]
EVEN = Spread(cv=0.0, max_over_mean=1.0)


def log_of(nodes: int, *sends: tuple[float, int, int] | Read) -> SendLog:
    """Each send is (at_s, node, nbytes) or (at_s, node, nbytes, holders)."""
    log = SendLog(nodes)
    for send in sends:
        log.add(*send)
    return log


def test_equal_loads_have_no_spread() -> None:
    log = log_of(2, (0.0, 0, 100), (9.9, 1, 60), (5.0, 1, 40))
    assert load(log) == EVEN
    assert log.totals() == [100, 100]
    assert len(log) == 3


def test_one_node_of_two_with_all_sends() -> None:
    assert load(log_of(2, (0.0, 0, 100))) == Spread(cv=1.0, max_over_mean=2.0)


def test_the_deviation_is_of_the_population() -> None:
    # The loads are 3 and 1: mean 2, deviation 1.
    found = load(log_of(2, (0.0, 0, 3), (0.0, 1, 1)))
    assert found.cv == pytest.approx(0.5)
    assert found.max_over_mean == pytest.approx(1.5)


def test_windows_weigh_by_their_bytes() -> None:
    # In the first window 30 bytes are sent evenly (CV 0), in the second one node of two sends 10 bytes (CV 1).
    log = log_of(2, (1.0, 0, 15), (2.0, 1, 15), (10.0, 0, 10))
    assert load(log).cv == pytest.approx(0.25)
    assert load(log).max_over_mean == pytest.approx(1.25)
    assert load(log, window_s=100.0).cv == pytest.approx(0.25)
    assert load(log, window_s=1.5).cv == pytest.approx(1.0)


def test_windows_begin_at_multiples_and_empty_ones_do_not_count() -> None:
    apart = log_of(2, (9.99, 0, 5), (10.0, 1, 5))
    assert load(apart) == Spread(cv=1.0, max_over_mean=2.0)
    assert load(log_of(2, (0.0, 0, 5), (1e9, 0, 5))) == Spread(cv=1.0, max_over_mean=2.0)
    starts, table = apart.table()
    assert starts.tolist() == [0.0, 10.0]
    assert table.tolist() == [[5.0, 0.0], [0.0, 5.0]]


def test_nothing_sent_has_no_spread() -> None:
    for log in (SendLog(3), log_of(3, (0.0, 1, 0))):
        assert load(log) == load(log.at_floor()) == Spread(cv=None, max_over_mean=None)
        assert log.totals() == [0, 0, 0]
        assert max_over_mean_from(log, 0.0, 1) == []


def test_the_floor_spreads_reads_over_their_holders() -> None:
    # Node 0 sent four reads that both nodes could have sent.
    log = log_of(2, *[(float(at), 0, 10, (0, 1)) for at in range(4)])
    assert load(log).cv == 1.0
    assert log.at_floor().totals() == [20, 20]
    assert load(log.at_floor()) == EVEN
    assert log.totals() == [40, 0]


def test_the_floor_leaves_what_one_node_alone_could_send() -> None:
    # 30 bytes of a hand-over and 10 of a segment without another copy stay at node 0; only the last read can move.
    log = log_of(3, (0.0, 0, 10, (0, 1)), (1.0, 0, 10, (0,)), (2.0, 0, 30))
    assert log.at_floor().totals() == [40, 10, 0]
    assert log.reads().totals() == [20, 0, 0]
    assert log.reads().at_floor().totals() == [10, 10, 0]


def test_the_floor_places_reads_with_few_holders_first() -> None:
    # In order of time the read with two holders would go to node 0, which alone has the second segment.
    log = log_of(2, (0.0, 0, 10, (0, 1)), (1.0, 0, 10, (0,)))
    assert log.at_floor().totals() == [10, 10]


def test_the_floor_of_a_window_does_not_know_other_windows() -> None:
    # One read per window: each goes to the first of its holders, as no window has any load before it.
    log = log_of(2, *[(10.0 * at, 1, 10, (0, 1)) for at in range(4)])
    assert log.at_floor().totals() == [40, 0]
    assert load(log.at_floor()) == Spread(cv=1.0, max_over_mean=2.0)


@given(st.data())
def test_the_floor_keeps_bytes_times_and_holders(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 5))
    log = SendLog(nodes)
    sends: list[Read] = []
    for _ in range(data.draw(st.integers(0, 40))):
        holders = tuple(sorted(data.draw(st.sets(st.integers(0, nodes - 1)))))
        node = data.draw(st.sampled_from(holders) if holders else st.integers(0, nodes - 1))
        sends.append((data.draw(st.floats(0.0, 40.0)), node, data.draw(st.integers(1, 100)), holders))
        log.add(*sends[-1])
    floor = log.at_floor()
    assert len(floor) == len(sends)
    assert np.allclose(floor.table()[0], log.table()[0])
    assert np.allclose(floor.table()[1].sum(axis=1), log.table()[1].sum(axis=1))
    for node in range(nodes):
        could = sum(nbytes for _, sender, nbytes, holders in sends if node in (holders or (sender,)))
        must = sum(nbytes for _, sender, nbytes, holders in sends if (holders or (sender,)) == (node,))
        assert must <= floor.totals()[node] <= could


def test_one_node_is_always_even() -> None:
    log = log_of(1, (0.0, 0, 5, (0,)), (20.0, 0, 500))
    assert load(log) == load(log.at_floor()) == EVEN


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nodes"):
        SendLog(0)
    with pytest.raises(IndexError, match="node 2 of 2"):
        log_of(2, (0.0, 2, 5))
    with pytest.raises(ConfigurationError, match="window_s"):
        load(log_of(2, (0.0, 1, 5)), window_s=0.0)
    with pytest.raises(ConfigurationError, match="window_s"):
        BusyLog(2, window_s=float("inf"))


def test_windows_from_a_moment_on() -> None:
    log = log_of(2, (5.0, 0, 9), (10.0, 0, 3), (12.0, 1, 1), (31.0, 1, 2), (55.0, 0, 1))
    # Windows at 0, 10, 30 and 50 s; in the one at 20 s nothing was sent.
    assert max_over_mean_from(log, 10.0, 3) == pytest.approx([1.5, 2.0])
    assert max_over_mean_from(log, 60.0, 2) == []


def test_a_step_is_split_at_the_ends_of_windows() -> None:
    busy = BusyLog(2)
    busy.add(0, 8.0, 21.0)
    busy.add(1, 10.0, 12.0)
    busy.add(1, 40.0, 41.0)
    assert busy.table().tolist() == [[2.0, 0.0], [10.0, 2.0], [1.0, 0.0], [0.0, 1.0]]
    assert busy.total_s == 16.0
    assert spread(busy.table()).max_over_mean == pytest.approx((2 + 10 + 1 + 1) * 2 / 16)


def test_instances_that_never_compute_have_no_spread() -> None:
    assert spread(BusyLog(2).table()) == Spread(cv=None, max_over_mean=None)
