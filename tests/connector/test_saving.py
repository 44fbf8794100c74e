"""No segment is stored before it is right, and each one once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenlake_client.engines.vllm.saving import Progress

SEGMENT = 4


def test_without_loads_a_step_stores_what_it_computes() -> None:
    progress = Progress(SEGMENT)
    progress.computes(1, 10)
    assert progress.take(100, sure=True) == range(2)
    progress.computes(2, 11)
    assert progress.take(100, sure=True) == range(2, 2)
    progress.computes(3, 12)
    assert progress.take(100, sure=True) == range(2, 3)


def test_tokens_that_are_not_known_yet_wait() -> None:
    progress = Progress(SEGMENT)
    progress.computes(1, 8)
    assert progress.take(7, sure=True) == range(1)
    assert progress.take(8, sure=True) == range(1, 2)


def test_while_a_load_is_out_only_what_was_confirmed_is_stored() -> None:
    progress = Progress(SEGMENT)
    progress.computes(1, 8)
    assert progress.take(100, sure=False) == range(0)
    progress.computes(2, 12)
    progress.confirm(1)
    assert progress.take(100, sure=False) == range(2)
    progress.confirm(2)
    assert progress.take(100, sure=False) == range(2, 3)


def test_after_a_failed_load_nothing_of_the_steps_that_are_out_is_stored() -> None:
    progress = Progress(SEGMENT)
    progress.saved = 2
    progress.computes(1, 16)
    progress.computes(2, 20)
    progress.void()
    progress.confirm(2)
    assert progress.take(100, sure=False) == range(0)
    progress.computes(3, 12)
    progress.confirm(3)
    # The segments that could not be read are offered anew.
    assert progress.take(100, sure=False) == range(3)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), max_size=30))
def test_segments_come_in_order_and_never_before_they_are_computed(steps: list[tuple[int, bool, bool]]) -> None:
    progress = Progress(SEGMENT)
    computed, confirmed, expected = 0, 0, 0
    for number, (tokens, sure, confirms) in enumerate(steps, 1):
        computed += tokens
        progress.computes(number, computed)
        taken = progress.take(1 << 20, sure=sure)
        assert taken.start == expected
        assert taken.stop * SEGMENT <= (computed if sure else max(confirmed, expected * SEGMENT))
        expected = taken.stop
        if confirms:
            progress.confirm(number)
            confirmed = computed
