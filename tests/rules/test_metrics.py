"""Metrics: names, help, counting."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

import tokenlake
from tokenlake.metrics import BOUNDS_S, MAX_LABELS, OTHERS, Counters, Metric

NAMES = {
    "counter": re.compile(r"tokenlake(_[a-z]+)+_(?P<unit>[a-z]+)_total"),
    "histogram": re.compile(r"tokenlake(_[a-z]+)+_(?P<unit>seconds)"),
    "gauge": re.compile(r"tokenlake(_[a-z]+)+(?<!_total)"),
}
UNITS = {
    "bytes",
    "callbacks",
    "engines",
    "calls",
    "changes",
    "commits",
    "demotions",
    "fetches",
    "lookups",
    "markers",
    "messages",
    "milliseconds",
    "misses",
    "peers",
    "promotions",
    "reads",
    "reports",
    "requests",
    "segments",
    "sessions",
    "timeouts",
    "tokens",
    "waits",
}
"""The units of counters. A test fails for a new unit until it is added here."""


def declared() -> list[Metric]:
    """Every metric of the rules; importing a module declares its own."""
    for module in pkgutil.walk_packages(tokenlake.__path__, "tokenlake."):
        importlib.import_module(module.name)
    return list(Metric.all("counter", "histogram", "gauge"))


def test_every_name_has_noun_and_unit() -> None:
    metrics = declared()
    assert len(metrics) > 10
    for metric in metrics:
        found = NAMES[metric.kind].fullmatch(metric.name)
        assert found, f"{metric.name} is no name of a {metric.kind}, such as tokenlake_<noun>_<unit>_total"
        assert metric.kind != "counter" or found["unit"] in UNITS, f"{metric.name} counts {found['unit']}"
        assert metric.help


def test_a_name_is_declared_once() -> None:
    taken = declared()[0].name
    with pytest.raises(ValueError, match=f"{taken} is declared twice"):
        Metric(taken, "again")


def test_a_counter_starts_at_zero_and_grows() -> None:
    first, second = [each for each in declared() if each.kind == "counter" and not each.labels][:2]
    counters = Counters()
    assert counters[first] == 0
    counters.add(first)
    counters.add(first, 5)
    assert (counters[first], counters[second], Counters()[first]) == (6, 0, 0)


def test_the_first_label_is_bounded() -> None:
    """The first label has a bounded number of values and a sum."""
    metric = next(each for each in declared() if len(each.labels) == 2)
    counters = Counters()
    for number in range(MAX_LABELS + 3):
        counters.add_for(metric, 10, f"tenant {number}", "x")
    counters.add_for(metric, 1, "tenant 1", "x")
    counters.add_for(metric, 2, "tenant 1", "y")
    counted = counters.by_labels(metric)
    assert len({first for first, _ in counted}) == MAX_LABELS + 1
    assert (counted["tenant 1", "x"], counted["tenant 1", "y"], counted[OTHERS, "x"]) == (11, 2, 30)
    assert counters[metric] == sum(counted.values())
    assert Counters().by_labels(metric) == {}


def test_a_histogram_counts_each_duration_in_one_bucket() -> None:
    metric = next(each for each in declared() if each.kind == "histogram")
    counters = Counters()
    observed = counters.histogram(metric)
    assert counters.histogram(metric) is observed
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.001, BOUNDS_S[-1], BOUNDS_S[-1] + 1):
        observed.add(seconds)
    assert observed.counts == [2, 1, *[0] * (len(BOUNDS_S) - 3), 1, 1]
    assert observed.total_s == pytest.approx(2.001 * BOUNDS_S[0] + 2 * BOUNDS_S[-1] + 1)
