"""The connector's counts on vLLM's metrics page, through vLLM's classes for stats."""

from __future__ import annotations

import functools
import inspect
import json
import pickle
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics import loggers
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.deploy.prometheus import OF_VLLM, Engine
from tokenlake_client.engines.vllm import TokenLakeConnector
from tokenlake_client.engines.vllm.counters import COUNTS, PREFIX, TIMES
from tokenlake_client.engines.vllm.stats import TokenLakeStats
from tokenlake_testing.cluster import parse_metrics
from tokenlake_testing.vllm_engine import transfer_of

SOURCE = "vllm:tokenlake_prompt_tokens_total"


class Config:
    """The part of vLLM's configuration that its classes for metrics read."""

    def __init__(self, pool: dict[str, Any] | list[dict[str, Any]]) -> None:
        from vllm.config import KVTransferConfig

        self.kv_transfer_config = KVTransferConfig(**transfer_of(pool))


class Page:
    """A metrics page of its own, with two engines."""

    def __init__(self, connector: Any, pool: dict[str, Any] | list[dict[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        types = {kind: functools.partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)}
        labels: Any = {0: ["m", "0"], 1: ["m", "1"]}
        self.metrics = connector.build_prom_metrics(Config(pool), types, ["model_name", "engine"], labels)

    def series(self) -> dict[str, float]:
        page = parse_metrics(generate_latest(self.registry).decode())
        return {name: value for name, value in page.items() if "_created{" not in name}


def test_every_count_has_a_series_from_the_start() -> None:
    page = Page(TokenLakeConnector, {})
    series = page.series()
    assert set(series.values()) == {0.0}
    for count in COUNTS.values():
        name = count.series(PREFIX).partition("{")[0]
        labels = [f'{label}="{value}"' for label, value in count.labels.items()]
        found = [key for key in series if key.startswith(f"{name}{{") and all(each in key for each in labels)]
        assert len(found) == 2, "one for each engine"
    for name in TIMES:
        assert series[f'vllm:tokenlake_{name}_count{{engine="1",model_name="m"}}'] == 0


def test_vllm_has_the_metrics_of_the_dashboard() -> None:
    """With the labels of the page that stands in for vLLM's."""
    source = inspect.getsource(loggers)
    assert f"labelnames = {json.dumps(list(Engine.LABELS))}" in source
    for name in OF_VLLM:
        assert f'name="{name}"' in source


def test_a_growth_is_added_to_its_engine() -> None:
    page = Page(TokenLakeConnector, {})
    data = {"requests": 2, "tokens_hit_here": 512, "hook_seconds": 0.5, "copy_seconds": [0.002, 0.2]}
    for _ in range(2):
        page.metrics.observe(data, 1)
    grown = {name: value for name, value in page.series().items() if value and "_bucket" not in name}
    assert grown == {
        'vllm:tokenlake_requests_total{engine="1",model_name="m"}': 4,
        f'{SOURCE}{{engine="1",model_name="m",source="this_node"}}': 1024,
        'vllm:tokenlake_hook_seconds_total{engine="1",model_name="m"}': 1.0,
        'vllm:tokenlake_copy_seconds_count{engine="1",model_name="m"}': 4,
        'vllm:tokenlake_copy_seconds_sum{engine="1",model_name="m"}': pytest.approx(0.404),
    }


@pytest.mark.parametrize(
    "data", [{"requests": "many"}, {"unknown": 1}, {"requests": -1}, [], None, {"copy_seconds": [""]}]
)
def test_malformed_data_does_not_end_the_server(data: Any) -> None:
    page = Page(TokenLakeConnector, {})
    page.metrics.observe(data)
    page.metrics.observe({"requests": 1}, 7)
    page.metrics.observe({"requests": 1})
    assert page.series()['vllm:tokenlake_requests_total{engine="0",model_name="m"}'] == 1


def test_metrics_that_cannot_be_made_are_left_out() -> None:
    assert TokenLakeConnector.build_prom_metrics(Config({}), {}, [], {}) is None


def test_vllm_adds_up_the_ranks_and_logs_the_sum() -> None:
    outputs = []
    for data in ({"tokens_loaded": 512, "failures": 1}, {"failures": 2}, None):
        stats = None if data is None else pickle.loads(pickle.dumps(TokenLakeStats(data)))
        transfer = KVConnectorOutput(kv_connector_stats=stats)
        outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=transfer))
    merged = KVOutputAggregator(3).aggregate(outputs)
    assert merged is not None
    assert merged.kv_connector_output is not None
    total: Any = merged.kv_connector_output.kv_connector_stats
    total.aggregate(TokenLakeStats({"requests": 1, "copy_seconds": [0.5]}))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(total.to_dict()))
    log = KVConnectorLogging(Config({}).kv_transfer_config)
    log.observe(sent)
    log.observe(sent)
    lines: list[str] = []
    log.log(lambda text, *values: lines.append(text % values))
    log.log(lambda text, *values: lines.append(text % values))
    assert lines == [
        "KV Transfer metrics: requests=2, tokens_loaded=1024, failures=6, copy_seconds_count=2, copy_seconds_mean=0.5, "
        "copy_seconds_max=0.5"
    ]


def test_stats_can_be_empty_and_reset() -> None:
    stats = TokenLakeConnector.build_kv_connector_stats()
    assert stats.is_empty()
    assert stats.reduce() == {}
    stats.aggregate(TokenLakeStats({"requests": 1}))
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_within_multi_connector() -> None:
    """The process that serves the page has no connector: it makes the classes from the configuration."""
    page = Page(MultiConnector, [{"salt": "a"}, {"salt": "b"}])
    sent = {"TokenLakeConnector": {"requests": 2, "tokens_hit_remote": 256}}
    page.metrics.observe(sent, 0)
    assert page.series()[f'{SOURCE}{{engine="0",model_name="m",source="other_nodes"}}'] == 256
    stats = MultiConnector.build_kv_connector_stats(sent)
    assert stats is not None
    assert stats.reduce() == {"TokenLakeConnector": {"requests": 2, "tokens_hit_remote": 256}}
