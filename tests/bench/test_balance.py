"""Load of nodes and of instances against cases counted by hand."""

from __future__ import annotations

import pytest

from tokenlake_bench.balance import BusyLog, SendLog, Spread, spread

EVEN, NONE = Spread(cv=0.0, max_over_mean=1.0), Spread(cv=None, max_over_mean=None)


@pytest.mark.parametrize(
    ("nodes", "sends", "expected"),
    [
        (2, [(0.0, 0, 100), (9.9, 1, 60), (5.0, 1, 40)], EVEN),
        (2, [(0.0, 0, 100)], Spread(cv=1.0, max_over_mean=2.0)),
        # The loads are 3 and 1: mean 2, deviation of the population 1.
        (2, [(0.0, 0, 3), (0.0, 1, 1)], Spread(cv=0.5, max_over_mean=1.5)),
        # In the first window 30 bytes are sent evenly (CV 0), in the second one node of two sends 10 bytes (CV 1).
        (2, [(1.0, 0, 15), (2.0, 1, 15), (10.0, 0, 10)], Spread(cv=0.25, max_over_mean=1.25)),
        # Windows begin at multiples of 10 s, and empty ones do not count.
        (2, [(9.99, 0, 5), (10.0, 1, 5)], Spread(cv=1.0, max_over_mean=2.0)),
        (2, [(0.0, 0, 5), (1e9, 0, 5)], Spread(cv=1.0, max_over_mean=2.0)),
        (1, [(0.0, 0, 5), (20.0, 0, 500)], EVEN),
        (3, [], NONE),
        (3, [(0.0, 1, 0)], NONE),
    ],
)
def test_the_spread_of_sent_bytes(nodes: int, sends: list[tuple[float, int, int]], expected: Spread) -> None:
    """Each send is (at_s, node, nbytes)."""
    log = SendLog(nodes)
    for send in sends:
        log.add(*send)
    assert spread(log.table()) == expected
    assert sum(log.totals()) == sum(nbytes for _, _, nbytes in sends)


def test_the_busiest_node_of_a_window() -> None:
    log = SendLog(2)
    for at_s, node, nbytes in [(1.0, 0, 5), (12.0, 0, 30), (13.0, 1, 5), (21.9, 0, 5), (22.0, 1, 99)]:
        log.add(at_s, node, nbytes)
    assert log.busiest(12.0) == (35 / 20, 35)
    assert log.busiest(100.0) is None


def test_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError, match="node 2 of 2"):
        SendLog(2).add(0.0, 2, 5)


def test_a_step_is_split_at_the_ends_of_windows() -> None:
    busy = BusyLog(2)
    assert spread(busy.table()) == NONE
    busy.add(0, 8.0, 21.0)
    busy.add(1, 10.0, 12.0)
    busy.add(1, 40.0, 41.0)
    assert busy.table().tolist() == [[2.0, 0.0], [10.0, 2.0], [1.0, 0.0], [0.0, 1.0]]
    assert busy.total_s == 16.0
    assert spread(busy.table()).max_over_mean == pytest.approx((2 + 10 + 1 + 1) * 2 / 16)
