"""Declarations of counts: each is a field of a dataclass, with its meaning and its metric."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Count:
    """The declaration of a count. `meaning` is a phrase without a final dot."""

    meaning: str
    metric: str
    """The name of the metric between the prefix of the integration and `_total`."""
    source: str = ""
    """The value of the metric's label `source`; empty: the metric has no such label."""

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the time series, beside the engine's own."""
        return {"source": self.source} if self.source else {}

    def series(self, prefix: str) -> str:
        """The time series on the metrics page of an integration whose metrics have this prefix."""
        told = ",".join(f'{name}="{value}"' for name, value in self.labels.items())
        return f"{prefix}{self.metric}_total{{{told}}}" if told else f"{prefix}{self.metric}_total"


AnyCount = TypeVar("AnyCount", bound=Count)


def declared(counts: type[Any], kind: type[AnyCount]) -> Mapping[str, AnyCount]:
    """The declarations of all counts of a dataclass, by name. `kind`: their class."""
    hints = typing.get_type_hints(counts, include_extras=True)
    found = {each.name: hints[each.name].__metadata__[0] for each in dataclasses.fields(counts)}
    assert all(isinstance(each, kind) for each in found.values())
    return found
