"""Timers against a sorted list."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.timers import KEPT_CANCELLED, Timer, Timers

acts = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("fire"), st.integers(0, 20)),
)


@pytest.mark.parametrize("cancelled", [0, KEPT_CANCELLED])
@given(story=st.lists(acts, max_size=40))
def test_due_timers_fire_once_in_order(cancelled: int, story: list[tuple[str, int]]) -> None:
    """In some runs cancelled timers are never removed; in others they are removed at the first cancellation."""
    timers = Timers()
    for _ in range(cancelled):
        timers.at(1e9, lambda: None).cancel()
    fired: list[int] = []
    started: list[Timer] = []
    waiting: dict[int, float] = {}
    for act, number in story:
        if act == "set":
            name = len(started)
            started.append(timers.at(float(number), lambda name=name: fired.append(name)))  # type: ignore[misc]
            waiting[name] = float(number)
        elif act == "cancel" and started:
            started[number % len(started)].cancel()
            waiting.pop(number % len(started), None)
        elif act == "fire":
            due = sorted((name for name in waiting if waiting[name] <= number), key=lambda name: (waiting[name], name))
            fired.clear()
            timers.fire(float(number))
            assert fired == due
            for name in due:
                del waiting[name]
        assert len(timers) == len(waiting)
        assert timers.next() == min(waiting.values(), default=None)


def test_a_timer_set_while_firing_waits_for_the_next_fire() -> None:
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


def test_a_callback_may_cancel_a_timer_that_is_due() -> None:
    timers = Timers()
    fired: list[str] = []
    timers.at(1.0, lambda: second.cancel())
    second = timers.at(2.0, lambda: fired.append("second"))
    timers.fire(2.0)
    assert fired == []
    assert timers.next() is None
    second.cancel()


def test_cancelled_timers_do_not_pile_up() -> None:
    timers = Timers()
    kept = [timers.at(1e6 + number, lambda: None) for number in range(10)]
    before = _timers_in_memory()
    for number in range(10_000):
        timers.at(60.0 + number, lambda: None).cancel()
    assert len(timers) == len(kept)
    assert _timers_in_memory() - before <= len(kept) + 2 * KEPT_CANCELLED


def _timers_in_memory() -> int:
    # isinstance() reads the attribute __class__ of each object, and torch's deprecated objects warn when it is read.
    return sum(type(each) is Timer for each in gc.get_objects())


def test_one_timer_at_a_time() -> None:
    timers, called = Timers(), []
    for number, deadline in enumerate((2.0, 1.0, 1.0, 3.0)):
        timers.at(deadline, lambda number=number: called.append(number))  # type: ignore[misc]
    timers.at(0.5, lambda: called.append(9)).cancel()
    for _ in range(4):
        timers.fire_next(2.0)
    assert called == [1, 2, 0]
    assert timers.next() == 3.0
    assert len(timers) == 1
