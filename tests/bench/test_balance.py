"""Load of nodes and of instances against cases counted by hand."""

from __future__ import annotations

import pytest

from tokenlake.errors import ConfigurationError
from tokenlake_bench.balance import BusyLog, SendLog, Spread, load, max_over_mean_from, spread

EVEN = Spread(cv=0.0, max_over_mean=1.0)


def log_of(nodes: int, *sends: tuple[float, int, int]) -> SendLog:
    """Each send is (at_s, node, nbytes)."""
    log = SendLog(nodes)
    for send in sends:
        log.add(*send)
    return log


def test_equal_loads_have_no_spread() -> None:
    log = log_of(2, (0.0, 0, 100), (9.9, 1, 60), (5.0, 1, 40))
    assert load(log) == EVEN
    assert log.totals() == [100, 100]


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
        assert load(log) == Spread(cv=None, max_over_mean=None)
        assert log.totals() == [0, 0, 0]
        assert max_over_mean_from(log, 0.0, 1) == []


def test_one_node_is_always_even() -> None:
    log = log_of(1, (0.0, 0, 5), (20.0, 0, 500))
    assert load(log) == EVEN


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
