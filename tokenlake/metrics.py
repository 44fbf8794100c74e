"""Counters of the rules. A metric is declared beside the code that measures it.

A counter only grows; it is named `tokenlake_<noun>_<unit>_total`. Gauges are read from the state when asked
for, so they cannot drift from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

__all__ = ["Counters", "Metric"]


class Metric:
    """A counter's name and meaning; identity is the object. `all()` yields every one declared."""

    __slots__ = ("help", "name")
    _declared: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, help: str) -> None:
        if name in self._declared:
            raise ValueError(f"metric {name} is declared twice")
        self.name = name
        self.help = help
        self._declared[name] = self

    @classmethod
    def all(cls) -> Iterator[Metric]:
        """Every declared metric, in order of declaration."""
        return iter(tuple(cls._declared.values()))


class Counters:
    """Values of one node's metrics; a metric never counted reads 0."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[Metric, int] = {}

    def add(self, metric: Metric, amount: int = 1) -> None:
        """Grow `metric` by `amount` (not negative)."""
        self._values[metric] = self._values.get(metric, 0) + amount

    def __getitem__(self, metric: Metric) -> int:
        return self._values.get(metric, 0)
