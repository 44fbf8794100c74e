"""Placement: the emptier candidate, and runs that stay together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.identity import NodeId, SegmentKey
from tokenlake.placement import UNKNOWN_VACANCY, Vacancy, choose_owner, default_run_length, lean_of, runs

A, B = NodeId("a"), NodeId("b")


@pytest.mark.parametrize(
    ("directory_node", "other", "owner"),
    [
        (Vacancy(0.5, 0, 0.9), Vacancy(0.4, 9, 0.1), A),
        (Vacancy(0.4, 9, 0.1), Vacancy(0.5, 0, 0.9), B),
        (Vacancy(0.0, 9, 0.5), Vacancy(0.0, 3, 0.2), B),
        (Vacancy(0.0, 3, 0.2), Vacancy(0.0, 9, 0.5), A),
        (Vacancy(0.0, 3, 0.2), Vacancy(0.0, 7, 0.2), B),
        (Vacancy(0.0, 7, 0.2), Vacancy(0.0, 3, 0.2), A),
        (Vacancy(0.0, 3, 0.0), Vacancy(0.0, 7, 0.0), B),
        (Vacancy(0.5, 1, 0.2), Vacancy(0.5, 1, 0.2), A),
        (UNKNOWN_VACANCY, UNKNOWN_VACANCY, A),
        (UNKNOWN_VACANCY, Vacancy(0.0, 1, 0.5), B),
    ],
)
def test_the_emptier_candidate_becomes_the_owner(directory_node: Vacancy, other: Vacancy, owner: NodeId) -> None:
    assert choose_owner([(A, directory_node), (B, other)], 0.0) == owner


@pytest.mark.parametrize(
    ("free", "owner"), [((0.0, 0.0), A), ((0.004, 0.0), A), ((0.0, 0.02), B), ((0.02, 0.0), A), ((0.5, 0.502), A)]
)
def test_the_previous_owner_is_chosen_unless_the_other_is_emptier(free: tuple[float, float], owner: NodeId) -> None:
    of_no_value, dear = Vacancy(free[1], 99, 0.0), Vacancy(free[0], 1, 9.0)
    assert choose_owner([(B, of_no_value), (A, dear)], 0.0, A) == owner
    assert choose_owner([(A, dear), (B, of_no_value)], 0.0, A) == owner


def test_a_previous_owner_out_of_reach_is_passed_over() -> None:
    assert choose_owner([(A, UNKNOWN_VACANCY)], 0.5, B) == A


def test_a_single_candidate_becomes_the_owner() -> None:
    assert choose_owner([(A, UNKNOWN_VACANCY)], 0.5) == A


@pytest.mark.parametrize(
    ("directory_node", "other", "share"),
    [
        (Vacancy(0.0, 9, 0.5), Vacancy(0.0, 9, 0.5), 0.0),
        (Vacancy(0.0, 9, 0.5), Vacancy(0.0, 9, 0.5 * 1.03), 0.49),
        (Vacancy(0.0, 9, 0.5), Vacancy(0.0, 9, 0.5 / 8**0.5), 0.75),
        (Vacancy(0.0, 9, 0.5), Vacancy(0.0, 9, 0.5 * 8**0.5), 0.25),
        (Vacancy(0.0, 9, 0.5), Vacancy(0.0, 9 * 1.14, 0.5), 0.75),
        (Vacancy(0.100, 9, 0.5), Vacancy(0.125, 9, 0.5), 0.75),
        (Vacancy(0.0, 9, 0.5), Vacancy(0.0, 9, 0.05), 1.0),
        (Vacancy(0.0, 9, 0.5), Vacancy(0.1, 1, 0.9), 1.0),
        (Vacancy(0.1, 1, 0.9), Vacancy(0.0, 9, 0.5), 0.0),
    ],
)
def test_the_slightly_emptier_gets_slightly_more(directory_node: Vacancy, other: Vacancy, share: float) -> None:
    keys = [SegmentKey(bytes(16) + index.to_bytes(2, "big") + bytes(14)) for index in range(0, 1 << 16, 64)]
    chosen = [choose_owner([(A, directory_node), (B, other)], lean_of(key)) for key in keys]
    assert chosen.count(B) / len(keys) == pytest.approx(share, abs=0.01)


def test_lean_never_favours_the_fuller_node() -> None:
    """For each lean there is a limit: the other node becomes the owner for all of its vacancies that are better than
    the limit."""
    for lean in (-1.0, -0.3, 0.0, 0.7, 1.0):
        others = [Vacancy(0.0, 9, retention_value / 100) for retention_value in (*range(1, 49), *range(52, 100))]
        chosen = [choose_owner([(A, Vacancy(0.0, 9, 0.5)), (B, other)], lean) for other in others]
        assert chosen == sorted(chosen, reverse=True)


@pytest.mark.parametrize(("nodes", "length"), [(1, 1), (3, 1), (15, 1), (16, 4), (1000, 4)])
def test_the_default_run_length_follows_the_number_of_nodes(nodes: int, length: int) -> None:
    assert default_run_length(nodes) == length


@pytest.mark.parametrize(
    ("depths", "length", "expected"),
    [
        ([], 4, []),
        ([7], 4, [[7]]),
        ([0, 1, 2, 3, 4], 1, [[0], [1], [2], [3], [4]]),
        ([0, 1, 2, 3, 4], 4, [[0, 1, 2, 3], [4]]),
        ([3, 4, 5, 6, 7], 4, [[3, 4, 5, 6], [7]]),
        ([0, 1, 3, 4, 5], 4, [[0, 1], [3, 4, 5]]),
        ([0, 2, 4], 4, [[0], [2], [4]]),
        ([0, 1, 2, 3, 5, 6], 4, [[0, 1, 2, 3], [5, 6]]),
    ],
)
def test_sequences_start_at_the_first_new_segment_and_end_at_gaps(
    depths: list[int], length: int, expected: list[list[int]]
) -> None:
    assert [[depths[index] for index in run] for run in runs(depths, length)] == expected


@given(st.sets(st.integers(0, 60)).map(sorted), st.integers(1, 6))
def test_sequences_cover_every_segment_once(depths: list[int], length: int) -> None:
    cut = list(runs(depths, length))
    assert [index for run in cut for index in run] == list(range(len(depths)))
    for run in cut:
        inside = [depths[index] for index in run]
        assert inside == list(range(inside[0], inside[0] + len(inside)))
        assert 1 <= len(inside) <= length
    for run, following in itertools.pairwise(cut):
        # A run ends at its full length or at a gap in the depths, and for no other reason.
        assert len(run) == length or depths[following.start] != depths[run.stop - 1] + 1
