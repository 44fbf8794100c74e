"""The queue of spans, and spans of a daemon whose engines send what no client sends or end without a word."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from tests.robustness.live import LAYOUT, PATIENT, PATIENT_S, Prompt, daemons, read, store, wait_told, wait_until
from tests.server.raw import Raw
from tests.server.tracing_scene import Caller, named, traced_daemons
from tokenlake.trace import CONTEXT_BYTES, NO_TRACE, checked, parse_traceparent, traceparent_of
from tokenlake.wire import Code, engine
from tokenlake_client import MatchOptions, Pool
from tokenlake_server.tracing.export import BATCH, MAX_QUEUED, Export
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.collector import Collector, Span

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[Cluster]:
    with traced_daemons(1, collector.url) as cluster:
        yield cluster


def test_a_full_queue_drops_spans_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector takes connections and never answers."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        export = Export(f"http://127.0.0.1:{silent.getsockname()[1]}", "node", "cluster")
        for _ in range(MAX_QUEUED + 2 * BATCH):
            export.tracer.start_span("span").end()
        counts = {level.values[0]: level.value for level in export.gauges()}
        # The thread of the exporter has taken one batch at most.
        assert counts["dropped"] >= BATCH
        assert not counts["exported"]
        export.close()


def test_spans_that_are_left_are_sent_at_the_end(collector: Collector) -> None:
    """By default spans wait for five seconds."""
    caller = Caller()
    with daemons(1, otlp=collector.url) as cluster:
        with cluster.connect(0, LAYOUT) as pool:
            keys = pool.prefix(Prompt(1, 2).tokens).keys
            pool.match(keys, MatchOptions(traceparent=caller.traceparent), deadline_s=PATIENT_S).release()
        assert cluster.nodes[0].stop() == 0
    caller.wait(collector, match=1)


def test_contexts_that_no_client_sends_change_nothing(cluster: Cluster, collector: Collector) -> None:
    before = len(collector.spans)
    with cluster.connect(0, LAYOUT) as pool:
        channel = pool.link.channel
        for length in range(CONTEXT_BYTES + 1):
            channel.tell(engine.Traced(1 << 30, bytes(length)))
        for number in range(6000):
            channel.tell(engine.Traced(number + (1 << 20), b"\xff" * CONTEXT_BYTES))
        prompt = Prompt(2, 3)
        assert set(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == 3
    assert len(collector.spans) == before
    assert cluster.nodes[0].running


def test_an_engine_that_is_gone_ends_its_spans(cluster: Cluster, collector: Collector) -> None:
    """A lease that it held, and slots that it had reserved."""
    caller = Caller()
    keys = os.urandom(64)
    with Raw.joined(cluster.nodes[0].socket) as raw:
        raw.send(engine.Traced(5, parse_traceparent(caller.traceparent)))
        raw.send(engine.Match(5, keys, PATIENT_S, request="ends"))
        matched = raw.reply()
        assert isinstance(matched, engine.Matched)
        assert matched.lease
        raw.send(engine.Prepare(6, keys, 0, "ends"))
        prepared = raw.reply()
        assert isinstance(prepared, engine.Prepared)
        assert prepared.write
    spans = caller.wait(collector, match=1, lease=1, write=1)
    assert named(spans, "match")[0].outcome == "miss"
    assert named(spans, "write")[0].outcome == "given up"
    assert named(spans, "lease")[0].outcome == "given back"


def test_ranks_belong_to_the_trace_of_their_scheduler(collector: Collector) -> None:
    """One process matches and reserves; another one of the session fetches, and fills a part of each slot."""
    caller, prompt = Caller(), Prompt(6, 4)
    with traced_daemons(2, collector.url) as cluster, cluster.connect(1, LAYOUT) as scheduler:
        session = scheduler.engine.session
        with Pool.connect(cluster.nodes[1].socket, LAYOUT, session=session, deadlines=PATIENT) as rank:
            keys = scheduler.prefix(prompt.tokens).keys
            with cluster.connect(0, LAYOUT) as other:
                assert set(other.store_all(keys[:2], prompt.fill)) == {Code.COMMITTED}
            wait_told(cluster)
            options = MatchOptions(request="ranks", traceparent=caller.traceparent)
            lease = scheduler.match(keys, options, deadline_s=PATIENT_S)
            assert lease.hits == 2
            with rank.engine.attach(*lease.ids) as attached:
                assert prompt.wrong(attached.fetch(deadline_s=PATIENT_S)) == 0
            lease.release()
            reservation = scheduler.engine.reserve(keys[2:], 2, request="ranks")
            for pool, shards in ((rank, 1), (scheduler, 2)):
                write = pool.engine.attach_write(reservation.id)
                for at, slot in write.slots:
                    prompt.fill(2 + at, slot)
                write.commit(shards)
                write.leave()
            reservation.release()
        spans = caller.wait(collector, match=1, fetch=1, transfer=1, send=1, lease=1, write=1)
    [write_span], [fetch] = named(spans, "write"), named(spans, "fetch")
    assert {write_span.parent, fetch.parent} == {caller.span}
    assert (write_span.outcome, write_span.attributes["tokenlake.segments.committed"]) == ("committed", 2)


def test_a_read_from_disk_is_a_transfer(collector: Collector, tmp_path: Path) -> None:
    caller, prompt = Caller(), Prompt(5, 4)
    (tmp_path / "disk").mkdir(mode=0o700)
    with traced_daemons(1, collector.url, disk=f"{tmp_path / 'disk'}:64MiB") as cluster:
        node = cluster.nodes[0]
        node.wait_disk()
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, prompt)
        assert node.stop() == 0
        node.start()
        cluster.wait_ready()
        node.wait_disk()
        with cluster.connect(0, LAYOUT) as pool:
            options = MatchOptions(request="disk", traceparent=caller.traceparent)
            keys = pool.prefix(prompt.tokens).keys
            wait_until(lambda: pool.match(keys, deadline_s=PATIENT_S).hits == prompt.segments, "the table is read")
            with pool.match(keys, options, deadline_s=PATIENT_S) as lease:
                assert prompt.wrong(lease.fetch(deadline_s=PATIENT_S)) == 0
        spans = caller.wait(collector, match=1, fetch=1, transfer=1, lease=1)
    transfer: Span = named(spans, "transfer")[0]
    assert transfer.attributes["tokenlake.source"] == "disk 0"
    assert transfer.attributes["tokenlake.bytes"] == prompt.segments * LAYOUT.segment_bytes
    assert named(spans, "lease")[0].attributes["tokenlake.tokens.supplied.disk"] == len(prompt.tokens)


def test_a_context_keeps_its_text() -> None:
    text = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-03"
    assert traceparent_of(parse_traceparent(text)) == text
    assert traceparent_of(NO_TRACE) == ""
    assert checked(parse_traceparent(text)[:-1]) == NO_TRACE
