"""One trace over vLLM, its daemon and another one: vLLM's own span and the pool's lie below that of vLLM's client."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from tests.engines.vllm.conftest import PATIENT_NODES, pool_of, prompt
from tests.engines.vllm.forked import ForeignBackend, ForkedEngine
from tests.engines.vllm.spoiling import tracebacks
from tests.robustness.live import wait_told
from tests.server.tracing_scene import DELAY, Caller, named
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.collector import Collector
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", **DELAY}
TOKENS = 1000
HOSTILE: list[Any] = [
    {"traceparent": "0" * 10_240},
    {"traceparent": "99-zz"},
    {"tracestate": "a=b"},
    {},
    {"traceparent": ""},
]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in DELAY.items():
            patch.setenv(name, value)
        with Cluster(3, "128MiB", "16MiB", otlp=collector.url, **PATIENT_NODES) as cluster:
            yield cluster


@pytest.mark.parametrize("kind", [ForkedEngine, ForeignBackend])
def test_one_tree_over_engine_daemon_and_peer(
    kind: type[ForkedEngine], traced: Cluster, collector: Collector, model: Path, tmp_path: Path
) -> None:
    """Through both doors: a prompt that one engine stored, and another one at another node loads."""
    arguments: dict[str, Any] = {"otlp_traces_endpoint": f"{collector.url}/v1/traces", "disable_log_stats": False}
    tokens = prompt(TOKENS, 1 if kind is ForkedEngine else 2)
    writer, reader = Caller(), Caller()
    engines: list[Engine] = [
        kind(model, tmp_path / f"{at}.log", pool_of(traced.nodes[at]), environment=HTTP, **arguments) for at in (0, 1)
    ]
    try:
        headers = {"traceparent": writer.traceparent}
        expected = engines[0].call("traced", name="writes", prompt=tokens, tokens=8, headers=headers)
        wait_told(traced)
        headers = {"traceparent": reader.traceparent}
        answer = engines[1].call("traced", name="reads", prompt=tokens, tokens=8, headers=headers)
        assert answer == expected
        for number, hostile in enumerate(HOSTILE):
            again = engines[1].call("traced", name=f"hostile{number}", prompt=tokens, tokens=8, headers=hostile)
            assert again == expected
        stored = writer.wait(collector, match=1, write=1)
        assert {each.node for each in named(stored, "write")} == {"node0"}
        spans = reader.wait(collector, match=1, lease=1, fetch=1, transfer=1, send=1)
        supplied = named(spans, "lease")[0].attributes["tokenlake.tokens.supplied.fetched"]
        assert isinstance(supplied, int)
        assert supplied > TOKENS // 2
        assert {each.node for each in named(spans, "send")} == {"node0"}

        def of_vllm() -> list[str]:
            return [each.name for each in collector.spans if each.parent == reader.span and not each.node]

        collector.wait_for(lambda spans: bool(of_vllm()), "the span of vLLM itself")
        assert of_vllm() == ["llm_request"]
        names = {str(each.attributes.get("tokenlake.request")) for each in collector.spans}
        assert not [name for name in names if "hostile" in name]
        assert [tracebacks(engine) for engine in engines] == [[], []]
    finally:
        for engine in engines:
            engine.close()


def test_the_extra_changes_no_version_of_vllm() -> None:
    """Its bounds allow what vLLM pins."""
    from packaging.requirements import Requirement

    bounds = [Requirement(each) for each in requires("tokenlake") or ()]
    extra = [each for each in bounds if each.marker is not None and each.marker.evaluate({"extra": "tracing"})]
    names = {each.name for each in extra if each.name.startswith("opentelemetry")}
    if not names:
        pytest.skip("the installed metadata is older than the extra")
    for each in extra:
        if each.name in names:
            assert each.specifier.contains(version(each.name)), each
