"""The built-in workload: repeatable, interleaved, and shaped as its settings say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tokenlake_bench.baselines import infinite_cache, intern_segments
from tokenlake_bench.workload import BuiltinWorkload, Request, stream_tokens


def conversations(requests: list[Request]) -> dict[int, list[Request]]:
    turns: dict[int, list[Request]] = {}
    for request in requests:
        turns.setdefault(request.conversation, []).append(request)
    return turns


def test_equal_seeds_give_equal_requests() -> None:
    workload = BuiltinWorkload()
    again = BuiltinWorkload(seed=0)
    for a, b, c in zip(workload, workload, again, strict=True):
        assert (
            (a.index, a.at_s, a.conversation) == (b.index, b.at_s, b.conversation) == (c.index, c.at_s, c.conversation)
        )
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.tokens, c.tokens)
        assert np.array_equal(a.output_tokens, c.output_tokens)


def test_another_seed_gives_other_tokens() -> None:
    a, b = (next(iter(BuiltinWorkload(seed=seed))) for seed in (0, 1))
    assert not np.array_equal(a.tokens[:64], b.tokens[:64])


@pytest.mark.parametrize("seed", range(5))
def test_defaults_give_the_documented_lengths_and_reuse(seed: int) -> None:
    workload = BuiltinWorkload(seed=seed)
    requests = list(workload)
    assert len(workload) == len(requests) == 240
    assert [request.index for request in requests] == list(range(240))
    assert all(a.at_s <= b.at_s for a, b in pairwise(requests))
    assert all(600 <= len(request.tokens) <= 2_500 for request in requests)
    assert max(len(request.tokens) for request in requests) > 2_000
    assert all(48 <= len(request.output_tokens) <= 160 for request in requests)
    assert max(int(request.tokens.max()) for request in requests) < 32_000
    assert 0.6 <= infinite_cache(intern_segments(requests, 256)).rate <= 0.8


def test_a_turn_goes_on_after_the_answer_before_it() -> None:
    for turns in conversations(list(BuiltinWorkload())).values():
        for earlier, later in pairwise(turns):
            said = np.concatenate([earlier.tokens, earlier.output_tokens])
            assert np.array_equal(later.tokens[: len(said)], said)
            assert len(later.tokens) > len(said)


def test_conversations_share_system_prompts_and_interleave() -> None:
    requests = list(BuiltinWorkload())
    turns = conversations(requests)
    beginnings = {request.tokens[:500].tobytes() for request in requests}
    assert 2 <= len(beginnings) <= 6 < len(turns)
    assert sum(a.conversation == b.conversation for a, b in pairwise(requests)) < 60
    texts = {each[0].tokens.tobytes() for each in turns.values()}
    assert len(texts) == len(turns)


def test_streams_are_even_and_apart() -> None:
    tokens = stream_tokens(np.arange(100, dtype=np.uint64), 1_000, 10)
    assert tokens.shape == (100, 1_000)
    shares = np.bincount(tokens.reshape(-1), minlength=10) / tokens.size
    assert np.allclose(shares, 0.1, atol=0.005)
    assert len(np.unique(tokens, axis=0)) == 100
