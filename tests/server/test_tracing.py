"""Spans of requests: one tree over engine, daemon and peers, decoded from OTLP; and all that must change nothing."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT_S,
    Prompt,
    all_free,
    daemons,
    store,
    wait_told,
    wait_until,
)
from tests.server.scene import RED, tenants
from tests.server.tracing_scene import Caller, named, traced_daemons
from tokenlake.trace import NO_TRACE, parse_traceparent
from tokenlake_client import MatchOptions, Pool
from tokenlake_client.channel import Channel
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.collector import Collector

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[Cluster]:
    with traced_daemons(3, collector.url) as cluster:
        yield cluster


def use(pool: Pool, prompt: Prompt, request: str, traceparent: str | None) -> int:
    """Read what the pool has of a prompt, store the rest, and return the number of segments that were read."""
    keys = pool.prefix(prompt.tokens).keys
    options = MatchOptions(request=request, prompt_tokens=len(prompt.tokens), traceparent=traceparent)
    with pool.match(keys, options, deadline_s=PATIENT_S) as lease:
        arrays = lease.fetch(deadline_s=LIMIT_S)
        assert prompt.wrong(arrays) == 0
        hits = len(arrays)
        del arrays
    rest = keys[hits:]
    if rest:
        pool.store_all(rest, lambda at, slot: prompt.fill(hits + at, slot), hits, request=request)
    return hits


def test_one_tree_over_engine_daemon_and_peers(cluster: Cluster, collector: Collector) -> None:
    prompt, caller = Prompt(1, 12), Caller()
    longer = Prompt(2, 3, shared=prompt)
    with cluster.connect(0, LAYOUT) as writer, cluster.connect(1, LAYOUT) as reader:
        store(writer, prompt)
        wait_told(cluster)
        assert use(reader, longer, "chat-1", caller.traceparent) == prompt.segments
        spans = caller.wait(collector, match=1, lease=1, fetch=1, transfer=1, send=1, write=1, lookup=4)
    match, lease, fetch, write = (named(spans, name)[0] for name in ("match", "lease", "fetch", "write"))
    assert {each.parent for each in (match, lease, fetch, write)} == {caller.span}
    assert {each.node for each in (match, lease, fetch, write)} == {"node1"}
    asked, found = len(longer.tokens), len(prompt.tokens)
    assert match.outcome == "partial"
    assert match.attributes["tokenlake.tokens.asked"] == asked
    assert match.attributes["tokenlake.tokens.found"] == found
    assert match.attributes["tokenlake.tokens.missed.never_stored"] == asked - found
    assert match.attributes["tokenlake.request"] == "chat-1"
    assert lease.attributes["tokenlake.tokens.supplied.fetched"] == found
    transfer, send = named(spans, "transfer")[0], named(spans, "send")[0]
    assert transfer.parent == fetch.id
    assert send.parent == transfer.id
    nbytes = prompt.segments * LAYOUT.segment_bytes
    assert (transfer.attributes["tokenlake.source"], send.node) == ("node0", "node0")
    assert transfer.attributes["tokenlake.bytes"] == send.attributes["tokenlake.bytes"] == nbytes
    clients = {each.id: each for each in named(spans, "lookup") if each.kind == "client"}
    assert {each.parent for each in clients.values()} == {match.id}
    for each in named(spans, "lookup"):
        assert each.kind == "client" or clients[each.parent].attributes["tokenlake.peer"] == each.node
    assert write.outcome == "committed"
    assert write.attributes["tokenlake.segments.committed"] == longer.segments - prompt.segments


def test_requests_without_a_sampled_context_have_no_spans(cluster: Cluster, collector: Collector) -> None:
    """And garbage of any kind changes nothing."""
    caller, last = Caller(), Caller()
    hostile: list[Any] = [
        None,
        "",
        caller.traceparent[:-2] + "00",
        "ff" + caller.traceparent[2:],
        caller.traceparent + "-more",
        caller.traceparent.upper(),
        f"00-{'0' * 32}-{caller.span}-01",
        f"00-{caller.trace}-{'0' * 16}-01",
        "0" * 10_240,
        "00-" + "é" * 32 + "-" + "f" * 16 + "-01",
        "00-\n" + caller.traceparent,
        b"00-bytes",
        17,
    ]
    for each in hostile:
        assert parse_traceparent(each) == NO_TRACE
    with cluster.connect(0, LAYOUT) as pool:
        for number, each in enumerate(hostile):
            prompt = Prompt(100 + number, 2)
            assert use(pool, prompt, f"hostile-{number}", each) == 0
            assert use(pool, prompt, f"hostile-{number}", each) == 2
        use(pool, Prompt(99, 2), "last", last.traceparent)
        last.wait(collector, match=1, write=1)
    assert not [each for each in collector.spans if str(each.attributes.get("tokenlake.request")).startswith("hostile")]


def test_a_later_version_of_the_header_is_read() -> None:
    caller = Caller()
    known = parse_traceparent(caller.traceparent)
    assert known.hex() == f"{caller.trace}{caller.span}01"
    assert parse_traceparent("01" + caller.traceparent[2:] + "-further") == known


def test_a_killed_peer_changes_the_trace_alone(collector: Collector) -> None:
    prompt, caller, after = Prompt(5, 8), Caller(), Caller()
    with traced_daemons(3, collector.url) as cluster:
        with cluster.connect(0, LAYOUT) as writer, cluster.connect(1, LAYOUT) as reader:
            store(writer, prompt)
            wait_told(cluster)
            keys = reader.prefix(prompt.tokens).keys
            options = MatchOptions(request="killed", traceparent=caller.traceparent)
            with reader.match(keys, options, deadline_s=PATIENT_S) as lease:
                assert lease.hits == prompt.segments
                cluster.nodes[0].kill()
                arrays = lease.fetch(deadline_s=PATIENT_S)
                assert len(arrays) < prompt.segments
            spans = caller.wait(collector, match=1, fetch=1, lease=1)
            [fetch] = named(spans, "fetch")
            assert fetch.outcome in ("miss", "partial")
            reasons = {name for name in named(spans, "lease")[0].attributes if ".missed." in name}
            assert reasons & {f"tokenlake.tokens.missed.{each}" for each in ("lost", "too_slow", "unreachable")}
            assert use(reader, Prompt(6, 2), "after", after.traceparent) == 0
            after.wait(collector, match=1, write=1)
        wait_until(lambda: all_free(cluster.nodes[1]), "nothing is held")


def test_no_collector_costs_no_request_and_one_line() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with traced_daemons(1, url) as cluster, pytest.MonkeyPatch.context() as patch:
            node = cluster.nodes[0]
            patch.delenv("OTEL_EXPORTER_OTLP_TIMEOUT", raising=False)
            with cluster.connect(0, LAYOUT) as pool:
                for number in range(4):
                    use(pool, Prompt(200 + number, 2), f"lost-{number}", Caller().traceparent)

                def refused() -> float:
                    return node.metrics()['tokenlake_trace_spans{outcome="refused"}']

                wait_until(lambda: refused() > 0, "the exporter gives up", 60.0)
                assert use(pool, Prompt(200, 2), "again", Caller().traceparent) == 2
            log = node.log.read_text()
            assert log.count("takes no spans") == 1
            assert "Traceback" not in log


def test_attributes_hold_no_secret(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No key, token id, salt, credential or secret of a tenant is in the bytes that the collector gets."""
    caller, prompt, salt = Caller(), Prompt(7, 3), "salt-of-a-customer"
    file = tenants(tmp_path_factory.mktemp("tracing"))
    before = len(collector.raw)
    with traced_daemons(2, collector.url, config=file) as cluster:
        node = cluster.nodes[0]
        with Pool.connect(node.socket, LAYOUT, RED) as pool:
            keys = pool.prefix(prompt.tokens, salt=salt).keys
            with pool.match(keys, MatchOptions(request="quiet", traceparent=caller.traceparent)):
                pass
            pool.store_all(keys, prompt.fill, request="quiet")
            caller.wait(collector, match=1, write=1)
    raw = collector.raw[before:]
    assert b"tokenlake.match" in raw
    for secret in (salt.encode(), RED.encode(), b"\xaa" * 32, b"aa" * 32, b"cc" * 32, *map(bytes, keys)):
        assert secret not in raw
        assert secret.hex().encode() not in raw


def test_the_sampler_of_the_sdk_may_ask_for_roots(collector: Collector) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        with traced_daemons(1, collector.url) as cluster, cluster.connect(0, LAYOUT) as pool:
            use(pool, Prompt(8, 2), "root", None)
            spans = collector.wait_for(
                lambda spans: len([each for each in spans if each.attributes.get("tokenlake.request") == "root"]) >= 3,
                "spans of a request without a context",
            )
    roots = [each for each in spans if each.attributes.get("tokenlake.request") == "root"]
    assert all(not each.parent for each in roots if each.name == "tokenlake.match")


@contextlib.contextmanager
def copied_frames(channel: Channel, sent: list[bytes]) -> Iterator[None]:
    """Keep a copy of each frame that the client sends."""
    send = channel._send

    def kept(frame: bytes) -> bool:
        sent.append(frame)
        return send(frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "_send", kept)
        yield


def test_without_a_collector_nothing_is_imported_or_sent() -> None:
    """The daemon and the client import no part of OpenTelemetry, and no message is sent besides."""
    modules = "tokenlake_server.start.daemon, tokenlake_server.cli, tokenlake_client.engines.common.span, sys"
    code = f"import {modules}; print([each for each in sys.modules if each.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    sent: list[bytes] = []
    with daemons(1) as cluster, cluster.connect(0, LAYOUT) as pool:
        channel = pool.link.channel
        use(pool, Prompt(8, 2), "opens a region", None)
        with copied_frames(channel, sent):
            assert use(pool, Prompt(9, 2), "untraced", None) == 0
            plain_frames = len(sent)
            assert use(pool, Prompt(10, 2), "untraced", Caller().traceparent) == 0
    assert len(sent) == 2 * plain_frames + 1
