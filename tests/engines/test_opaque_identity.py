"""The layout of a cache that only vLLM understands, from what the scheduler's side knows and the ranks report."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tokenlake.errors import LayoutRefused
from tokenlake_client.engines.vllm.checkpoint import check_machines
from tokenlake_client.engines.vllm.offloading.identity import (
    EngineIdentity,
    RankFacts,
    hash_seed,
    opaque_layout,
    rank_facts,
)

ENGINE = EngineIdentity(
    "M", "digest", "vllm 0.32.0", 256, 2, replicated=False, cache={"hash": ["sha256", None], "chunk": [2, 128]}
)
RANKS = [RankFacts(1, 500, "b"), RankFacts(0, 400, "a")]


def test_each_rank_has_a_shard_as_large_as_the_largest() -> None:
    layout = opaque_layout(ENGINE, RANKS)
    assert (layout.shards, layout.shard_bytes, layout.segment_tokens) == (2, 500, 256)
    assert layout == opaque_layout(ENGINE, RANKS[::-1]), "in any order of the reports"


def test_ranks_with_the_same_bytes_have_one_shard() -> None:
    same = [RankFacts(0, 400, "a"), RankFacts(1, 400, "a")]
    assert opaque_layout(replace(ENGINE, replicated=True), same).shards == 1
    with pytest.raises(LayoutRefused, match="different caches"):
        opaque_layout(replace(ENGINE, replicated=True), RANKS)


def test_whatever_changes_the_bytes_changes_the_fingerprint() -> None:
    engines = [
        ENGINE,
        replace(ENGINE, model_id="N"),
        replace(ENGINE, weights_digest="other"),
        replace(ENGINE, engine="vllm 0.33.0"),
        replace(ENGINE, segment_tokens=128),
        replace(ENGINE, cache={**ENGINE.cache, "hash": ["sha256", "1"]}),
        replace(ENGINE, cache={**ENGINE.cache, "hash": ["sha256_cbor", None]}),
    ]
    layouts = [opaque_layout(engine, RANKS) for engine in engines]
    layouts += [opaque_layout(ENGINE, [RankFacts(0, 400, "a"), RankFacts(1, 500, "c")])]
    layouts += [opaque_layout(ENGINE, [RankFacts(0, 500, "b"), RankFacts(1, 400, "a")])]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)


def test_the_seed_of_the_hash_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert hash_seed() is None
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert hash_seed() == "7"


def test_a_rank_that_cannot_serve_says_why() -> None:
    with pytest.raises(LayoutRefused, match="the reason"):
        opaque_layout(ENGINE, [RANKS[0], RankFacts(0, 400, "", "the reason")])


def test_a_vllm_without_cache_layouts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a vLLM without cache layouts reports a refusal."""
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_layout", None)
    facts = rank_facts(None, None, 1, SimpleNamespace(shard_bytes=400))  # type: ignore[arg-type]
    assert (facts.rank, facts.shard_bytes) == (1, 400)
    assert "the cache cannot be identified: " in facts.refusal


def test_up_to_64_ranks_have_a_layout() -> None:
    """The text of the cache has room for the digests of 64 ranks and for many groups of layers."""
    engine = replace(ENGINE, ranks=64, cache={"groups": [["SlidingWindowSpec", 16]] * 32})
    reports = [RankFacts(rank, 400, f"{rank:032x}") for rank in range(65)]
    assert opaque_layout(engine, reports[:64]).shards == 64
    with pytest.raises(LayoutRefused, match="shards"):
        opaque_layout(replace(engine, ranks=65), reports)


def test_ranks_on_several_machines_are_refused() -> None:
    check_machines(SimpleNamespace(nnodes_within_dp=1))
    with pytest.raises(LayoutRefused, match="'nnodes' puts the ranks on 2 machines"):
        check_machines(SimpleNamespace(nnodes_within_dp=2))
