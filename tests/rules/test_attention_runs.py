"""Runs of evenly spaced addresses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenlake.attention.runs import EvenRun, even_runs


@given(st.sets(st.integers(0, 40), max_size=12), st.randoms(use_true_random=False))
def test_every_address_is_in_one_run_and_two_share_one(addresses: set[int], random: st.DataObject) -> None:
    shuffled = sorted(addresses)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    runs = even_runs(shuffled)
    assert sorted(start + at * step for start, step, length in runs for at in range(length)) == sorted(addresses)
    assert len(runs) <= (len(addresses) + 1) // 2


def test_neighbours_are_one_run_whatever_their_order() -> None:
    assert even_runs([30, 10, 20, 40]) == [EvenRun(10, 10, 4)]


def test_a_gap_begins_another_run() -> None:
    assert even_runs([0, 1, 2, 10, 11, 12]) == [EvenRun(0, 1, 3), EvenRun(10, 1, 3)]
    assert even_runs([7]) == [EvenRun(7, 0, 1)]
