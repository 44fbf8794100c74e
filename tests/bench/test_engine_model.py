"""The roofline: against figures computed by hand, and against published measurements at batch 1
(docs/simulation.md)."""

from __future__ import annotations

import dataclasses

import pytest

from tokenlake.errors import ConfigurationError
from tokenlake.opaque_layout import understood
from tokenlake_bench.engine_model import GPUS, MODELS, Chunk, EngineModel, Gpu, Model, gpus_named, model_named
from tokenlake_bench.engine_model.layers import FeedForward, GroupedAttention
from tokenlake_server.start.models import MODELS as CACHES

LLAMA_2_70B = dataclasses.replace(MODELS["llama-3-70b"], vocabulary=32_000)
LLAMA_3_70B_FP8 = dataclasses.replace(MODELS["llama-3-70b"], weight_bytes=1, fp8=True)

TINY = Model("tiny", 4, 10, ((2, GroupedAttention(4, 2, 1, 2)),), ((2, FeedForward(4, 8)),))
"""Per layer 48 parameters of attention and 96 of the feed-forward network; 40 in the output layer; 16 bytes of cache
per token."""

PLAIN = Gpu(
    name="plain",
    memory_bytes=1e4,
    memory_rate=1000.0,
    flops=2000.0,
    fp8_flops=4000.0,
    link_rate=100.0,
    network_rate=50.0,
    host_rate=25.0,
    compute_efficiency=1.0,
    fp8_efficiency=1.0,
    memory_efficiency=1.0,
    link_efficiency=1.0,
    network_efficiency=1.0,
    host_efficiency=1.0,
    layer_s=0.5,
    reduce_s=0.25,
)


def test_what_the_tiny_model_weighs() -> None:
    assert TINY.active_parameters == TINY.common_parameters == 2 * (48 + 96)
    assert TINY.output_parameters == 40
    assert TINY.stored_parameters == 2 * (48 + 96) + 80
    assert TINY.cache_bytes == 2 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("name", "cache_bytes", "billions"),
    [
        ("llama-2-7b", 524_288, 6.74),
        ("llama-3-8b", 131_072, 8.03),
        ("llama-3-70b", 327_680, 70.55),
    ],
)
def test_models_weigh_what_was_published(name: str, cache_bytes: int, billions: float) -> None:
    model = model_named(name)
    assert model.cache_bytes == cache_bytes
    assert model.stored_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_decode_step_by_hand() -> None:
    """Matrices: 656 flops in 0.328 s, 656 bytes in 0.656 s. Attention: 2 layers x 16 flops x 100 in 1.6 s, 1,600 bytes
    in 1.6 s. Constant: 1 s."""
    assert EngineModel(TINY, PLAIN).decode_s(1, 100) == pytest.approx(0.656 + 1.6 + 1.0)


def test_a_prefill_by_hand() -> None:
    """Matrices: 10 x 576 + 80 flops in 2.92 s, more than 0.656 s. Attention: 10 x 20 + 55 pairs, 32 flops each in
    4.08 s, more than 480 bytes in 0.48 s."""
    engine = EngineModel(TINY, PLAIN)
    assert engine.prefill_s(10, 20) == pytest.approx(2.92 + 4.08 + 1.0)
    unfinished = engine.step_s((Chunk(10, 20, last=False),), 0, 0)
    assert unfinished == pytest.approx(2.88 + 4.08 + 1.0)


def test_a_mixed_step_reads_the_weights_once() -> None:
    """Matrices: 12 tokens and 3 sampled: 7,152 flops in 3.576 s."""
    mixed = EngineModel(TINY, PLAIN).step_s((Chunk(10, 20),), 2, 100)
    assert mixed == pytest.approx(3.576 + 4.08 + 1.6 + 1.0)


def test_tensor_parallelism_splits_work_and_adds_reductions() -> None:
    """Each of the two GPUs has half of the matrices (0.656 s) and, since there is one KV head, the whole cache: 1.6 s
    of memory, 0.8 s of arithmetic. Four all-reduces of 8 bytes x 2 x 1/2 at 100 bytes/s take 0.25 s more each."""
    assert EngineModel(TINY, PLAIN, 2).decode_s(1, 100) == pytest.approx(0.328 + 1.6 + 4 * (0.08 + 0.25) + 1.0)


def test_copies_and_the_empty_step() -> None:
    engine = EngineModel(TINY, PLAIN)
    assert engine.host_copy_s(100) == pytest.approx(1_600 / 25)
    # Both GPUs hold the one KV head, and each copies it over its own link.
    assert EngineModel(TINY, PLAIN, 2).host_copy_s(100) == pytest.approx(1_600 / 25)
    assert engine.step_s((), 0, 0) == 0.0


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"),
    [
        ("llama-2-7b", "a100-80g", 1),
        ("llama-3-70b", "a100-80g", 4),
        ("llama-3-70b", "h200", 2),
    ],
)
def test_an_instance_has_as_many_gpus_as_its_weights_need(model: str, gpu: str, gpus: int) -> None:
    assert EngineModel.fitting(MODELS[model], GPUS[gpu]).gpus == gpus


def test_the_cache_has_the_memory_beside_the_weights() -> None:
    assert EngineModel(MODELS["llama-3-8b"], GPUS["a100-80g"]).cache_tokens == pytest.approx(427_000, abs=500)
    wide = EngineModel(MODELS["llama-3-8b"], GPUS["a100-80g"], 16)
    free = 16 * 0.9 * 80e9 - wide.model.stored_bytes
    assert wide.cache_tokens == int(free / (2 * wide.model.cache_bytes)), "two GPUs hold each cache element"


def test_instances_are_connected_by_all_their_links() -> None:
    engine = EngineModel(MODELS["llama-3-8b"], GPUS["a100-80g"], 4)
    assert engine.network_rate() == 4 * 25e9 * 0.8
    assert engine.network_rate(nvlink=True) == pytest.approx(4 * 300e9 * 0.7)


A100, H100 = GPUS["a100-80g"], GPUS["h100"]


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "prompt", "published_s"),
    [
        (MODELS["llama-2-7b"], A100, 1, 2048, 0.139),
        (LLAMA_2_70B, A100, 4, 2048, 0.402),
        (LLAMA_3_70B_FP8, H100, 2, 5000, 0.4068),
        (LLAMA_3_70B_FP8, H100, 2, 500, 0.0478),
    ],
)
def test_first_tokens_as_published(model: Model, gpu: Gpu, gpus: int, prompt: int, published_s: float) -> None:
    assert EngineModel(model, gpu, gpus).prefill_s(prompt) == pytest.approx(published_s, rel=0.12)


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "requests", "context", "published_s"),
    [
        (MODELS["llama-2-7b"], A100, 1, 1, 192, 0.00969),
        (MODELS["llama-2-7b"], A100, 1, 1, 3072, 0.0106),
        (MODELS["llama-2-7b"], A100, 1, 16, 3072, 0.025),
        (MODELS["llama-2-7b"], A100, 1, 1, 100, 1 / 104.9),
        (MODELS["llama-2-7b"], A100, 8, 1, 100, 1 / 328.43),
        (LLAMA_2_70B, A100, 4, 1, 192, 0.0294),
        (LLAMA_2_70B, A100, 2, 1, 100, 1 / 21.32),
        (LLAMA_2_70B, A100, 4, 1, 100, 1 / 38.01),
        (LLAMA_2_70B, A100, 8, 1, 100, 1 / 62.50),
        (LLAMA_3_70B_FP8, H100, 2, 1, 5250, 0.01858),
        (LLAMA_3_70B_FP8, H100, 2, 1, 1500, 0.01891),
    ],
)
def test_decode_steps_as_published(
    model: Model, gpu: Gpu, gpus: int, requests: int, context: int, published_s: float
) -> None:
    step = EngineModel(model, gpu, gpus).decode_s(requests, requests * context)
    assert step == pytest.approx(published_s, rel=0.12)


def test_gpus_are_named_alone_or_several() -> None:
    assert gpus_named("H100x4") == (GPUS["h100"], 4)
    assert gpus_named("a100") == (GPUS["a100-80g"], None)
    assert gpus_named("mi300x") == (GPUS["mi300x"], None)
    assert gpus_named("MI300Xx8") == (GPUS["mi300x"], 8)
    assert gpus_named("L40S") == (GPUS["l40s"], None)
    known = "a100-80g, h100, h200, b200, l40s, mi300x, or several of one as H100x4"
    for text in ("tpu", "h100x", "h100x0", "x4", ""):
        with pytest.raises(ConfigurationError, match=f"'gpu' is '{text}'; expected {known}"):
            gpus_named(text)
    with pytest.raises(ConfigurationError, match="tensor_parallel"):
        EngineModel(TINY, PLAIN, 3)


@pytest.mark.parametrize(
    ("name", "simulated"),
    [
        ("Llama-2-7B", "llama-2-7b"),
        ("Llama-3.1-8B", "llama-3-8b"),
        ("Llama-3-70B", "llama-3-70b"),
    ],
)
def test_a_token_takes_as_much_as_the_pool_stores_of_it(name: str, simulated: str) -> None:
    layout = understood(next(model for model in CACHES if model.name == name).layout())
    assert layout.segment_bytes == layout.segment_tokens * model_named(simulated).cache_bytes
