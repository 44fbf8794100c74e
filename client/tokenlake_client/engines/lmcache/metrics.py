"""The adapter's counts on the metrics page of LMCache's server. prometheus-client is imported only where the server
has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenlake_client.engines.sglang.counters import COUNTS, StorageCounters

PREFIX = "lmcache:tokenlake_"
"""The beginning of the names of all metrics."""
HERE = {
    "SGLang's host memory": "LMCache's memory",
    "SGLang's": "the adapter's",
    "SGLang": "LMCache",
    "pages": "objects",
}


def of_objects(text: str) -> str:
    """A text about the pages of SGLang's storage backend as one about LMCache's objects."""
    for theirs, ours in HERE.items():
        text = text.replace(theirs, ours)
    return text


class AdapterSeries:
    """A collector of prometheus-client, which reads the counts of one adapter."""

    def __init__(self, counters: StorageCounters) -> None:
        """Adds itself to the registry of this process. Raises ImportError."""
        from prometheus_client import REGISTRY

        self._counters = counters
        self._registry = REGISTRY
        REGISTRY.register(self)

    def collect(self) -> Iterator[Any]:
        """prometheus-client's hook: the series with their values."""
        from prometheus_client.core import CounterMetricFamily

        counts = self._counters.read()
        families: dict[str, Any] = {}
        for name, count in COUNTS.items():
            meaning = "tokens of lookups by what was found" if count.source else of_objects(count.meaning)
            family = families.get(count.metric)
            if family is None:
                labels = ["source"] if count.source else []
                family = families[count.metric] = CounterMetricFamily(
                    PREFIX + count.metric, f"TokenLake: {meaning}.", labels=labels
                )
            family.add_metric([count.source] if count.source else [], getattr(counts, name))
        yield from families.values()

    def close(self) -> None:
        """Remove the series."""
        self._registry.unregister(self)
