"""Timers against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.core.timers import Timer, Timers

acts = st.one_of(
    st.tuples(st.just("arm"), st.integers(0, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("fire"), st.integers(0, 20)),
)


@pytest.mark.parametrize("kept", [0, 64])
@given(story=st.lists(acts, max_size=40))
def test_what_is_due_fires_once_in_order(kept: int, story: list[tuple[str, int]]) -> None:
    """Cancelled ones are dropped from the heap early, or late."""
    timers = Timers(least_dropped=kept)
    fired: list[int] = []
    armed: list[Timer] = []
    waiting: dict[int, float] = {}
    for act, number in story:
        if act == "arm":
            name = len(armed)
            armed.append(timers.at(float(number), lambda name=name: fired.append(name)))  # type: ignore[misc]
            waiting[name] = float(number)
        elif act == "cancel" and armed:
            armed[number % len(armed)].cancel()
            waiting.pop(number % len(armed), None)
        elif act == "fire":
            due = sorted((name for name in waiting if waiting[name] <= number), key=lambda name: (waiting[name], name))
            fired.clear()
            timers.fire(float(number))
            assert fired == due
            for name in due:
                del waiting[name]
        assert len(timers) == len(waiting)
        assert timers.next() == min(waiting.values(), default=None)


def test_a_timer_armed_while_firing_waits_for_the_next_fire() -> None:
    timers = Timers()
    fired: list[str] = []

    def again() -> None:
        fired.append("again")
        timers.at(5.0, again)

    timers.at(5.0, again)
    timers.at(5.0, lambda: fired.append("other"))
    timers.fire(5.0)
    assert fired == ["again", "other"]
    assert timers.next() == 5.0
    timers.fire(5.0)
    assert fired == ["again", "other", "again"]


def test_a_callback_may_cancel_what_is_due_too() -> None:
    timers = Timers()
    fired: list[str] = []
    timers.at(1.0, lambda: second.cancel())
    second = timers.at(2.0, lambda: fired.append("second"))
    timers.fire(2.0)
    assert fired == []
    assert timers.next() is None
    second.cancel()


def test_what_is_cancelled_does_not_pile_up() -> None:
    timers = Timers()
    kept = [timers.at(1e6 + number, lambda: None) for number in range(10)]
    for number in range(10_000):
        timers.at(60.0 + number, lambda: None).cancel()
    assert len(timers) == len(kept)
    assert timers.in_heap <= 2 * len(kept) + 200
