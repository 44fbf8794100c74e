"""Parts of a request beside its tokens, where only vLLM understands the cache: an adapter, an image, a drafting
head, weights that change in place, and segments on another node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import TIMEOUT_S, again, pool_of, prompt, until_hit
from tests.engines.vllm.forked import ForeignBackend
from tests.engines.vllm.spoiling import spoil_all, tracebacks
from tests.engines.vllm.test_opaque import SIZES
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_adapter, save_eagle, save_mistral, save_pictures
from tokenlake_testing.tiny_model import save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

NODES = 2

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
CACHED = 768
"""Tokens of a stored prompt of 1,000 that can be loaded."""
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mistral(tmp_path_factory.mktemp("window"), SIZES)


@pytest.fixture(scope="module")
def plain(start: Start, window: Path) -> Engine:
    """Without the pool."""
    return start(model=window, **LORA)


@pytest.fixture(scope="module")
def here(start: Start, window: Path, cluster: Cluster) -> Engine:
    return start(pool_of(cluster.nodes[0], match_ms=2000), model=window, **LORA)


@pytest.fixture(scope="module")
def there(start: Start, window: Path, cluster: Cluster) -> Engine:
    """On the other node."""
    return start(pool_of(cluster.nodes[1], match_ms=2000), model=window, **LORA)


def check_control(cluster: Cluster, engine: Engine, tokens: list[int], expected: list[int], **request: Any) -> None:
    """The tokens depend on the bytes of the pool. The request is repeated until its cache comes from there."""
    for node in range(len(cluster.nodes)):
        spoil_all(cluster, engine, node)
    until = time.monotonic() + TIMEOUT_S
    while not (found := again(engine, tokens, **request))[1]:
        assert found[0] == expected
        assert time.monotonic() < until, engine.log.read_text()[-2000:]
    assert found[0] != expected
    assert tracebacks(engine) == []


def test_an_adapter(plain: Engine, here: Engine, cluster: Cluster, tmp_path: Path) -> None:
    adapter, other = save_adapter(tmp_path / "a", SIZES), save_adapter(tmp_path / "b", SIZES, seed=2)
    tokens = prompt(1000, 1)
    expected = {one: plain.generate([tokens], adapter=one)[0] for one in (adapter, other, None)}
    assert len({str(each) for each in expected.values()}) == 3
    for one, right in expected.items():
        assert again(here, tokens, adapter=one) == (right, 0)
    until_hit(here, tokens, expected[adapter], CACHED, adapter=adapter)
    check_control(cluster, here, tokens, expected[adapter], adapter=adapter)


def stored(plain: Engine, here: Engine, first: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts that `here` has stored on its node, and the tokens that follow each. After a late answer of the pool, a
    test goes on with the next prompt: the engine on the other node has computed this one and stored it there."""
    for seed in range(first, first + 5):
        tokens = prompt(1000, seed)
        expected = plain.generate([tokens])[0]
        assert again(here, tokens)[0] == expected
        yield tokens, expected


def test_segments_of_another_node(plain: Engine, here: Engine, there: Engine, cluster: Cluster) -> None:
    before = there.call("counts")
    for tokens, expected in stored(plain, here, 20):
        answer, cached = again(there, tokens)
        assert answer == expected
        if cached:
            break
    assert cached == CACHED
    counts = there.call("counts")
    # The window of the last cached token is fetched, and no segment before it.
    assert counts["tokens_hit_remote"] - before["tokens_hit_remote"] == 512
    assert (counts["failures"], counts["loads_failed"]) == (0, 0)
    check_control(cluster, there, tokens, expected)


def test_no_prompt_is_handed_over(plain: Engine, here: Engine) -> None:
    tokens = prompt(700, 4)
    expected = plain.generate([tokens])
    for params in ({"do_remote_decode": True}, {"do_remote_prefill": True, "remote_block_ids": ["00" * 32]}):
        answer = here.timed([tokens], params=params)
        assert (answer.tokens, answer.params) == (expected, [None])
    assert "no prompt is handed over to another engine: the segments of the model are" in here.log.read_text()


def test_an_image(start: Start, cluster: Cluster, tmp_path: Path) -> None:
    model = save_pictures(tmp_path, SIZES, window=512)
    bare = start(model=model, skip_tokenizer_init=False)
    engine = start(pool_of(cluster.nodes[0], match_ms=2000), model=model, skip_tokenizer_init=False)
    tokens = prompt(700, 5)
    first, second = (dict[str, Any](image=(seed, None)) for seed in (1, 2))
    expected, other = (bare.generate([tokens], **image)[0] for image in (first, second))
    assert expected != other
    assert again(engine, tokens, **first)[0] == expected
    assert again(engine, tokens, **second) == (other, 0), "another image"
    until_hit(engine, tokens, expected, CACHED, **first)
    assert engine.call("door") == "offloading"
    check_control(cluster, engine, tokens, expected, **first)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), SIZES)


@pytest.fixture(scope="module")
def llamas_own(start: Start, llama: Path) -> Engine:
    """Without the pool, speculation, or anything else."""
    return start(model=llama)


def test_a_drafting_head(start: Start, cluster: Cluster, llama: Path, llamas_own: Engine, tmp_path: Path) -> None:
    guesses = {"method": "eagle", "model": str(save_eagle(tmp_path, SIZES)), "num_speculative_tokens": 2}
    engine = start(pool_of(cluster.nodes[0], match_ms=2000), model=llama, speculative_config=guesses)
    tokens = prompt(1000, 6)
    expected = llamas_own.generate([tokens])[0]
    until_hit(engine, tokens, expected)
    assert engine.call("door") == "offloading"
    check_control(cluster, engine, tokens, expected)


def test_an_attention_backend_whose_memory_layout_is_unknown(
    cluster: Cluster, llama: Path, llamas_own: Engine, tmp_path: Path
) -> None:
    engine = ForeignBackend(llama, tmp_path / "log", pool_of(cluster.nodes[0], match_ms=2000))
    try:
        tokens = prompt(1000, 7)
        expected = llamas_own.generate([tokens])[0]
        until_hit(engine, tokens, expected, CACHED)
        assert engine.call("door") == "offloading"
        check_control(cluster, engine, tokens, expected)
    finally:
        engine.close()
