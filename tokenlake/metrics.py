"""Counters of the rules. A metric is declared beside the code that measures it.

A counter only grows; its name is `tokenlake_<noun>_<unit>_total`. Gauges are computed from the state when the metrics
page is read, so they cannot differ from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

__all__ = ["MAX_LABELS", "OTHERS", "Counters", "Metric"]

MAX_LABELS = 64
"""Maximum number of values of one label; all later values are counted together as `OTHERS`."""
OTHERS = "(others)"


class Metric:
    """A counter's name, help text and, if it has one, the name of its label. Two metrics are equal only if they are one
    object; `all()` yields every declared metric."""

    __slots__ = ("help", "label", "name")
    _declared: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, help: str, label: str = "") -> None:
        if name in self._declared:
            raise ValueError(f"metric {name} is declared twice")
        self.name = name
        self.help = help
        self.label = label
        self._declared[name] = self

    @classmethod
    def all(cls) -> Iterator[Metric]:
        """Every declared metric, in order of declaration."""
        return iter(tuple(cls._declared.values()))


class Counters:
    """Values of one node's metrics. A metric that was never counted is 0; the value of a metric with a label is the sum
    over all values of the label."""

    __slots__ = ("_by_label", "_values")

    def __init__(self) -> None:
        self._values: dict[Metric, int] = {}
        self._by_label: dict[Metric, dict[str, int]] = {}

    def add(self, metric: Metric, amount: int = 1) -> None:
        """Grow `metric` by `amount` (not negative)."""
        self._values[metric] = self._values.get(metric, 0) + amount

    def add_for(self, metric: Metric, value: str, amount: int) -> None:
        """Grow `metric`, which has a label, by `amount` (not negative) for that value of the label."""
        counted = self._by_label.setdefault(metric, {})
        if value not in counted and len(counted) >= MAX_LABELS:
            value = OTHERS
        counted[value] = counted.get(value, 0) + amount
        self.add(metric, amount)

    def by_label(self, metric: Metric) -> dict[str, int]:
        """The counts of a metric with a label, by value of the label; a copy."""
        return dict(self._by_label.get(metric, {}))

    def __getitem__(self, metric: Metric) -> int:
        return self._values.get(metric, 0)
