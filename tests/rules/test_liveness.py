"""Overdue: from a missed deadline until anything is received."""

from __future__ import annotations

from tokenlake.wire.liveness import Liveness


def overdue_after(side: Liveness, since: float | None = None) -> bool:
    """Miss a deadline of a request that was sent at `since`."""
    if since is None:
        side.deadline_missed()
    else:
        side.deadline_missed(since)
    return side.overdue


def test_overdue_until_anything_is_received() -> None:
    side = Liveness()
    assert not side.overdue
    assert overdue_after(side)
    side.heard(3.0)
    assert (side.overdue, side.heard_at) == (False, 3.0)
    assert overdue_after(side), "the next missed deadline counts again"


def test_bytes_after_the_request_prove_life() -> None:
    side = Liveness()
    side.heard(2.0)
    assert not overdue_after(side, since=1.0)
    assert overdue_after(side, since=2.5)
    assert overdue_after(side, since=1.0), "only received bytes end it"
