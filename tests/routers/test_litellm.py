"""The plug-in in the real proxy of LiteLLM, with real daemons. Engines are HTTP servers that answer with their name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, store, wait_told, wait_until
from tests.routers.scene import DEADLINE_MS, ROUTERS, Engine, Proxy, under_way
from tests.server.control.scene import certificates, served
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

if not (ROUTERS / ".installed").exists():
    pytest.skip("the routers are not installed: make install-routers", allow_module_level=True)

pytestmark = [pytest.mark.live, pytest.mark.timeout(240), pytest.mark.rest]

seeds = itertools.count(1)
SEGMENTS = 16
"""Of a prompt: longer than an answer is expected to be, so that a request whose end is not reported yet changes no
choice."""


def text_of(prompt: Prompt) -> str:
    return " ".join(map(str, prompt.tokens))


@pytest.fixture
def settled(engines: list[Engine]) -> Iterator[None]:
    """The engines are well again after the test."""
    yield
    for engine in engines:
        engine.mode = "well"
        engine.gate.set()


def test_requests_go_to_the_node_of_their_prefix(two: Cluster, pools: list[Pool], proxy: Proxy) -> None:
    for at, name in (0, "A"), (1, "B"), (1, "B"), (0, "A"):
        prompt = Prompt(next(seeds), SEGMENTS)
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(
    two: Cluster, engines: list[Engine], proxy: Proxy, settled: None, stream: bool
) -> None:
    """A request ends where its client goes away before the first token."""
    for engine in engines:
        engine.mode = "mute"
        engine.gate.clear()
    with pytest.raises(OSError, match="timed out"):
        proxy.open("chat/completions", 2.0, messages=[{"role": "user", "content": "1 2"}], stream=stream)
    wait_until(lambda: under_way(two) == 0, "the request ends")
    assert not any(engine.gate.is_set() for engine in engines)


def test_a_choice_that_fails_is_counted_and_logged_once(engines: list[Engine], proxy: Proxy) -> None:
    before = proxy.choices().get("failed", 0)
    for _ in range(3):
        message = {"role": "user", "content": "1 2"}
        with proxy.open("chat/completions", messages=[message], chat_template_kwargs=7) as answer:
            assert answer.status == 200
    assert proxy.choices()["failed"] == before + 3
    assert proxy.log.read_text().count("a choice failed") == 1


def test_an_engine_in_cooldown_is_left_out(
    two: Cluster, pools: list[Pool], engines: list[Engine], proxy: Proxy, settled: None
) -> None:
    prompt = Prompt(next(seeds), SEGMENTS)
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
    assert proxy.chat("1 2 3") in ("A", "B")


def test_workers_share_the_requests_under_way_over_tls(tmp_path: Path, engines: list[Engine], settled: None) -> None:
    cluster = Cluster(2, "4MiB", "1MiB", match_deadline_ms="2000")
    cluster.deadlines = PATIENT
    addresses = served(cluster)
    held = certificates(cluster.directory / "ca", "router-1", role="scheduler")
    settings = {
        "control": [f"{node}={address}" for node, address in addresses.items()],
        "certificate": str(held.certificate),
        "key": str(held.key),
        "ca": str(held.ca),
        "deadline_ms": DEADLINE_MS,
    }
    with cluster, cluster.connect(0, LAYOUT), cluster.connect(1, LAYOUT) as other:
        nodes = [(engine, node.name) for engine, node in zip(engines, cluster.nodes, strict=True)]
        proxy = Proxy(tmp_path, nodes, settings, workers=2)
        try:
            proxy.ready()
            proxy.wait_log("node0=", 2)
            known = _known(cluster, other)
            for engine in engines:
                engine.gate.clear()
            with ThreadPoolExecutor(16) as threads:
                answers = [threads.submit(proxy.chat, f"{known} {number}") for number in range(16)]
                wait_until(lambda: under_way(cluster) == 16, "all requests are at the engines")
                for engine in engines:
                    engine.gate.set()
                assert {each.result() for each in answers} == {"A", "B"}
            wait_until(lambda: under_way(cluster) == 0, "all requests end")
            assert proxy.choices()["chosen"] == 16

            for node in cluster.nodes:
                node.kill()
            assert {proxy.chat(f"{known} {number}") for number in range(16)} <= {"A", "B"}
            for node in cluster.nodes:
                node.start()
            cluster.wait_ready()
            # The pool lost its content; it chooses by a new prompt.
            with cluster.connect(1, LAYOUT) as again:
                known = _known(cluster, again)
            wait_until(lambda: {proxy.chat(known + " 1") for _ in range(8)} == {"B"}, "the pool chooses again")
            choices = proxy.choices()
            assert choices["unreachable"] + choices.get("late", 0) >= 16
            # A daemon that has started again serves no layout until an engine connects.
            assert choices.keys() <= {"chosen", "unreachable", "late", "not_served"}
            assert "Traceback" not in proxy.log.read_text()
        finally:
            proxy.close()


def _known(cluster: Cluster, pool: Pool) -> str:
    """A new prompt that the pool has."""
    prompt = Prompt(next(seeds), SEGMENTS)
    store(pool, prompt)
    wait_told(cluster)
    return text_of(prompt)
