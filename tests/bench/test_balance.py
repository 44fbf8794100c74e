"""Load of nodes against cases counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tokenlake.errors import ConfigurationError
from tokenlake_bench.balance import (
    ReadLog,
    Spread,
    floor,
    floor_from,
    load_of_nodes,
    max_over_mean_from,
    spread,
)


def log_of(nodes: int, *reads: tuple[float, int, int, int]) -> ReadLog:
    """Each read is (at_s, node, segment, nbytes)."""
    log = ReadLog(nodes)
    for read in reads:
        log.add(*read)
    return log


def test_equal_loads_have_no_spread() -> None:
    log = log_of(2, (0.0, 0, 1, 100), (9.9, 1, 2, 60), (5.0, 1, 3, 40))
    assert spread(log) == Spread(cv=0.0, max_over_mean=1.0)
    assert load_of_nodes(log) == [100, 100]
    assert len(log) == 3


def test_one_node_of_two_with_all_reads() -> None:
    assert spread(log_of(2, (0.0, 0, 1, 100))) == Spread(cv=1.0, max_over_mean=2.0)


def test_the_deviation_is_of_the_population() -> None:
    # The loads are 3 and 1: mean 2, deviation 1.
    found = spread(log_of(2, (0.0, 0, 1, 3), (0.0, 1, 2, 1)))
    assert found.cv == pytest.approx(0.5)
    assert found.max_over_mean == pytest.approx(1.5)


def test_windows_weigh_by_their_bytes() -> None:
    # In the first window 30 bytes are spread evenly (CV 0), in the second 10 bytes are all read at one of two nodes (CV
    # 1).
    log = log_of(2, (1.0, 0, 1, 15), (2.0, 1, 2, 15), (10.0, 0, 1, 10))
    assert spread(log).cv == pytest.approx(0.25)
    assert spread(log).max_over_mean == pytest.approx(1.25)
    assert spread(log, window_s=100.0).cv == pytest.approx(0.25)
    assert spread(log, window_s=1.5).cv == pytest.approx(1.0)


def test_windows_begin_at_multiples_and_empty_ones_do_not_count() -> None:
    apart = log_of(2, (9.99, 0, 1, 5), (10.0, 1, 2, 5))
    assert spread(apart) == Spread(cv=1.0, max_over_mean=2.0)
    assert spread(log_of(2, (0.0, 0, 1, 5), (1e9, 0, 1, 5))) == Spread(cv=1.0, max_over_mean=2.0)


def test_nothing_read_has_no_spread() -> None:
    for log in (ReadLog(3), log_of(3, (0.0, 1, 1, 0))):
        assert spread(log) == floor(log, 0) == Spread(cv=0.0, max_over_mean=1.0)
        assert load_of_nodes(log) == [0, 0, 0]


def test_the_floor_is_zero_where_all_segments_are_hot() -> None:
    # ceil(4 ln 4) = 6 segments are spread evenly, whichever node served them.
    log = log_of(4, *((float(segment), 0, segment, 100 + segment) for segment in range(6)))
    assert spread(log).cv > 1
    assert floor(log, 0).cv == pytest.approx(0, abs=1e-12)
    assert floor(log, 0).max_over_mean == pytest.approx(1)


def test_the_floor_hashes_what_is_not_hot() -> None:
    # Two nodes: ceil(2 ln 2) = 2 hot segments of 50 bytes, and a cold one of 10 bytes on either node: 55 +- 5 in every
    # placement.
    log = log_of(2, (0.0, 0, 1, 50), (0.0, 0, 2, 50), (0.0, 0, 3, 10))
    assert floor(log, 0).cv == pytest.approx(5 / 55)
    assert floor(log, 0).max_over_mean == pytest.approx(60 / 55)


def test_hot_is_by_bytes_over_all_windows() -> None:
    # Segment 1 is read most in sum, though never most within one window: it is hot, and segment 4 is not.
    reads = [(10.0 * number, 0, 1, 30) for number in range(4)] + [(0.0, 0, 2, 90), (10.0, 0, 4, 40)]
    assert floor(log_of(2, *reads), 0).cv == pytest.approx(40 / 250)


def test_the_floor_of_equal_segments_is_random_placement() -> None:
    rng = np.random.default_rng(0)
    log = ReadLog(8)
    for segment in range(4_000):
        log.add(0.0, int(rng.integers(8)), segment, 1)
    # The bytes of a node are binomial: CV = sqrt((1 - 1/n) n / m).
    expected = math.sqrt(7 / 8 * 8 / 4_000)
    assert floor(log, 0).cv == pytest.approx(expected, rel=0.25)
    assert floor(log, 0) == floor(log, 0)
    assert floor(log, 0) != floor(log, 1)


def test_one_node_is_always_even() -> None:
    log = log_of(1, (0.0, 0, 1, 5), (20.0, 0, 2, 500))
    assert spread(log) == floor(log, 0) == Spread(cv=0.0, max_over_mean=1.0)


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nodes"):
        ReadLog(0)
    with pytest.raises(IndexError, match="node 2 of 2"):
        log_of(2, (0.0, 2, 1, 5))
    with pytest.raises(ConfigurationError, match="window_s"):
        spread(log_of(2, (0.0, 1, 1, 5)), window_s=0.0)


def test_windows_from_a_moment_on() -> None:
    log = log_of(2, (5.0, 0, 1, 9), (10.0, 0, 1, 3), (12.0, 1, 2, 1), (31.0, 1, 1, 2), (55.0, 0, 1, 1))
    # Windows at 0, 10, 30 and 50 s; the one at 20 s has no reads.
    assert max_over_mean_from(log, 10.0, 3) == pytest.approx([1.5, 2.0])
    assert max_over_mean_from(log, 60.0, 2) == []


def test_the_floor_of_windows_spreads_the_hottest_fairly() -> None:
    # ceil(2 ln 2) = 2 hot segments: all there are.
    log = log_of(2, (0.0, 0, 1, 8), (11.0, 0, 1, 3), (12.0, 1, 2, 1))
    assert floor_from(log, seed=0, at_s=10.0, windows=1) == pytest.approx([1.0])
    assert floor(log, seed=0).max_over_mean == pytest.approx(1.0)
