"""Sequences of evenly spaced addresses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenlake.attention.sequences import EvenSequence, even_sequences


@given(st.sets(st.integers(0, 40), max_size=12), st.randoms(use_true_random=False))
def test_every_address_is_in_one_sequence(addresses: set[int], random: st.DataObject) -> None:
    shuffled = sorted(addresses)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    sequences = even_sequences(shuffled)
    assert sorted(start + at * step for start, step, length in sequences for at in range(length)) == sorted(addresses)
    assert len(sequences) <= (len(addresses) + 1) // 2


def test_neighbours_in_any_order_are_one_sequence() -> None:
    assert even_sequences([30, 10, 20, 40]) == [EvenSequence(10, 10, 4)]


def test_a_gap_begins_another_sequence() -> None:
    assert even_sequences([0, 1, 2, 10, 11, 12]) == [EvenSequence(0, 1, 3), EvenSequence(10, 1, 3)]
    assert even_sequences([7]) == [EvenSequence(7, 0, 1)]
