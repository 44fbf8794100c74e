"""The adapter's counts on the metrics page of LMCache's server. prometheus-client is imported only where the server
has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenlake_client.engines.common.page_counts import COUNTS, PageCounters, documentation

PREFIX = "lmcache:tokenlake_"
"""The beginning of the names of all metrics."""


class AdapterSeries:
    """A collector of prometheus-client, which reads the counts of one adapter."""

    def __init__(self, counters: PageCounters) -> None:
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
            if count.metric not in families:
                families[count.metric] = CounterMetricFamily(
                    PREFIX + count.metric, documentation(count), labels=list(count.labels)
                )
            families[count.metric].add_metric(list(count.labels.values()), getattr(counts, name))
        yield from families.values()

    def close(self) -> None:
        """Remove the series."""
        self._registry.unregister(self)
