"""The plug-in in the real proxy of LiteLLM, with real daemons. Engines are HTTP servers that answer with their name."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, SEGMENT_TOKENS, Prompt, daemons, store, wait_told, wait_until
from tests.routers.scene import Engine, Proxy
from tests.server.control.scene import local, socket_of
from tokenlake_client import Pool
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_testing.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

seeds = itertools.count(1)


def text_of(prompt: Prompt) -> str:
    return " ".join(map(str, prompt.tokens))


def under_way(cluster: Cluster) -> int:
    """Requests under way in the fleet."""
    fleet = pb.Fleet(
        name="default",
        layers=LAYOUT.layers,
        segment_bytes=LAYOUT.segment_bytes,
        segment_tokens=SEGMENT_TOKENS,
        query_bytes=1,
    )
    with local(cluster.nodes[0]) as control:
        return control.report(pb.ReportRequest(fleet=fleet))


@pytest.fixture
def settled(engines: list[Engine]) -> Iterator[None]:
    """The engines are well again after the test."""
    yield
    for engine in engines:
        engine.mode = "well"
        engine.gate.set()


def test_requests_go_to_the_node_of_their_prefix(two: Cluster, pools: list[Pool], proxy: Proxy) -> None:
    for at, name in (0, "A"), (1, "B"), (1, "B"), (0, "A"):
        prompt = Prompt(next(seeds), 4)
        store(pools[at], prompt)
        wait_told(two)
        more = f"{text_of(prompt)} 5 6 7"
        assert proxy.chat(more) == name
        assert proxy.complete(more) == name
        assert "".join(proxy.stream(messages=[{"role": "user", "content": more}])) == f"{name}!"
        assert "".join(proxy.stream("completions", prompt=more)) == f"{name}!"
    wait_until(lambda: under_way(two) == 0, "all requests end")


def test_the_tokens_reach_the_engine_unchanged(engines: list[Engine], proxy: Proxy) -> None:
    prompt = Prompt(next(seeds), 3)
    name = proxy.complete(text_of(prompt))
    assert next(each for each in engines if each.name == name).served[-1] == prompt.tokens


def test_a_stream_is_under_way_until_its_client_goes_away(
    two: Cluster, engines: list[Engine], proxy: Proxy, settled: None
) -> None:
    for engine in engines:
        engine.gate.clear()
    answer = proxy.open("chat/completions", messages=[{"role": "user", "content": "1 2"}], stream=True)
    assert answer.readline().startswith(b"data:")
    assert under_way(two) == 1
    answer.close()
    for engine in engines:
        engine.gate.set()
    wait_until(lambda: under_way(two) == 0, "the request ends")


def test_an_engine_in_cooldown_is_left_out(
    two: Cluster, pools: list[Pool], engines: list[Engine], proxy: Proxy, settled: None
) -> None:
    prompt = Prompt(next(seeds), 4)
    store(pools[0], prompt)
    wait_told(two)
    engines[0].mode = "down"

    def answered() -> bool:
        try:
            return proxy.chat(text_of(prompt)) == "B"
        except OSError:
            return False

    wait_until(answered, "the other engine answers")
    engines[0].mode = "well"
    wait_until(lambda: proxy.chat(text_of(prompt)) == "A", "the cooldown ends")
    wait_until(lambda: under_way(two) == 0, "all requests end")


@pytest.mark.parametrize("mode", ["no tokens", "silent"])
def test_without_tokens_the_router_chooses(engines: list[Engine], proxy: Proxy, settled: None, mode: str) -> None:
    for engine in engines:
        engine.mode = mode
    begun = time.monotonic()
    assert proxy.chat("1 2 3") in ("A", "B")
    assert time.monotonic() - begun < 20


def _killed(cluster: Cluster) -> Callable[[], None]:
    cluster.nodes[0].kill()

    def back() -> None:
        cluster.nodes[0].start()
        cluster.wait_ready()

    return back


def _frozen(cluster: Cluster) -> Callable[[], None]:
    cluster.nodes[0].freeze()
    return cluster.nodes[0].thaw


@pytest.mark.parametrize("fault", [_frozen, _killed])
def test_without_the_pool_the_router_chooses(
    tmp_path: Path, engines: list[Engine], fault: Callable[[Cluster], Callable[[], None]]
) -> None:
    with daemons(1) as cluster, cluster.connect(0, LAYOUT):
        node = cluster.nodes[0]
        settings = {"control": [str(socket_of(node))], "deadline_ms": 1000}
        proxy = Proxy(tmp_path, [(engine, node.name) for engine in engines], settings)
        try:
            proxy.ready()
            proxy.wait_log("is asked where requests start soonest")
            assert proxy.chat("1 2 3") in ("A", "B")
            back = fault(cluster)
            for _ in range(5):
                assert proxy.chat("1 2 3") in ("A", "B")
            proxy.wait_log("is not asked")
            back()
            wait_until(
                lambda: proxy.log.read_text().count("is asked where requests start soonest") >= 2, "it is asked again"
            )
            assert proxy.chat("1 2 3") in ("A", "B")
            assert "Traceback" not in proxy.log.read_text()
        finally:
            proxy.close()
