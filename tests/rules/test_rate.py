"""Rates against known streams."""

from __future__ import annotations

import math

from tokenlake.rate import Rate

HALF_LIFE_S = 2.0


def test_the_rate_of_a_steady_stream() -> None:
    rate = Rate(HALF_LIFE_S)
    for step in range(1000):
        rate.add(5.0, step * 0.1)
    assert math.isclose(rate.at(99.95), 50.0, rel_tol=0.02)
    assert math.isclose(rate.at(99.9 + 4 * HALF_LIFE_S), rate.at(99.9) / 16)


def test_a_set_rate_holds_and_then_decays() -> None:
    rate = Rate(HALF_LIFE_S)
    rate.add(1e9, 0.0)
    rate.set(8.0, until=1.0)
    assert math.isclose(rate.at(0.5), 8.0)
    assert math.isclose(rate.at(1.0 + HALF_LIFE_S), 4.0)


def test_an_amount_adds_to_a_set_rate() -> None:
    rate = Rate(HALF_LIFE_S)
    rate.set(8.0, until=1.0)
    rate.add(HALF_LIFE_S / math.log(2), 0.5)
    assert math.isclose(rate.at(0.75), 9.0)
    assert math.isclose(rate.at(1.0 + HALF_LIFE_S), 4.5)
