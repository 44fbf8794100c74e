"""Our LRU cache and clairvoyant bound against those of `kvcache-simulator` (KVCache.AI, on PyPI), an implementation of
its own: equal hits, segment for segment. Skipped where the package is not installed.

It replays the same prompts with a trie of blocks, evicts leaves alone, and measures the second half of the requests.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenlake_bench.baselines import Accesses, Lru, intern_segments
from tokenlake_bench.eviction.bounds import bounds_of
from tokenlake_bench.workload import BuiltinWorkload

TOKENS = 64
policies: Any = pytest.importorskip("kvcache_sim.policies", reason="kvcache-simulator is not installed")


def theirs(accesses: Accesses) -> Any:
    """The prompts as its execution plan. Its traces also have the block behind the last full segment; ours do not."""
    lines = (
        json.dumps({"block_size": TOKENS, "hash_ids": prompt.chain, "input_length": len(prompt.chain) * TOKENS})
        for prompt in accesses.prompts
    )
    trace = pytest.importorskip("kvcache_sim.trace").parse_trace_lines(lines)
    return pytest.importorskip("kvcache_sim.plan").build_execution_plan(trace, warmup_fraction=0.5)


@pytest.mark.parametrize("segments", [150, 300, 600])
def test_hits_agree_with_kvcache_simulator(segments: int) -> None:
    accesses = intern_segments(BuiltinWorkload(400), TOKENS)
    plan, half = theirs(accesses), len(accesses.prompts) // 2
    cache, lru = Lru(segments), []
    for prompt in accesses.prompts:
        lru.append(cache.match(prompt.chain))
        cache.touch(prompt.chain)
    best = bounds_of(accesses).hits(segments)
    for name, hits in (("lru", lru), ("optimal", best)):
        result = policies.simulate_policy(plan, name, segments)
        assert result.measurementMode == "fixed_window", "the cache was full before the second half"
        assert result.hitTokens == TOKENS * sum(hits[half:]) > 0
    assert policies.simulate_ceiling(plan).hitTokens == TOKENS * sum(bounds_of(accesses).hits(10**9)[half:])
