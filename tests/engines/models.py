"""Tiny models of several families, made from configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 199
SEGMENT = 16
"""The tokens of a segment in the tests of engines."""
END = 1
PAD = 0
COMMON = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": END}
LLAMA = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GPT2 = {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
OPT = {
    **COMMON,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 32,
}
NEOX = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-gqa": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "llama-mha": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 4}),
    "llama-mqa": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 1}),
    "llama3-rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **LLAMA,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**LLAMA, "head_dim": 16}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": None}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", NEOX),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**GPT2, "rotary_dim": 4}),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**GPT2, "rotary_dim": 4}),
    "gpt-bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT2),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT),
}
"""name -> (configuration class, model class, settings). The pool serves all of them."""


def build(config_class: str, model_class: str, settings: dict[str, Any], dtype: Any = torch.float32) -> Any:
    """A model with seeded weights, large enough that its greedy tokens depend on the whole context."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = getattr(transformers, config_class)(**settings)
        model = getattr(transformers, model_class)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(12.0)
    return model.to(dtype).eval()


def family(name: str, dtype: Any = torch.float32) -> Any:
    """One of `FAMILIES`."""
    return build(*FAMILIES[name], dtype=dtype)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Seeded token ids, none of them special."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens: list[int] = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
    return tokens


def padded(rows: list[list[int]]) -> tuple[Any, Any]:
    """A batch of prompts, padded on the left: token ids and attention mask, `[prompt, token]`."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
