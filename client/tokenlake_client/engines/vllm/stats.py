"""The connector's counts on vLLM's metrics page and in its log, as vLLM's classes.

The classes are the same for each way in which the connector serves a model. A side of the connector makes
`TokenLakeStats` of the growth of its `EngineCounters`; vLLM sends the growth as a dict to the process that serves the
metrics page, which makes `TokenLakePromMetrics` without a connector."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tokenlake_client.engines.vllm.counters import (
    BUCKETS_S,
    COUNTS,
    PREFIX,
    TIMES,
    EngineCounters,
    Growth,
    Side,
    merge,
    summary,
)

logger = init_logger("vllm.tokenlake")


_FAMILIES = {
    "prompt_tokens": "prompt tokens by source",
    "kv_hints": "actions of routers in the hints of requests, by outcome",
}
"""The meanings of the metrics of several counts."""


@dataclass
class TokenLakeStats(KVConnectorStats):  # type: ignore[misc]
    """The growth of the counts of one side of the connector, or of several sides together. `data` is a `Growth`."""

    def reset(self) -> None:
        """Forget the growth."""
        self.data: Growth = {}

    def aggregate(self, other: KVConnectorStats) -> TokenLakeStats:
        """Add the growth of another side, or of a later step, to this one."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The growth as numbers for vLLM's log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """True if no count has grown."""
        return not self.data


class TokenLakePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The Prometheus metrics of the declared counts and times. All series exist from the start, with the value 0."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[tuple[int, str], Any] = {}
        families: dict[str, Any] = {}
        for name, count in COUNTS.items():
            labels = count.labels
            if count.metric not in families:
                meaning = _FAMILIES.get(count.metric, count.meaning)
                families[count.metric] = self._counter_cls(
                    name=PREFIX + count.metric,
                    documentation=f"TokenLake: {meaning}.",
                    labelnames=[*labelnames, *labels],
                )
            self._add(name, families[count.metric], list(labels.values()))
        for name, meaning in TIMES.items():
            family = self._histogram_cls(
                name=PREFIX + name, documentation=f"TokenLake: {meaning}.", buckets=BUCKETS_S, labelnames=labelnames
            )
            self._add(name, family, [])

    def _add(self, name: str, family: Any, labels: list[str]) -> None:
        for engine, values in self.per_engine_labelvalues.items():
            self._series[engine, name] = family.labels(*values, *labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a growth to the metrics of engine `engine_idx`. Never raises: an error here would end vLLM's server."""
        try:
            for name, value in transfer_stats_data.items():
                series = self._series.get((engine_idx, name))
                if series is None:
                    continue
                if isinstance(value, list):
                    for sample in value:
                        series.observe(sample)
                else:
                    series.inc(value)
        except Exception as error:
            logger.warning_once("TokenLake: some metrics are missing: %s: %s", type(error).__name__, error)


def stats_of(counters: EngineCounters, role: KVConnectorRole) -> TokenLakeStats | None:
    """The growth of a connector's counts since the last call; None: they have not grown. `role`: vLLM's name of the
    connector's side."""
    if role == KVConnectorRole.SCHEDULER:
        side = Side.SCHEDULER
    else:
        first = get_tensor_model_parallel_rank() == 0 and get_pp_group().is_first_rank
        side = Side.FIRST_RANK if first else Side.OTHER_RANK
    growth = counters.take(side)
    return TokenLakeStats(growth) if growth else None


def sources_of_hit(tokens: int, remote: int) -> dict[CacheHitSource, int]:
    """A hit of `tokens` tokens by vLLM's names of sources, `remote` of them in segments of other nodes. Without the
    zeros."""
    sources = {CacheHitSource.HOST: tokens - remote, CacheHitSource.P2P: remote}
    return {source: count for source, count in sources.items() if count}


def find_by_name(name: str, module: str) -> None:
    """Let vLLM find the connector's class `name` of `module` by its name alone. vLLM does this with the stats of a
    connector within `MultiConnector`, in the process that serves the metrics page."""
    # ValueError: the name is known already.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(name, module, name)
