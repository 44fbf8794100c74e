"""Layouts of models, and models that are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.engines.models import COMMON, FAMILIES, GPT2, LLAMA, build, family
from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_client.engines.transformers import layout_of


def layout(**changes: Any) -> Layout:
    fields: dict[str, Any] = {
        "model_id": "test",
        "weights_digest": "0",
        "dtype": "float32",
        "layers": 2,
        "kv_heads": 2,
        "key_dim": 8,
        "value_dim": 8,
        "position": "{}",
    }
    return Layout(**{**fields, **changes})


@pytest.mark.parametrize(
    ("name", "heads", "dim"),
    [
        ("llama-gqa", 2, 8),
        ("llama-mha", 4, 8),
        ("llama-mqa", 1, 8),
        ("qwen3", 2, 16),
        ("gpt2", 4, 8),
        ("opt", 4, 8),
    ],
)
def test_heads_and_dimensions_are_those_of_the_cache(name: str, heads: int, dim: int) -> None:
    found = layout_of(family(name), segment_tokens=16)
    assert (found.layers, found.kv_heads, found.key_dim, found.value_dim) == (2, heads, dim, dim)
    assert found.segment_tokens == 16
    assert found.dtype == "float32"


def test_every_family_has_another_fingerprint() -> None:
    assert len({layout_of(family(name)).fingerprint() for name in FAMILIES}) == len(FAMILIES)


def test_dtype_is_the_models() -> None:
    assert layout_of(family("llama-gqa", torch.bfloat16)).dtype == "bfloat16"


def test_quantised_weights_are_refused_by_name() -> None:
    model = family("llama-gqa")
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    with pytest.raises(LayoutRefused, match="'quantization_config'"):
        layout_of(model)


def test_position_names_the_rotation() -> None:
    position = json.loads(layout_of(family("llama3-rope")).position)
    assert position["kind"] == "rope"
    assert position["rope_type"] == "llama3"
    assert position["factor"] == 4.0
    assert json.loads(layout_of(family("gpt2")).position) == {"kind": "learned", "n_positions": 512}


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "sliding window": ("MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": 64}, "'sliding_window'"),
    "some layers slide": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "'sliding_window'",
    ),
    "hybrid": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**LLAMA, "head_dim": 8}, "'sliding_window'"),
    "latent attention": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **LLAMA,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        "'kv_lora_rank'",
    ),
    "state space": (
        "MambaConfig",
        "MambaForCausalLM",
        {**COMMON, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "'conv_kernel'|'state_size'|'use_conv_bias'",
    ),
    "encoder and decoder": (
        "T5Config",
        "T5ForConditionalGeneration",
        {**COMMON, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4},
        "'is_encoder_decoder'",
    ),
    "cross attention": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {**GPT2, "add_cross_attention": True},
        "'add_cross_attention'",
    ),
    "local layers": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {**COMMON, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "'(attention_types|attention_layers|window_size)'",
    ),
    "linear biases": (
        "BloomConfig",
        "BloomForCausalLM",
        {**COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "'bloom'",
    ),
    "rotation by length": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "'rope_parameters.rope_type'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    config_class, model_class, settings, field = REFUSED[case]
    with pytest.raises(LayoutRefused, match=field):
        layout_of(build(config_class, model_class, settings))


def test_an_unknown_attention_setting_is_refused() -> None:
    model = family("llama-gqa")
    model.config.attention_of_tomorrow = 3
    with pytest.raises(LayoutRefused, match="'attention_of_tomorrow'"):
        layout_of(model)


def test_a_class_from_elsewhere_is_refused() -> None:
    model = family("llama-gqa")
    model.__class__ = type("OtherLlama", (type(model),), {"__module__": "elsewhere"})
    with pytest.raises(LayoutRefused, match="OtherLlama"):
        layout_of(model)


def test_adapters_without_an_id_are_refused() -> None:
    model = family("llama-gqa")
    model._hf_peft_config_loaded = True
    with pytest.raises(LayoutRefused, match="adapter id"):
        layout_of(model)
    layout_of(model, adapter="one")
