"""Models from their `config.json`: parameters beside the published counts, and the errors of files that are not
known. The fields are those of the published files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tokenlake.errors import ConfigurationError
from tokenlake_bench.cache_hit import CacheHitArguments
from tokenlake_bench.engine_model import GPUS, MODELS, EngineModel, Model, model_named
from tokenlake_bench.engine_model.config_file import FAMILIES, model_of
from tokenlake_bench.engine_model.roofline import pairs
from tokenlake_bench.simulation.pooled import engine_layout
from tokenlake_server.start.models import MODELS as CACHES


class Published(NamedTuple):
    """A published model: its number of parameters, an integer where it is that of the published weights and rounded
    where only the name of the model has it, and the number that are active per token in billions."""

    parameters: float
    config: dict[str, Any]
    active: float | None = None
    cache: str | None = None
    """Its name in `tokenlake config models`."""


SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size"),
)


def decoder(kind: str, /, *sizes: int, **more: Any) -> dict[str, Any]:
    """The fields of a file: its type, those of `SIZES`, and `more`."""
    return {"model_type": kind, "tie_word_embeddings": False, **dict(zip(SIZES, sizes, strict=True)), **more}


MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
ALTERNATING = ["sliding_attention", "full_attention"]

PUBLISHED = {
    "Llama-2-7B": Published(6_738_415_616, decoder("llama", 4096, 32, 32, 32, 11_008, 32_000), cache="Llama-2-7B"),
    "Llama-3.1-8B": Published(8_030_261_248, decoder("llama", 4096, 32, 32, 8, 14_336, 128_256), cache="Llama-3.1-8B"),
    "Llama-3.1-70B": Published(70_553_706_496, decoder("llama", 8192, 80, 64, 8, 28_672, 128_256), cache="Llama-3-70B"),
    "Llama-3.2-1B": Published(
        1_235_814_400,
        decoder("llama", 2048, 16, 32, 8, 8192, 128_256, head_dim=64, tie_word_embeddings=True),
        cache="Llama-3.2-1B",
    ),
    "Qwen2.5-7B": Published(7_615_616_512, decoder("qwen2", 3584, 28, 28, 4, 18_944, 152_064)),
    "Qwen2.5-72B": Published(72_706_203_648, decoder("qwen2", 8192, 80, 64, 8, 29_568, 152_064)),
    "Qwen3-8B": Published(
        8_190_735_360, decoder("qwen3", 4096, 36, 32, 8, 12_288, 151_936, head_dim=128), cache="Qwen3-8B"
    ),
    "Qwen3-32B": Published(
        32_762_123_264, decoder("qwen3", 5120, 64, 64, 8, 25_600, 151_936, head_dim=128), cache="Qwen3-32B"
    ),
    "Qwen3-30B-A3B": Published(
        30_532_122_624,
        decoder(
            *("qwen3_moe", 2048, 48, 32, 4, 6144, 151_936),
            **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            **{"decoder_sparse_step": 1, "mlp_only_layers": []},
        ),
        active=3.3,
        cache="Qwen3-30B-A3B",
    ),
    "Qwen3-235B-A22B": Published(
        235_093_634_560,
        decoder(
            *("qwen3_moe", 4096, 94, 64, 4, 12_288, 151_936),
            **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
        ),
        active=22,
        cache="Qwen3-235B-A22B",
    ),
    "Qwen1.5-MoE-A2.7B": Published(
        14_315_784_192,
        decoder(
            *("qwen2_moe", 2048, 24, 16, 16, 5632, 151_936),
            **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
            **{"shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1},
        ),
        active=2.7,
    ),
    "Mistral-7B-v0.3": Published(
        7_248_023_552, decoder("mistral", 4096, 32, 32, 8, 14_336, 32_768, sliding_window=None)
    ),
    "Mistral-Small-24B": Published(
        23_572_403_200, decoder("mistral", 5120, 40, 32, 8, 32_768, 131_072, head_dim=128), cache="Mistral-Small-24B"
    ),
    "Mixtral-8x7B": Published(
        46_702_792_704,
        decoder(
            "mixtral", 4096, 32, 32, 8, 14_336, 32_000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
        ),
        active=12.9,
    ),
    "Gemma-7B": Published(
        8_537_680_896,
        decoder("gemma", 3072, 28, 16, 16, 24_576, 256_000, head_dim=256, tie_word_embeddings=True),
    ),
    "Gemma-2-9B": Published(
        9_241_705_984,
        decoder(
            *("gemma2", 3584, 42, 16, 8, 14_336, 256_000),
            **{"head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True},
        ),
    ),
    "Gemma-3-27B": Published(
        27_009_346_304,
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 5376,
                "intermediate_size": 21_504,
                "num_attention_heads": 32,
                "num_hidden_layers": 62,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
        },
        cache="Gemma-3-27B",
    ),
    "Phi-3-mini-4k": Published(3_821_079_552, decoder("phi3", 3072, 32, 32, 32, 8192, 32_064, sliding_window=2047)),
    "Phi-4": Published(14_659_507_200, decoder("phi3", 5120, 40, 40, 10, 17_920, 100_352, sliding_window=None)),
    "DeepSeek-V2-Lite": Published(
        15_706_484_224,
        decoder(
            *("deepseek_v2", 2048, 27, 16, 16, 10_944, 102_400),
            **(MLA | {"q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}),
            **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        ),
        active=2.4,
    ),
    "DeepSeek-V3": Published(
        671_026_419_200,
        decoder(
            *("deepseek_v3", 7168, 61, 128, 128, 18_432, 129_280),
            **(MLA | {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}),
            **{"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1},
            quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
        ),
        active=37,
        cache="DeepSeek-V3",
    ),
    "gpt-oss-20b": Published(
        20_914_757_184,
        decoder(
            *("gpt_oss", 2880, 24, 64, 8, 2880, 201_088),
            **{"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
            **{"attention_bias": True, "layer_types": ALTERNATING * 12},
            quantization_config={"quant_method": "mxfp4"},
        ),
        active=3.6,
        cache="gpt-oss-20b",
    ),
    "gpt-oss-120b": Published(
        116_829_156_672,
        decoder(
            *("gpt_oss", 2880, 36, 64, 8, 2880, 201_088),
            **{"head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128},
            **{"attention_bias": True, "layer_types": ALTERNATING * 18},
            quantization_config={"quant_method": "mxfp4"},
        ),
        active=5.1,
        cache="gpt-oss-120b",
    ),
    "GLM-4.5-Air": Published(
        106e9,
        decoder(
            *("glm4_moe", 4096, 46, 96, 8, 10_944, 151_552),
            **{"head_dim": 128, "attention_bias": True, "use_qk_norm": False, "first_k_dense_replace": 1},
            **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
        ),
        active=12,
        cache="GLM-4.5-Air",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_published_parameters(name: str) -> None:
    published = PUBLISHED[name]
    model = model_of(published.config, name)
    if isinstance(published.parameters, int):
        assert model.stored_parameters == published.parameters
    else:
        assert model.stored_parameters == pytest.approx(published.parameters, rel=0.01)
    if published.active is not None:
        # Some publishers count the embedding and the output layer among the active parameters, some do not.
        least, most = model.active_parameters / 1e9, (model.active_parameters + 2 * model.output_parameters) / 1e9
        assert 0.98 * least < published.active < 1.02 * most


def of(name: str) -> Model:
    return model_of(PUBLISHED[name].config, name)


@pytest.mark.parametrize("name", [name for name, each in PUBLISHED.items() if each.cache])
def test_a_token_takes_what_the_daemons_table_says(name: str) -> None:
    """The cache of a token is that of `tokenlake config models`: layers with a window apart."""
    cache = next(each for each in CACHES if each.name == PUBLISHED[name].cache)
    elements = cache.head_dim if cache.latent else 2 * cache.kv_heads * cache.head_dim
    model = of(name)
    assert model.cache_bytes == 2 * cache.layers * elements
    layout = engine_layout(EngineModel.fitting(model, GPUS["h200"]), 256)
    assert layout.segment_bytes == 256 * model.cache_bytes


@pytest.mark.parametrize(
    ("name", "dense", "whole"),
    [
        ("Gemma-2-9B", 42, 21),
        ("Gemma-3-27B", 62, 10),
        ("gpt-oss-20b", 0, 12),
        ("Phi-3-mini-4k", 32, 0),
        ("DeepSeek-V3", 3, 61),
    ],
)
def test_layers_are_of_their_kinds(name: str, dense: int, whole: int) -> None:
    model = of(name)
    assert model.layers - model.mixture_layers == dense
    assert sum(count for count, part in model.attention if not part.window) == whole
    assert model.cache_layers == (whole or model.layers), "where all layers have a window, all of them are cached"


@pytest.mark.parametrize(
    ("settings", "bytes_each", "fp8"),
    [
        ({"quant_method": "fp8"}, 1.0, True),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, (4 + 20 / 128) / 8, False),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0, False),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0, True),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}, "input_activations": None}},
            },
            (4 + 16 / 32) / 8,
            False,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}},
            },
            1.0,
            True,
        ),
    ],
)
def test_quantised_weights_take_their_bytes(settings: dict[str, Any], bytes_each: float, fp8: bool) -> None:
    plain, quantised = PUBLISHED["Llama-3.1-8B"].config, {"quantization_config": settings}
    model = model_of(plain | quantised, "model")
    assert (model.weight_bytes, model.fp8) == (bytes_each, fp8)
    outside = 2 * model.output_parameters + model.small_parameters
    assert model.stored_bytes == pytest.approx(model.common_parameters * bytes_each + 2 * outside)


def test_experts_are_read_as_tokens_choose_them() -> None:
    """One token reads the experts that it chooses; many read nearly all of them."""
    model = of("Mixtral-8x7B")
    outside = 2 * model.output_parameters + model.small_parameters
    assert model.bytes_read(1) == pytest.approx(2 * (model.active_parameters + model.output_parameters))
    assert model.bytes_read(100) == pytest.approx(2 * (model.stored_parameters - outside + model.output_parameters))
    assert of("gpt-oss-120b").stored_bytes / 1e9 == pytest.approx(65.2, abs=0.1), "the published files have 65.3 GB"


def test_a_window_bounds_the_attention() -> None:
    """Behind a window further tokens cost no attention; the pairs of a prefill that crosses it are those by hand."""
    config = decoder("mistral", 64, 2, 2, 1, 128, 100, sliding_window=100)
    windowed, whole = (
        EngineModel(model_of(each, "m"), GPUS["h100"]) for each in (config, config | {"sliding_window": None})
    )
    assert windowed.decode_s(1, 100) == whole.decode_s(1, 100)
    assert windowed.decode_s(4, 100_000) == windowed.decode_s(4, 400) < whole.decode_s(4, 100_000)
    assert windowed.prefill_s(10_000, 95) < whole.prefill_s(10_000, 95)
    part = windowed.model.attention[0][1]
    assert pairs(10, 95, part) == sum(min(100, 95 + each) for each in range(1, 11))
    assert pairs(10, 300, part) == 1_000
    assert pairs(3, 20, part) == 21 + 22 + 23


def test_deepseek_decodes_as_published() -> None:
    """DeepSeek-R1 in FP8 on 8 H200 with 4 requests of about 5,000 tokens (docs/simulation.md [5])."""
    assert EngineModel(of("DeepSeek-V3"), GPUS["h200"], 8).decode_s(4, 4 * 5000) == pytest.approx(0.01093, rel=0.12)
    assert EngineModel.fitting(of("DeepSeek-V3"), GPUS["h200"]).gpus == 8


# -- files and errors


def test_a_path_of_a_file_or_directory_names_a_model(tmp_path: Path) -> None:
    directory = tmp_path / "My-8B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(PUBLISHED["Llama-3.1-8B"].config))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(PUBLISHED["Qwen3-8B"].config))
    assert model_named(str(directory)).name == model_named(str(directory / "config.json")).name == "My-8B"
    assert model_named(str(other)).name == "other"
    arguments = CacheHitArguments(model=str(directory), gpu="H100x4", capacity_tokens=100_000)
    engine = arguments.engine()
    assert (engine.gpus, engine.gpu.name) == (4, "h100")
    plain = MODELS["llama-3-8b"]
    assert engine.prefill_s(4096) == EngineModel(plain, GPUS["h100"], 4).prefill_s(4096)
    with pytest.raises(ConfigurationError, match="'tensor_parallel' is 2; expected absent, or the 4 GPUs of '--gpu'"):
        CacheHitArguments(gpu="H100x4", tensor_parallel=2).engine()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": None}, "the field 'hidden_size', which is missing"),
        ({"num_hidden_layers": "32"}, "a number above 0 in the field 'num_hidden_layers'; it has '32'"),
        ({"model_type": "mamba"}, f"a model_type among {', '.join(FAMILIES)}; it has 'mamba'"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types among full_attention, .* it has 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "32 layer_types, one per layer; it has 1"),
        ({"layer_types": ["sliding_attention"] * 32}, "the field 'sliding_window', which is missing"),
        ({"quantization_config": {"quant_method": "hqq"}}, "a quant_method among fp8, .*; it has 'hqq'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'bits' in its quantization_config"),
    ],
)
def test_what_is_missing_or_unknown_is_named(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["Llama-3.1-8B"].config | change))
    with pytest.raises(ConfigurationError, match=f"'model' is '.*'; expected a config.json with {expected}"):
        model_named(str(path))


def test_files_that_are_no_configuration_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="a config.json that can be read"):
        model_named(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="a config.json with an object"):
        model_named(str(tmp_path))
    known = "llama-2-7b, llama-3-8b, llama-3-70b, or the path of a Hugging Face config.json or its directory"
    with pytest.raises(ConfigurationError, match=f"'model' is 'gpt'; expected {known}"):
        model_named("gpt")


def test_weights_that_fit_no_gpu_are_named() -> None:
    with pytest.raises(ConfigurationError, match="'tensor_parallel' is 1; expected more GPUs: .* 141 GB, and 1 h100"):
        EngineModel(MODELS["llama-3-70b"], GPUS["h100"])
