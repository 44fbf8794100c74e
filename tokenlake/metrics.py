"""Counters, histograms and gauges. A metric is declared beside the code that measures it.

A counter only grows; its name is `tokenlake_<noun>_<unit>_total`. A histogram counts durations, with the same buckets
for all histograms. Gauges are computed from the state when the metrics page is read, so they cannot differ from it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

MAX_LABELS = 64
"""Maximum number of values of a metric's first label; all later values are counted together as `OTHERS`. Further labels
have values from a fixed list, such as an enum."""
OTHERS = "(others)"
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""Upper bounds of the buckets of all histograms, in seconds; the last one is the limit of a fetch."""


class Metric:
    """A metric's name, help text, kind and the names of its labels. Two metrics are equal only if they are one object;
    `all()` yields every declared metric."""

    __slots__ = ("help", "kind", "labels", "name")
    _declared: ClassVar[dict[str, Metric]] = {}

    def __init__(
        self, name: str, help: str, *labels: str, kind: Literal["counter", "gauge", "histogram"] = "counter"
    ) -> None:
        if name in self._declared:
            raise ValueError(f"metric {name} is declared twice")
        self.name = name
        self.help = help
        self.labels = labels
        self.kind = kind
        self._declared[name] = self

    @classmethod
    def all(cls, *kinds: str) -> Iterator[Metric]:
        """Every declared metric of these kinds, in order of declaration; without `kinds` every counter."""
        return iter([each for each in cls._declared.values() if each.kind in (kinds or ("counter",))])


class Level(NamedTuple):
    """The value of one series of a gauge."""

    metric: Metric
    values: tuple[str, ...]
    """The values of the metric's labels."""
    value: float


class Observed:
    """The durations that one histogram has counted."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """Number of durations by bucket: up to each bound and above the one before; the last one has no bound."""
        self.total_s = 0.0
        """Sum of the durations in seconds."""

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class Counters:
    """Values of one node's counters and histograms. A metric that was never counted is 0; the value of a counter with
    labels is the sum over all values of the labels."""

    __slots__ = ("_by_labels", "_firsts", "_observed", "_values")

    def __init__(self) -> None:
        self._values: dict[Metric, int] = {}
        self._by_labels: dict[Metric, dict[Sequence[str], int]] = {}
        self._firsts: dict[Metric, set[str]] = {}
        """The values of the first label of each metric, at most `MAX_LABELS`."""
        self._observed: dict[Metric, Observed] = {}

    def add(self, metric: Metric, amount: int = 1) -> None:
        """Grow `metric`, which has no labels, by `amount` (not negative)."""
        self._values[metric] = self._values.get(metric, 0) + amount

    def add_for(self, metric: Metric, amount: int, *values: str) -> None:
        """Grow `metric`, which has labels, by `amount` (not negative) for these values of its labels, in order."""
        try:
            self._by_labels[metric][values] += amount
        except KeyError:
            firsts = self._firsts.setdefault(metric, set())
            if values[0] not in firsts and len(firsts) >= MAX_LABELS:
                values = (OTHERS, *values[1:])
            else:
                firsts.add(values[0])
            counted = self._by_labels.setdefault(metric, {})
            counted[values] = counted.get(values, 0) + amount

    def histogram(self, metric: Metric) -> Observed:
        """The durations that this histogram has counted; the caller adds to them."""
        return self._observed.setdefault(metric, Observed())

    def by_labels(self, metric: Metric) -> dict[Sequence[str], int]:
        """The counts of a metric with labels, by the values of the labels; a copy."""
        return dict(self._by_labels.get(metric, {}))

    def __getitem__(self, metric: Metric) -> int:
        return sum(self._by_labels.get(metric, {}).values()) if metric.labels else self._values.get(metric, 0)
