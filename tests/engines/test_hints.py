"""Matches and stores carry the name and the hints of their request; after its end the pool gets its final hints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.faulty_pool import FaultyPool
from tests.engines.models import SEGMENT, prompt
from tokenlake.hints import Hints, Outlook
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine

CHAT = Hints(Outlook.GOES_ON, "chat", priority=1, ttl_s=60.0)


def asked(pool: FaultyPool) -> list[tuple[str | None, Hints | None, int]]:
    return [(each.request, each.hints, each.prompt_tokens) for each in pool.asked]


def test_name_and_hints_of_generate(model: Any, pool: FaultyPool) -> None:
    ids = torch.tensor([prompt(40), prompt(40, 1)])
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with TokenLakeEngine(model, pool, EngineOptions(mode="fetch", segment_tokens=SEGMENT)) as engine:
        expected = model.generate(ids, **settings)
        assert torch.equal(engine.generate(ids, request="r", hints=CHAT, **settings), expected)
        engine.flush()
    assert asked(pool) == [("r/0", CHAT, 40), ("r/1", CHAT, 40)]
    at_its_end = Hints(Outlook.GOES_ON, "chat", "length", 1, 60.0, output_tokens=12)
    # The segments of the prompts are stored first, then those that decode completed.
    assert pool.stored == [("r/0", CHAT), ("r/1", CHAT), ("r/0", at_its_end), ("r/1", at_its_end)]
    # One message for the segments of the prompt; those that decode completed were stored with the hints.
    assert pool.hinted == [(39 // SEGMENT, at_its_end)] * 2


def test_name_and_hints_of_prefill(model: Any, pool: FaultyPool) -> None:
    with TokenLakeEngine(model, pool, EngineOptions(mode="fetch", segment_tokens=SEGMENT)) as engine:
        engine.prefill(prompt(40), request="r", hints=CHAT)
        engine.flush()
        engine.prefill(prompt(40))
        engine.prefill(prompt(40, 1))
        engine.flush()
    assert asked(pool)[0] == ("r", CHAT, 40)
    names = [name for name, _, _ in asked(pool)]
    # A request without a name gets one, the same for its match and its store.
    assert len(set(names)) == 3
    assert all(names)
    assert [name for name, _ in pool.stored] == [names[0], names[2]]
    assert pool.hinted == []


@pytest.fixture
def first_token(model: Any) -> int:
    """The model's answer to `prompt(40)`."""
    ids = torch.tensor([prompt(40)])
    token: int = model.generate(ids, max_new_tokens=1, do_sample=False, eos_token_id=None)[0, 40].item()
    return token


def serve(model: Any, pool: FaultyPool, hints: Hints | None = None, **settings: Any) -> list[Hints]:
    """The hints that were sent after the end of a request of 40 tokens."""
    ids = torch.tensor([prompt(40)])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None} | settings
    with TokenLakeEngine(model, pool, EngineOptions(mode="fetch", segment_tokens=SEGMENT)) as engine:
        engine.generate(ids, hints=hints, **settings)
        engine.flush()
        assert engine.counts.failures == 0
    return [said for _, said in pool.hinted]


def test_a_sequence_that_ended_says_so(model: Any, pool: FaultyPool, first_token: int) -> None:
    assert serve(model, pool, eos_token_id=first_token) == [Hints(stop_reason="stop", output_tokens=1)]


def test_what_the_caller_says_of_the_end_counts(model: Any, pool: FaultyPool) -> None:
    said = Hints(Outlook.OVER, stop_reason="tool_use", output_tokens=7)
    assert serve(model, pool, said) == [said]


def test_why_a_callers_criterion_ended_it_is_not_known(model: Any, pool: FaultyPool) -> None:
    at_four = [lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= 44)]
    assert serve(model, pool, stopping_criteria=at_four) == [Hints(output_tokens=4)]


def test_one_message_tells_the_prompt_of_several_sequences(model: Any, pool: FaultyPool) -> None:
    settings: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3}
    assert serve(model, pool, **settings) == [Hints(stop_reason="length", output_tokens=12)]


def test_where_no_segment_is_full_nothing_is_said(model: Any, pool: FaultyPool) -> None:
    with TokenLakeEngine(model, pool, EngineOptions(mode="fetch", segment_tokens=SEGMENT)) as engine:
        engine.generate(torch.tensor([prompt(9)]), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert not pool.stored
    assert not pool.hinted


def test_the_end_is_told_after_the_segments_are_stored(
    model: Any, pool: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []
    keys = pool.prefix(prompt(40)).keys[: 39 // SEGMENT]
    monkeypatch.setattr(pool, "hint", lambda told, _: there.append(set(told) == set(keys) <= set(pool.segments)))
    serve(model, pool)
    assert there == [True]


def test_a_word_that_comes_late_follows_the_others(model: Any, pool: FaultyPool) -> None:
    ids = torch.tensor([prompt(40)])
    over = Hints(Outlook.OVER)
    with TokenLakeEngine(model, pool, EngineOptions(mode="fetch", segment_tokens=SEGMENT)) as engine:
        output = engine.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        engine.hint(output[0].tolist(), over)
    assert pool.hinted == [(2, Hints(stop_reason="length", output_tokens=12)), (3, over)]


def test_a_late_word_without_a_pool_is_lost(model: Any, pool: FaultyPool) -> None:
    pool.broken = {"prefix"}
    with TokenLakeEngine(model, pool, EngineOptions(mode="fetch", segment_tokens=SEGMENT)) as engine:
        engine.hint(prompt(40), CHAT)
        assert engine.counts.failures == 1
    with TokenLakeEngine(model) as alone:
        alone.hint(prompt(40), CHAT)
    assert pool.hinted == []
