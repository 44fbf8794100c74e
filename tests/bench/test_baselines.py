"""Caches against cases counted by hand, against a plain model, and against the published figures of a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import (
    Accesses,
    HitCount,
    Prompt,
    baselines,
    global_lru,
    infinite_cache,
    intern_segments,
    private_round_robin,
    private_routed,
)
from tokenlake_bench.traces import read_mooncake
from tokenlake_bench.workload import Request

TRACE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation_trace.jsonl.zst"


def accesses(*chains: str) -> Accesses:
    """A segment is 10 tokens, a prompt 5 tokens longer than its segments; a letter is a segment."""
    return Accesses(10, [Prompt(10 * len(chain) + 5, tuple(map(ord, chain))) for chain in chains])


def request(index: int, tokens: str) -> Request:
    array = np.frombuffer(tokens.encode(), dtype=np.uint8).astype(np.uint32)
    return Request(index, float(index), 0, array, np.empty(0, dtype=np.uint32))


def test_segments_are_told_apart_by_their_whole_prefix() -> None:
    texts = ["aabbcc", "aabbc", "ccbb", "a", "aabbdd"]
    found = intern_segments((request(index, text) for index, text in enumerate(texts)), 2)
    assert [prompt.chain for prompt in found.prompts] == [(0, 1, 2), (0, 1), (3, 4), (), (0, 1, 5)]
    assert [prompt.tokens for prompt in found.prompts] == [6, 5, 4, 1, 6]
    assert found.prompt_tokens == 22


@pytest.mark.parametrize("seed", range(8))
def test_routing_goes_where_the_longest_prefix_is(seed: int) -> None:
    # The first two requests start the two nodes; from then on each chain is found where it was.
    found = private_routed(accesses("ab", "cd", "cd", "ab", "abc", "cda", "abc"), 2, 60, seed)
    assert found == HitCount(20 + 20 + 20 + 20 + 30, 25 * 4 + 35 * 3)


@pytest.mark.parametrize("seed", range(8))
def test_a_common_segment_does_not_attract_all_requests(seed: int) -> None:
    # Four places on each node. Both have s once both served; 14 more requests over the two are drawn by the seed.
    chains = ["s" + letter for letter in "abcdefghijklmnop"]
    assert private_routed(accesses(*chains), 2, 80, seed) == HitCount(140, 400)


def test_equal_seeds_route_alike() -> None:
    many = accesses(*("s" + letter for letter in "abcdefghabcdefgh"))
    rates = [[private_routed(many, 4, 120, seed).rate for seed in range(10)] for _ in range(2)]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


CHAINS = st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), max_size=30)


def plain_lru(texts: list[tuple[int, ...]], capacity: int) -> int:
    """Hit segments of a cache kept as a list of prefixes, oldest first."""
    held: list[tuple[int, ...]] = []
    hits = 0
    for text in texts:
        prefixes = [text[: end + 1] for end in range(len(text))]
        for prefix in prefixes:
            if prefix not in held:
                break
            hits += 1
        held = [prefix for prefix in held if prefix not in prefixes] + prefixes[::-1]
        held = held[max(0, len(held) - capacity) :]
    return hits


@given(CHAINS, st.integers(1, 8))
def test_the_cache_agrees_with_a_plain_model(texts: list[tuple[int, ...]], capacity: int) -> None:
    requests = [
        Request(index, 0.0, 0, np.array(text, dtype=np.uint32), np.empty(0, dtype=np.uint32))
        for index, text in enumerate(texts)
    ]
    found = intern_segments(requests, 1)
    assert global_lru(found, capacity).hit_tokens == plain_lru(texts, capacity)
    assert infinite_cache(found).hit_tokens == plain_lru(texts, 10_000)
    split = sum(plain_lru(texts[node::3], capacity) for node in range(3))
    assert private_round_robin(found, 3, 3 * capacity).hit_tokens == split
    assert private_routed(found, 3, 3 * capacity, 0).hit_tokens <= infinite_cache(found).hit_tokens


def test_all_four() -> None:
    asked = intern_segments([request(index, "aabb") for index in range(4)], 2)
    found = baselines(asked, nodes=2, capacity_tokens=8, seed=0)
    assert found.ideal == found.global_lru == HitCount(12, 16)
    assert found.private == HitCount(8, 16)
    assert found.private_routed == HitCount(8, 16)


def test_arguments_out_of_range_are_named() -> None:
    with pytest.raises(ConfigurationError, match="capacity_tokens"):
        private_round_robin(accesses("a"), 4, 39)
    with pytest.raises(ConfigurationError, match="nodes"):
        private_routed(accesses("a"), 0, 100, 0)
    with pytest.raises(ConfigurationError, match="segment_tokens"):
        intern_segments([], 0)


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason=f"the trace is not here: {TRACE}")
def test_the_conversation_trace_gives_the_published_rates() -> None:
    found = intern_segments(read_mooncake(TRACE), 512)
    assert len(found.prompts) == 12_031
    assert infinite_cache(found).rate == pytest.approx(0.374, abs=0.001)
    assert global_lru(found, 1_000_000).rate == pytest.approx(0.056, abs=0.005)
    assert global_lru(found, 3_000_000).rate == pytest.approx(0.144, abs=0.005)
    assert global_lru(found, 10_000_000).rate == pytest.approx(0.298, abs=0.005)
