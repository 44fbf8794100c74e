"""A request's name and hints go with what is read and stored for it, and how it ended follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.memory_pool import MemoryPool, as_pool
from tests.engines.models import family, prompt
from tokenlake.advice import Advice, Outlook
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine, layout_of

SEGMENT = 16
CHAT = Advice(Outlook.GOES_ON, "chat", priority=1, ttl_s=60.0)


@pytest.fixture(scope="module")
def model() -> Any:
    return family("llama-gqa")


@pytest.fixture
def pool(model: Any) -> MemoryPool:
    return MemoryPool(layout_of(model, segment_tokens=SEGMENT))


def test_name_and_hints_of_generate(model: Any, pool: MemoryPool) -> None:
    ids = torch.tensor([prompt(40), prompt(40, 1)])
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with TokenLakeEngine(model, as_pool(pool), EngineOptions(mode="fetch", segment_tokens=SEGMENT)) as engine:
        expected = model.generate(ids, **settings)
        assert torch.equal(engine.generate(ids, request="r", advice=CHAT, **settings), expected)
        engine.flush()
    assert pool.asked == [("r/0", CHAT, 40), ("r/1", CHAT, 40)]
    at_its_end = Advice(Outlook.GOES_ON, "chat", "length", 1, 60.0)
    # The prompts' segments first, then what decode completed.
    assert pool.stored == [("r/0", CHAT), ("r/1", CHAT), ("r/0", at_its_end), ("r/1", at_its_end)]
    # Of all full segments, the prompt's and the new ones.
    assert pool.advised == [((40 + 12 - 1) // SEGMENT, at_its_end)] * 2


def test_name_and_hints_of_prefill(model: Any, pool: MemoryPool) -> None:
    with TokenLakeEngine(model, as_pool(pool), EngineOptions(mode="fetch", segment_tokens=SEGMENT)) as engine:
        engine.prefill(prompt(40), request="r", advice=CHAT)
        engine.flush()
        engine.prefill(prompt(40))
        engine.prefill(prompt(40, 1))
        engine.flush()
    assert pool.asked[0] == ("r", CHAT, 40)
    names = [name for name, _, _ in pool.asked]
    # Who gives no name gets one of its own, the same for what is read and what is stored.
    assert len(set(names)) == 3
    assert all(names)
    assert [name for name, _ in pool.stored] == [names[0], names[2]]
    assert pool.advised == []


def test_a_sequence_that_ended_says_so(model: Any, pool: MemoryPool) -> None:
    ids = torch.tensor([prompt(40)])
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    first = model.generate(ids, **settings, eos_token_id=None)[0, 41].item()
    with TokenLakeEngine(model, as_pool(pool), EngineOptions(mode="fetch", segment_tokens=SEGMENT)) as engine:
        engine.generate(ids, **settings, eos_token_id=first)
    assert [advice.stop_reason for _, advice in pool.advised] == ["stop"]
