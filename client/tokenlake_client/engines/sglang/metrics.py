"""The backend's counts on SGLang's metrics page. prometheus-client is imported only where SGLang collects metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenlake_client.engines.common.page_counts import COUNTS, PageCounters, documentation

PREFIX = "sglang:tokenlake_"
"""The beginning of the names of all metrics."""
LABELS = ("model_name", "tp_rank", "pp_rank", "dp_rank")
_families: dict[str, Any] = {}
"""By metric. A process has one of each name, and SGLang may attach a backend again."""


class StorageSeries:
    """Adds the growth of the counts of one rank to the metrics of SGLang's process. For one thread."""

    def __init__(self, counters: PageCounters, labels: Mapping[str, object]) -> None:
        """All series exist from the start, with the value 0. `labels`: the values of `LABELS`."""
        from prometheus_client import Counter

        self._counters = counters
        self._series: dict[str, Any] = {}
        values = [str(labels[name]) for name in LABELS]
        for name, count in COUNTS.items():
            if count.metric not in _families:
                _families[count.metric] = Counter(PREFIX + count.metric, documentation(count), (*LABELS, *count.labels))
            self._series[name] = _families[count.metric].labels(*values, *count.labels.values())

    def publish(self) -> None:
        """Add the growth since the last call."""
        for name, grown in self._counters.take().items():
            self._series[name].inc(grown)
