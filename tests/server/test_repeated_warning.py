"""When a condition that lasts is logged."""

from tokenlake_server.loop.repeated_warning import MOST_REPEAT_S, REPEAT_S, RepeatedWarning


def times(warning: RepeatedWarning, kind: object, until: int, start: int = 0) -> list[int]:
    return [now for now in range(start, until) if warning.should_log(kind, now)]


def test_how_often_a_condition_is_logged() -> None:
    """A condition is logged after a time and then less and less often."""
    logged = times(RepeatedWarning(10), "down", 5000)
    assert logged[:4] == [10, 10 + REPEAT_S, 10 + 3 * REPEAT_S, 10 + 7 * REPEAT_S]
    assert logged[-1] - logged[-2] == MOST_REPEAT_S


def test_a_condition_that_ends_in_time_is_not_logged() -> None:
    warning = RepeatedWarning(10)
    assert not times(warning, "down", 10)
    assert not warning.logged
    assert not warning.should_log(None, 10)
    assert times(warning, "down", 30, 11) == [21]


def test_another_condition_begins_anew() -> None:
    warning = RepeatedWarning()
    assert times(warning, "down", 5) == [0]
    assert times(warning, "refused", 10, 5) == [5]
    assert warning.logged
    assert warning.lasted(9) == 4
