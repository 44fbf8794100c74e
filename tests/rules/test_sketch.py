"""Space-saving counters against exact counts, and rates against known streams."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tokenlake.hot import Rate, SpaceSaving

HALF_LIFE_S = 2.0
streams = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.floats(0.1, 100.0),
        st.one_of(st.just(0.0), st.floats(0.0, 3.0), st.floats(100.0, 1000.0)),
    ),
    max_size=150,
)


@given(streams, st.integers(1, 12))
def test_counts_are_within_the_bound(stream: list[tuple[int, float, float]], counters: int) -> None:
    sketch: SpaceSaving[int] = SpaceSaving(counters, HALF_LIFE_S)
    exact: dict[int, float] = {}
    now = 0.0
    for item, amount, pause in stream:
        now += pause
        exact = {each: count * 2 ** (-pause / HALF_LIFE_S) for each, count in exact.items()}
        exact[item] = exact.get(item, 0.0) + amount
        sketch.add(item, amount, now)
        total = sum(exact.values())
        slack = 1e-6 * (total + 1e-9)
        heavy = {each.item: each for each in sketch.heaviest(now)}
        assert len(heavy) <= counters
        for each in heavy.values():
            assert each.count - each.error - slack <= exact[each.item] <= each.count + slack
            assert each.error <= total / counters + slack
        assert all(each in heavy for each, count in exact.items() if count > total / counters + slack)


def test_a_hot_item_among_many_cold_ones_is_counted() -> None:
    sketch: SpaceSaving[int] = SpaceSaving(16, HALF_LIFE_S)
    for step in range(2000):
        now = step * 0.05
        sketch.add(10_000 + step, 1.0, now)
        if step % 2:
            sketch.add(7, 1.0, now)
    assert 9.0 < sketch.rate(7, now) < 11.0
    assert max(sketch.heaviest(now), key=lambda each: each.count).item == 7


def test_a_forgotten_item_starts_at_zero() -> None:
    sketch: SpaceSaving[str] = SpaceSaving(2, HALF_LIFE_S)
    sketch.add("a", 8.0, 0.0)
    sketch.forget("a")
    assert sketch.rate("a", 0.0) == 0.0
    sketch.add("a", 1.0, 0.0)
    assert sketch.count("a", 0.0) == 1.0


def test_counts_decay_in_any_order_of_queries() -> None:
    sketch: SpaceSaving[str] = SpaceSaving(4, HALF_LIFE_S)
    sketch.add("a", 1e6, 0.0)
    assert sketch.count("a", 65 * HALF_LIFE_S) < 1e-9
    assert sketch.rate("a", 200 * HALF_LIFE_S) < 1e-9


def test_the_rate_of_a_young_stream() -> None:
    sketch: SpaceSaving[str] = SpaceSaving(2, HALF_LIFE_S)
    for step in range(10):
        sketch.add("a", 3.0, 100.0 + step * 0.1)
    assert 28.0 < sketch.rate("a", 101.0) < 32.0


def test_counts_do_not_overflow_in_years() -> None:
    sketch: SpaceSaving[str] = SpaceSaving(4, HALF_LIFE_S)
    for year in range(50):
        sketch.add("a", 1.0, year * 3e7)
    (heavy,) = sketch.heaviest(49 * 3e7)
    assert math.isclose(heavy.count, 1.0)


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
