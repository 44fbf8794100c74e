"""Reading requests is shared by tenants."""

from __future__ import annotations

import pytest

from tokenlake_query.pace import SHARE, Pace

MS = 1_000_000


def test_threads_of_a_tenant_share_one_processor() -> None:
    """32 threads that each worked for 2 ms pause until all of them could have worked one after the other."""
    pace = Pace(lambda: 10 * MS)
    pauses = [pace.spend("red", 2 * MS) for _ in range(32)]
    assert pauses == pytest.approx([0.002 * number for number in range(32)])


def test_a_tenant_beside_another_has_its_share() -> None:
    now = 0
    pace = Pace(lambda: now)
    pace.spend("blue", 1000)
    spent = 0
    while now < 1_000 * MS:
        now += MS
        spent += MS
        now += int(pace.spend("red", MS) * 1e9)
    assert spent == pytest.approx(SHARE / 2 * now, rel=0.1)
    assert not pace.spend("blue", 1000), "the other tenant does not pause"


def test_idle_tenants_are_forgotten() -> None:
    now = 10 * MS
    pace = Pace(lambda: now)
    pace.spend("blue", 1000)
    now += 11_000 * MS
    assert [pace.spend("red", 2 * MS) for _ in range(2)] == pytest.approx([0, 0.002]), "the price of a tenant alone"
