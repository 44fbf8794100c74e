"""Ghosts: how long and how many."""

from __future__ import annotations

import pytest

from tests.rules.eviction_scene import key_of
from tokenlake.memory.eviction import records
from tokenlake.memory.eviction.records import GHOST_S, GHOSTS_EACH, Ghosts, Record


def add(ghosts: Ghosts, name: object, now: float, segments: int = 10) -> int:
    """Add a ghost; how many were forgotten."""
    return len(ghosts.add(key_of(name), Record(now), now, segments))


def test_ghosts_are_forgotten_after_a_while() -> None:
    """A few at a time, the oldest first."""
    ghosts = Ghosts()
    for number in range(90):
        assert add(ghosts, number, float(number)) == 0
    assert list(ghosts) == [key_of(number) for number in range(90)]
    forgotten = [add(ghosts, ("late", number), 200.0 + GHOST_S + number) for number in range(30)]
    assert sum(forgotten) == 90
    assert max(forgotten) == 4
    assert list(ghosts) == [key_of(("late", number)) for number in range(30)]


@pytest.mark.parametrize("segments", [5, 30])
def test_ghosts_are_bounded(monkeypatch: pytest.MonkeyPatch, segments: int) -> None:
    monkeypatch.setattr(records, "LEAST_GHOSTS", 50)
    ghosts = Ghosts()
    for number in range(1000):
        add(ghosts, number, number / 100, segments)
    assert len(ghosts) == max(50, GHOSTS_EACH * segments)
    assert next(reversed(ghosts)) == key_of(999)
