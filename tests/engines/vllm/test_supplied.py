"""The tokens that a daemon counts are those of vLLM's own counters and of the connector, of both kinds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import PATIENT_NODES, metrics_of, pool_of, prompt
from tests.engines.vllm.test_opaque import SIZES
from tokenlake_client.engines.vllm.counters import COUNTS, PREFIX, TIMES
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_mistral, save_sliding_window

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

TIMEOUT_S = 60.0
FAMILIES = {"known layout": None, "window": save_mistral, "mixed groups": save_sliding_window}
SEGMENT = 256


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(2, "128MiB", "16MiB", **PATIENT_NODES) as running:
        yield running


def check_pages(pages: list[dict[str, float]], counts: list[dict[str, float]]) -> None:
    """Each token of a prompt has one source, the page has the counts of both sides of a connector, and vLLM counts the
    same."""
    for page, count in zip(pages, counts, strict=True):
        for name, each in COUNTS.items():
            if name != "hook_seconds":
                assert page[each.series(PREFIX)] == pytest.approx(count[name]), name
        prompts = {name: value for name, value in page.items() if name.startswith("vllm:tokenlake_prompt_tokens_total")}
        assert sum(prompts.values()) == page["vllm:prefix_cache_queries_total"]
        tiers = {"device": "vllm_cache", "host": "this_node", "p2p": "other_nodes"}
        for tier, source in tiers.items():
            cached = page[f'vllm:prompt_tokens_cached_by_source_total{{source="{tier}"}}']
            assert cached == prompts[f'vllm:tokenlake_prompt_tokens_total{{source="{source}"}}']
        for name in TIMES:
            assert page[f"vllm:tokenlake_{name}_count"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_both_count_the_same_tokens(
    start: Callable[..., Engine], cluster: Cluster, model: Path, tmp_path: Path, family: str
) -> None:
    save = FAMILIES[family]
    path = save(tmp_path / "model", SIZES) if save is not None else model
    engines = [start(pool_of(node), model=path, disable_log_stats=False) for node in cluster.nodes]
    first, second = engines
    far, new = prompt(1000, 1), prompt(800, 2)
    # vLLM asks a connector of opaque segments for a prompt only while its own cache lacks a whole chunk of it.
    again = [far, new] if family == "known layout" else []
    turns = [new[:600] + prompt(300, 3), far[:400] + prompt(500, 4), new[:700] + prompt(333, 5)]

    def flush() -> None:
        for engine in engines:
            assert engine.call("flush")

    second.generate([far])
    flush()
    # From the other node, computed, from vLLM's own cache.
    until = time.monotonic() + TIMEOUT_S
    while first.timed([far]).cached == 0:
        assert time.monotonic() < until, first.log.read_text()[-2000:]
        assert first.call("forget")
        flush()
    for tokens in (new, *again, *turns):
        first.generate([tokens])
        flush()
    # From this node, in part beside tokens of vLLM's own cache; several at a time.
    assert first.call("forget")
    for tokens in (new[:300], *turns):
        first.generate([tokens])
        flush()
    assert first.call("forget")
    first.generate([*turns, far, new])
    second.generate(turns)
    flush()

    pages = [metrics_of(engine) for engine in engines]

    def vllm(name: str) -> int:
        return int(sum(page[f"vllm:{name}_total"] for page in pages))

    expected = {
        "asked": vllm("prefix_cache_queries"),
        "engine_had": vllm("prefix_cache_hits"),
        "supplied": vllm("external_prefix_cache_hits"),
    }
    if family == "known layout":
        check_pages(pages, [engine.call("counts") for engine in engines])
        series = 'vllm:prompt_tokens_cached_by_source_total{source="p2p"}'
        expected["remote"] = int(sum(page[series] for page in pages))
    assert min(expected.values()) > 0, expected

    def counted() -> dict[str, int]:
        tokens = cluster.tokens()
        sources = {name: tokens.pop(name, 0) for name in ("local", "fetched", "disk", "shipped")}
        asked, engine_had = tokens.pop("asked"), tokens.pop("engine_had")
        supplied = sum(sources.values())
        assert asked == engine_had + supplied + sum(tokens.values())
        assert sources["fetched"] > 0
        found = {"asked": asked, "engine_had": engine_had, "supplied": supplied, "remote": sources["fetched"]}
        return {name: found[name] for name in expected}

    while counted() != expected and time.monotonic() < until:
        time.sleep(0.05)
    assert counted() == expected, cluster.tokens()
    # Once the engines have measured 8 prefills, the time that a load saves is counted.
    saved = sum(v for k, v in cluster.totals().items() if k.startswith("tokenlake_saved_prefill_milliseconds_total"))
    assert (saved > 0) == (family == "known layout")
    # Only what was read counts as read: the bytes of the local tokens.
    nbytes = sum(v for k, v in cluster.totals().items() if k.startswith("tokenlake_read_bytes_total"))
    assert nbytes > 0
