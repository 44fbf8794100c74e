"""LoRA adapters: the same tokens as without the pool, and segments are shared by the contents of the adapter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import TINY, again, pool_of, prompt, until_hit
from tests.engines.vllm.forked import refusals
from tests.engines.vllm.scenario import Three, check_scenario, three
from tokenlake_client.weights import digest_of_directory
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_adapter

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter"), TINY)


@pytest.fixture(scope="module")
def engines(start: Callable[..., Engine], cluster: Cluster) -> Three:
    return three(start, cluster, **LORA)


def test_an_adapter(engines: Three, cluster: Cluster, adapter: Path) -> None:
    one = replace(engines, request={"adapter": adapter}, identity={"adapter": digest_of_directory(adapter)})
    check_scenario(one, cluster, 40)


def test_equal_adapters_share_and_others_do_not(engines: Three, adapter: Path, tmp_path: Path) -> None:
    tokens = prompt(800, 50)
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    other = save_adapter(tmp_path / "other", TINY, seed=2)
    answers = {}
    for directory, tokens_hit in ((adapter, 0), (other, 0), (None, 0), (copy, 768)):
        answers[directory] = engines.plain.generate([tokens], adapter=directory)[0]
        assert again(engines.first, tokens, adapter=directory) == (answers[directory], tokens_hit)
    assert answers[copy] == answers[adapter]
    assert len({str(answers[directory]) for directory in (adapter, other, None)}) == 3
    # Another process has another name and number for the same adapter.
    for directory in (other, copy, None):
        assert again(engines.second, tokens, adapter=directory) == (answers[directory], 768)


def test_requests_without_an_adapter_are_shared(
    engines: Three, start: Callable[..., Engine], cluster: Cluster, plain: Engine
) -> None:
    """Without an adapter, engines share with engines that have none."""
    tokens, others = prompt(800, 51), prompt(800, 52)
    without = start(pool_of(cluster.nodes[0]))
    for first, second, one in ((without, engines.first, tokens), (engines.first, without, others)):
        expected = plain.generate([one])[0]
        assert again(first, one) == (expected, 0)
        assert again(second, one) == (expected, 768)


def test_files_that_are_replaced_while_vllm_has_the_adapter(engines: Three, tmp_path: Path) -> None:
    """vLLM computes with the files that it has loaded. Their results are not stored under the digest of others."""
    tokens = prompt(800, 53)
    directory = save_adapter(tmp_path / "adapter", TINY, seed=3)
    old, new = save_adapter(tmp_path / "old", TINY, seed=3), save_adapter(tmp_path / "new", TINY, seed=4)
    expected = {one: engines.plain.generate([tokens], adapter=one)[0] for one in (old, new)}
    assert expected[old] != expected[new]
    first, second = engines.first, engines.second
    assert again(first, tokens, adapter=directory) == (expected[old], 0)
    shutil.copytree(new, directory, dirs_exist_ok=True)
    before = first.call("counts")
    assert again(first, tokens, adapter=directory) == (expected[old], 0)
    assert first.call("counts")["tokens_stored"] == before["tokens_stored"]
    assert "its files changed after vLLM loaded them" in refusals(first)[-1]
    # The other engine loads the new files now, and finds nothing of the old ones.
    assert again(second, tokens, adapter=directory) == (expected[new], 0)
    # The first engine has the old adapter still: it fails the load of the new one's segments, and recomputes.
    assert again(first, tokens, adapter=directory)[0] == expected[old]
    assert first.call("load_adapter", directory=str(directory))
    # For some seconds after the failed load the adapter's segments are not looked up.
    assert until_hit(first, tokens, expected[new], adapter=directory) == 768
    assert again(second, tokens, adapter=old) == (expected[old], 768)


def test_an_adapter_that_cannot_be_read(engines: Three, tmp_path: Path) -> None:
    """The files are gone after vLLM has loaded them."""
    tokens = prompt(800, 54)
    directory = save_adapter(tmp_path / "adapter", TINY, seed=5)
    expected = engines.plain.generate([tokens], adapter=directory)[0]
    assert again(engines.first, tokens, adapter=directory) == (expected, 0)
    shutil.rmtree(directory)
    before = engines.first.call("counts")["requests_not_served"]
    assert again(engines.first, tokens, adapter=directory) == (expected, 0)
    assert engines.first.call("counts")["requests_not_served"] == before + 1
    assert "its files cannot be read" in refusals(engines.first)[-1]
