"""Metrics: names, help, counting."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

import tokenlake
from tokenlake.metrics import MAX_LABELS, OTHERS, Counters, Metric

NAME = re.compile(r"tokenlake(_[a-z]+)+_(?P<unit>[a-z]+)_total")
UNITS = {
    "bytes",
    "callbacks",
    "calls",
    "changes",
    "claims",
    "commits",
    "demotions",
    "fetches",
    "lookups",
    "messages",
    "misses",
    "peers",
    "promotions",
    "reads",
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
    return list(Metric.all())


def test_every_name_has_noun_and_unit() -> None:
    metrics = declared()
    assert len(metrics) > 10
    for metric in metrics:
        found = NAME.fullmatch(metric.name)
        assert found, f"{metric.name} is not tokenlake_<noun>_<unit>_total"
        assert found["unit"] in UNITS, f"{metric.name} counts {found['unit']}"
        assert metric.help


def test_a_name_is_declared_once() -> None:
    taken = declared()[0].name
    with pytest.raises(ValueError, match=f"{taken} is declared twice"):
        Metric(taken, "again")


def test_a_counter_starts_at_zero_and_grows() -> None:
    first, second = declared()[:2]
    counters = Counters()
    assert counters[first] == 0
    counters.add(first)
    counters.add(first, 5)
    assert (counters[first], counters[second], Counters()[first]) == (6, 0, 0)


def test_a_label_has_a_bounded_number_of_values_and_a_sum() -> None:
    metric = next(each for each in declared() if each.label)
    counters = Counters()
    for number in range(MAX_LABELS + 3):
        counters.add_for(metric, f"tenant {number}", 10)
    counters.add_for(metric, "tenant 1", 1)
    counted = counters.by_label(metric)
    assert len(counted) == MAX_LABELS + 1
    assert (counted["tenant 0"], counted["tenant 1"], counted[OTHERS]) == (10, 11, 30)
    assert counters[metric] == sum(counted.values())
    assert Counters().by_label(metric) == {}
