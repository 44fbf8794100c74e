"""Greedy tokens of an engine with the pool are those of the model alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engines.faulty_pool import FaultyPool
from tests.engines.models import FAMILIES, SEGMENT, build, family, padded, prompt
from tokenlake.wire import Code
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine, layout_of

NEW = 10


def engine_of(model: Any, pool: FaultyPool, **options: Any) -> TokenLakeEngine:
    settings = {"window": 2, "prefill_chunk": 24, **options}
    return TokenLakeEngine(model, pool, EngineOptions(**settings))


def greedy(generate: Callable[..., Any], ids: Any, mask: Any = None, **arguments: Any) -> list[list[int]]:
    settings = {"max_new_tokens": NEW, "do_sample": False, **arguments}
    output: list[list[int]] = generate(ids, attention_mask=mask, **settings).tolist()
    return output


@pytest.mark.parametrize("name", FAMILIES)
def test_cold_and_warm_give_the_models_tokens(name: str) -> None:
    model = family(name)
    pool = FaultyPool(layout_of(model, segment_tokens=SEGMENT))
    ids, mask = padded([prompt(5 * SEGMENT + 3), prompt(7, 1), prompt(2 * SEGMENT, 2)])
    expected = greedy(model.generate, ids, mask)
    with engine_of(model, pool) as engine:
        assert greedy(engine.generate, ids, mask) == expected
        assert engine.counts.tokens_hit == 0
        engine.flush()
        assert greedy(engine.generate, ids, mask) == expected
        counts = engine.counts
    # The last token of the third prompt is left to compute, so its second segment is no hit.
    assert counts.tokens_hit == (5 + 0 + 1) * SEGMENT
    assert counts.tokens_asked == counts.tokens_hit + counts.tokens_computed
    assert counts.failures == counts.requests_without_pool == 0
    assert all(not torch.isnan(torch.from_numpy(s.view("f4"))).any() for s in pool.segments.values())


@pytest.mark.parametrize("length", [1, 2, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT, 2 * SEGMENT + 1, 9 * SEGMENT])
def test_prompts_that_end_near_a_segments_end(model: Any, pool: FaultyPool, length: int) -> None:
    ids = torch.tensor([prompt(length)])
    expected = greedy(model.generate, ids)
    with engine_of(model, pool) as engine:
        assert greedy(engine.generate, ids) == expected
        engine.flush()
        assert greedy(engine.generate, ids) == expected
        assert engine.counts.tokens_hit == (length - 1) // SEGMENT * SEGMENT
        assert engine.counts.failures == 0


def test_the_next_turn_hits_segments_of_decode(model: Any, pool: FaultyPool) -> None:
    ids = torch.tensor([prompt(2 * SEGMENT + 9)])
    with engine_of(model, pool) as engine:
        answer = greedy(engine.generate, ids, max_new_tokens=3 * SEGMENT, eos_token_id=None)
        engine.flush()
        in_cache = len(answer[0]) - 1
        assert len(pool.segments) == in_cache // SEGMENT
        turn = torch.tensor([answer[0] + prompt(5, 3)])
        expected = greedy(model.generate, turn)
        before = engine.counts
        assert greedy(engine.generate, turn) == expected
        assert engine.counts.tokens_hit - before.tokens_hit == in_cache // SEGMENT * SEGMENT


def test_nothing_after_the_end_of_a_row_is_stored(model: Any, pool: FaultyPool) -> None:
    rows = [prompt(SEGMENT - 2, 4), prompt(SEGMENT + 2, 5)]
    ids, mask = padded(rows)
    alone = greedy(model.generate, ids, mask, max_new_tokens=4 * SEGMENT, eos_token_id=None)
    # The first row ends with its third new token; the other goes on.
    end = alone[0][ids.shape[1] + 2]
    arguments = {"max_new_tokens": 4 * SEGMENT, "eos_token_id": end}
    expected = greedy(model.generate, ids, mask, **arguments)
    with engine_of(model, pool) as engine:
        assert greedy(engine.generate, ids, mask, **arguments) == expected
        engine.flush()
    for row, prompt_tokens, padding in zip(expected, rows, (4, 0), strict=True):
        tokens = row[padding:-1]
        ends = [i for i in range(len(prompt_tokens), len(tokens)) if tokens[i] == end]
        kept = tokens[: ends[0] + 1] if ends else tokens
        assert pool.match(pool.prefix(tokens).keys).hits == len(kept) // SEGMENT


@pytest.mark.parametrize("name", FAMILIES)
def test_flipped_bytes_change_the_tokens(name: str) -> None:
    model = family(name)
    pool = FaultyPool(layout_of(model, segment_tokens=SEGMENT))
    ids = torch.tensor([prompt(6 * SEGMENT, 6)])
    with engine_of(model, pool) as engine:
        expected = greedy(engine.generate, ids)
        engine.flush()
        pool.flip()
        assert greedy(engine.generate, ids) != expected


def test_each_refusal_code_is_logged_once(model: Any, pool: FaultyPool, caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(model, pool) as engine, caplog.at_level(logging.WARNING, "tokenlake"):
        for seed, code in enumerate((Code.WRITE_BUDGET, Code.NO_SLOT, Code.WRITE_BUDGET)):
            pool.refuse = code
            greedy(engine.generate, torch.tensor([prompt(4 * SEGMENT + 1, seed)]), max_new_tokens=1)
            engine.flush()
        assert engine.counts.tokens_stored == 3 * SEGMENT
        assert engine.counts.tokens_refused == engine.counts.tokens_not_stored == 9 * SEGMENT
        assert engine.counts.failures == 0
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "WRITE_BUDGET" in said[0]
    assert "NO_SLOT" in said[1]


def test_a_failed_pool_is_not_used_for_a_while(model: Any, pool: FaultyPool) -> None:
    ids = torch.tensor([prompt(40)])
    with engine_of(model, pool) as engine:
        pool.broken = {"match"}
        greedy(engine.generate, ids)
        greedy(engine.generate, ids)
        assert engine.counts.failures == 1
        assert engine.counts.requests_without_pool == 1


def test_segments_lost_before_the_fetch_are_computed(model: Any, pool: FaultyPool) -> None:
    ids = torch.tensor([prompt(6 * SEGMENT)])
    expected = greedy(model.generate, ids)
    with engine_of(model, pool) as engine:
        greedy(engine.generate, ids)
        engine.flush()
        pool.lose_after = 1
        assert greedy(engine.generate, ids) == expected
        assert engine.counts.tokens_hit == SEGMENT


def test_a_missing_mask_is_inferred_from_the_padding(model: Any, pool: FaultyPool) -> None:
    ids, _ = padded([prompt(40), prompt(9, 1)])
    expected = greedy(model.generate, ids)
    with engine_of(model, pool) as engine:
        assert greedy(engine.generate, ids) == expected
        assert engine.counts.requests == 2


def test_sampling_with_several_sequences(model: Any, pool: FaultyPool) -> None:
    ids, mask = padded([prompt(40), prompt(9, 1)])
    settings: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 20, "top_k": 5}
    torch.manual_seed(5)
    expected = model.generate(ids, attention_mask=mask, **settings).tolist()
    with engine_of(model, pool) as engine:
        for _ in range(2):
            torch.manual_seed(5)
            assert engine.generate(ids, attention_mask=mask, **settings).tolist() == expected
            engine.flush()
        assert engine.counts.tokens_hit == 2 * SEGMENT
        assert engine.counts.failures == 0


def test_a_long_answer_enlarges_the_cache(model: Any, pool: FaultyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenlake_client.engines.transformers.engine.MAX_EXPECTED_TOKENS", 3)
    monkeypatch.setattr("tokenlake_client.engines.transformers.cache.SPARE_TOKENS", 4)
    ids = torch.tensor([prompt(20)])
    settings = {"max_new_tokens": 40, "eos_token_id": None}
    expected = greedy(model.generate, ids, **settings)
    with engine_of(model, pool) as engine:
        assert greedy(engine.generate, ids, **settings) == expected
        engine.flush()
        assert len(pool.segments) == 59 // SEGMENT


def test_the_returned_cache_can_be_cut_and_continued(model: Any, pool: FaultyPool) -> None:
    ids = torch.tensor([prompt(20)])
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(ids, **settings)
    with engine_of(model, pool) as engine:
        output = engine.generate(ids, **settings)
        assert torch.equal(output.sequences, plain.sequences)
        other = torch.tensor([prompt(6, 8)])
        results = []
        for cache in (plain.past_key_values, output.past_key_values):
            before = [layer.keys.clone() for layer in cache.layers]
            held = [layer.keys for layer in cache.layers]
            cache.crop(-3)
            with torch.no_grad():
                results.append(model(input_ids=other, past_key_values=cache).logits)
            assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))
        assert torch.allclose(*results, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"use_cache": False}, "use_cache"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ],
)
def test_unserved_calls_are_named(
    model: Any, pool: FaultyPool, arguments: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.tensor([prompt(40)])
    settings = {"max_new_tokens": 4, "do_sample": False, **arguments}
    expected = model.generate(ids, **settings)
    with engine_of(model, pool) as engine, caplog.at_level(logging.WARNING, "tokenlake"):
        output = engine.generate(ids, **settings)
        assert engine.counts.requests_without_pool == 1
        assert engine.counts.failures == 0
    sequences = [o if torch.is_tensor(o) else o.sequences for o in (output, expected)]
    assert torch.equal(*sequences)
    assert named in caplog.text


def test_training_and_autocast_are_not_shared() -> None:
    model = family("gpt2")
    pool = FaultyPool(layout_of(model, segment_tokens=SEGMENT))
    tokens = prompt(40)
    with engine_of(model, pool) as engine:
        model.train()
        engine.prefill(tokens)
        greedy(engine.generate, torch.tensor([tokens]))
        model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            greedy(engine.generate, torch.tensor([tokens]))
        model._hf_peft_config_loaded = True
        engine.prefill(tokens)
        model._hf_peft_config_loaded = False
        engine.flush()
        assert not pool.segments
        engine.prefill(tokens)
        engine.flush()
        assert len(pool.segments) == 2


def test_a_model_that_was_cast_is_served_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = build(*FAMILIES["llama-gqa"])
    pool = FaultyPool(layout_of(model, segment_tokens=SEGMENT))
    row = prompt(2 * SEGMENT + 1, 9)
    with engine_of(model, pool) as engine:
        engine.prefill(row)
        assert engine.flush(30)
        stored = dict(pool.segments)
        model.to(torch.bfloat16)
        ids, mask = padded([row])
        assert greedy(engine.generate, ids, mask) == greedy(model.generate, ids, mask)
        other = prompt(2 * SEGMENT + 1, 10)
        assert engine.prefill(other).cache.layers[0].keys.dtype == torch.bfloat16
        assert engine.flush(30)
        assert pool.segments.keys() == stored.keys()
    assert "bfloat16" in caplog.text


def test_right_padding_and_given_caches_go_to_the_model(model: Any, pool: FaultyPool) -> None:
    ids = torch.tensor([prompt(20), prompt(20, 1)])
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    with engine_of(model, pool) as engine:
        assert greedy(engine.generate, ids, mask) == greedy(model.generate, ids, mask)
        caches = [model(input_ids=ids[:, :10], use_cache=True).past_key_values for _ in range(2)]
        given, alone = (
            greedy(g, ids, past_key_values=c) for g, c in zip((engine.generate, model.generate), caches, strict=True)
        )
        assert given == alone
        assert engine.counts.requests_without_pool == 2


def test_a_refused_model_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    from tests.engines.models import LLAMA, build

    sliding = build("MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": 8})
    ids = torch.tensor([prompt(40)])
    with caplog.at_level(logging.WARNING, "tokenlake"), TokenLakeEngine(sliding, "/nowhere") as engine:
        for _ in range(2):
            assert greedy(engine.generate, ids) == greedy(sliding.generate, ids)
        assert engine.layout is None
        assert engine.counts.requests_without_pool == 2
    assert caplog.text.count("'sliding_window'") == 1


def test_a_pool_of_another_layout_is_not_used(model: Any) -> None:
    other = FaultyPool(layout_of(family("llama-mha"), segment_tokens=SEGMENT))
    ids = torch.tensor([prompt(40)])
    with engine_of(model, other) as engine:
        assert greedy(engine.generate, ids) == greedy(model.generate, ids)
        engine.flush()
        assert engine.counts.failures == 1
    assert not other.segments


def test_prefill_continues_with_the_model(model: Any, pool: FaultyPool) -> None:
    tokens = prompt(4 * SEGMENT + 2)
    ids = torch.tensor([tokens])
    expected = greedy(model.generate, ids)
    with engine_of(model, pool) as engine:
        for hit in (0, 4 * SEGMENT):
            result = engine.prefill(tokens)
            assert (result.tokens_hit, result.tokens_computed) == (hit, len(tokens) - hit)
            assert result.cache.get_seq_length() == len(tokens) - 1
            assert greedy(model.generate, ids, past_key_values=result.cache) == expected
            engine.flush()
    with TokenLakeEngine(model) as engine:
        assert engine.prefill(tokens).tokens_hit == 0


def test_new_weights_share_nothing_with_the_old_ones(pool: FaultyPool) -> None:
    model = family("llama-gqa")
    ids = torch.tensor([prompt(40)])
    with engine_of(model, pool) as engine:
        greedy(engine.generate, ids)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.5)
        expected = greedy(model.generate, ids)
        assert engine.layout is not None
        old = engine.layout
        engine.new_weights("step 1")
        assert greedy(engine.generate, ids) == expected
        assert engine.counts.tokens_hit == 0
        assert engine.layout.fingerprint() != old.fingerprint()
        second = FaultyPool(engine.layout)
        engine.new_weights("step 1", second)
        for hit in (0, 2 * SEGMENT):
            assert greedy(engine.generate, ids) == expected
            assert engine.counts.tokens_hit == hit
            engine.flush()


def test_salts_and_adapters_do_not_share(model: Any, pool: FaultyPool) -> None:
    ids = torch.tensor([prompt(40)])
    for options in ({}, {"salt": "a"}, {"adapter": "b"}):
        with engine_of(model, pool, **options) as engine:
            greedy(engine.generate, ids)
            assert engine.counts.tokens_hit == 0
            engine.flush()
    assert len(pool.segments) == 3 * ((40 + NEW - 1) // SEGMENT)


def test_bfloat16_bytes_survive_the_round_trip() -> None:
    model = family("llama-gqa", torch.bfloat16)
    pool = FaultyPool(layout_of(model, segment_tokens=SEGMENT))
    tokens = prompt(4 * SEGMENT + 1)
    with engine_of(model, pool) as engine:
        cold = engine.prefill(tokens)
        engine.flush()
        warm = engine.prefill(tokens)
        assert warm.tokens_hit == 4 * SEGMENT
    for computed, loaded in zip(cold.cache.layers, warm.cache.layers, strict=True):
        assert torch.equal(computed.keys.view(torch.uint16), loaded.keys.view(torch.uint16))
        assert torch.equal(computed.values.view(torch.uint16), loaded.values.view(torch.uint16))
