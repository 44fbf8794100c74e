"""One trace over an engine of transformers, its daemon and others: the spans of the program, of the engine, of the
daemons, and of queries that are shipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests.engines.models import SEGMENT, prompt
from tests.engines.test_shipping import READER, engine_at, generate, put
from tests.query.scene import serving
from tests.server.tracing_scene import DELAY, Caller, check_tree, named
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.collector import Collector, Span

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in DELAY.items():
            patch.setenv(name, value)
        with serving(3, "64MiB", otlp=collector.url) as cluster:
            yield cluster


@pytest.fixture
def provider(collector: Collector) -> Iterator[TracerProvider]:
    """The tracer provider of a program, in place of that of the API for one test."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{collector.url}/v1/traces")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_TRACER_PROVIDER", provider)
        yield provider
    provider.shutdown()


def of_trace(collector: Collector, trace_id: str, *names: str) -> list[Span]:
    """The spans of a trace, once there is one of each of these names."""

    def there(spans: list[Span]) -> bool:
        return set(names) <= {each.name.removeprefix("tokenlake.") for each in spans if each.trace == trace_id}

    return [each for each in collector.wait_for(there, str(names)) if each.trace == trace_id]


def test_one_tree_from_the_program_to_the_peer(
    traced: Cluster, collector: Collector, provider: TracerProvider, model: Any
) -> None:
    """The engine takes the present span of the program, and makes its own with the program's provider."""
    tokens = prompt(6 * SEGMENT, 1)
    put(traced, model, [tokens])
    with engine_at(traced, READER, model, mode="fetch") as engine:
        with provider.get_tracer("program").start_as_current_span("chat") as root:
            engine.prefill([*tokens, 2], request="traced prefill")
        assert engine.flush(30)
    names = ("chat", "prefill", "match", "lookup", "fetch", "transfer", "send", "lease")
    spans = of_trace(collector, f"{root.get_span_context().trace_id:032x}", *names)
    [chat] = [each for each in spans if each.name == "chat"]
    [prefill] = named(spans, "prefill")
    assert prefill.parent == chat.id
    assert prefill.attributes["tokenlake.tokens.loaded"] == len(tokens)
    below = {each.parent for name in ("match", "fetch", "lease") for each in named(spans, name)}
    assert below == {prefill.id}
    check_tree([each for each in spans if each is not chat], chat.id)


def test_the_queries_of_a_request_are_one_span(
    traced: Cluster, collector: Collector, provider: TracerProvider, model: Any
) -> None:
    tokens, caller = prompt(6 * SEGMENT + 3, 2), Caller()
    put(traced, model, [tokens])
    expected, _ = generate(model.generate, [tokens])
    with engine_at(traced, READER, model) as engine:
        found, _ = generate(engine.generate, [tokens], request="ships", traceparent=caller.traceparent)
        assert found == expected
        assert engine.counts.tokens_shipped
    spans = of_trace(collector, caller.trace, "generate", "query", "match", "lease")
    [whole], [query] = named(spans, "generate"), named(spans, "query")
    assert (whole.parent, query.parent) == (caller.span, whole.id)
    assert query.attributes["tokenlake.queries"] == 2 * (1 + 12)  # layers, times the rest of the prompt and the steps
    sent = query.attributes["tokenlake.bytes.sent"]
    assert isinstance(sent, int)
    assert sent > 0
    supplied = [each.attributes.get("tokenlake.tokens.supplied.shipped") for each in named(spans, "lease")]
    assert 6 * SEGMENT in supplied


@pytest.mark.parametrize("traceparent", [None, "0" * 10_240, "00-zz"])
def test_a_program_without_a_trace_has_no_spans(
    traced: Cluster, collector: Collector, provider: TracerProvider, model: Any, traceparent: str | None
) -> None:
    tokens = prompt(4 * SEGMENT, 3)
    with engine_at(traced, READER, model, mode="fetch") as engine:
        engine.prefill([*tokens, 2], request="untraced", traceparent=traceparent)
        assert engine.flush(30)
        caller = Caller()
        engine.prefill([*tokens, 2], request="last", traceparent=caller.traceparent)
    caller.wait(collector, match=1, lease=1)
    assert "untraced" not in {each.attributes.get("tokenlake.request") for each in collector.spans}
