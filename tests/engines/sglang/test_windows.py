"""A model with windows of attention, which SGLang keeps in two cache pools (the v2 calls): the same greedy tokens from
the pool, in a second process and for prompts that leave a stored one early; a changed cache changes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.contract import spoil
from tests.engines.sglang.conftest import (
    PAGE,
    PAGE_BYTES,
    TINY,
    counts_of,
    forget,
    pages_of,
    pool_of,
    prompt,
    tracebacks,
    until_stored,
)
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_windows_and_dense
from tokenlake_testing.tiny_model import TinyModel

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

SIZES = TinyModel(vocabulary=TINY.vocabulary, hidden=128, intermediate=256, layers=4, heads=4, kv_heads=2)
"""Three layers with a window: a page of theirs is as large as one of the model of the other tests."""
PROMPTS = [(700 + 100 * seed, seed) for seed in range(3, 9)]
WINDOW_PAGES = 4
"""The pages of a window of 256 tokens."""


def test_two_cache_pools(start: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> None:
    model = save_windows_and_dense(tmp_path_factory.mktemp("windows"), SIZES)
    with Cluster(1, "256MiB", "16MiB") as cluster:
        node = cluster.nodes[0]
        plain = start(model=model)
        writer, reader = (start(pool_of(node), model=model, enable_metrics=True) for _ in range(2))
        expected = [plain.generate([prompt(*each)])[0] for each in PROMPTS]
        for each, tokens in zip(PROMPTS, expected, strict=True):
            answer = writer.timed([prompt(*each)])
            assert (answer.tokens[0], answer.cached) == (tokens, 0)
        until_stored(cluster, sum(length // PAGE + WINDOW_PAGES for length, _ in PROMPTS))
        for each, tokens in zip(PROMPTS, expected, strict=True):
            answer = reader.timed([prompt(*each)])
            assert (answer.tokens[0], answer.cached) == (tokens, pages_of(prompt(*each)) * PAGE)
        # A prompt that leaves a stored one before its last window finds no window there, and is computed.
        forked = prompt(*PROMPTS[0])[:512] + prompt(400, 90)
        tokens = plain.generate([forked])[0]
        forget(reader)
        assert reader.generate([forked])[0] == tokens
        assert counts_of(reader)["failures"] == counts_of(writer)["failures"] == 0
        # The control.
        spoil(node, PAGE_BYTES)
        forget(reader)
        answers = [reader.timed([prompt(*each)]) for each in PROMPTS]
        assert all(answer.cached for answer in answers)
        changed = [answer.tokens[0] != tokens for answer, tokens in zip(answers, expected, strict=True)]
        assert all(changed)
        assert tracebacks(reader) == tracebacks(writer) == []
