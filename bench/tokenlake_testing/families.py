"""Small models of the families that vLLM serves, generated with seeded random weights, without a download or a
tokenizer. One function per family writes a model's directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenlake_testing.tiny_model import TinyModel, save_network, save_tiny_model


def save_quantised(directory: str | Path, model: TinyModel | None = None) -> Path:
    """A Llama whose linear layers have 8-bit integer weights with one scale per output channel, and whose inputs are
    quantised per token, in the format of `compressed-tensors`."""
    import torch
    from safetensors.torch import load_file, save_file

    path = save_tiny_model(directory, model)
    quantised = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if ".layers." not in name or weight.ndim != 2:
            quantised[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        quantised[name] = (weight / scale).round().to(torch.int8)
        quantised[f"{name}_scale"] = scale
    save_file(quantised, path / "model.safetensors", metadata={"format": "pt"})
    channel = {"num_bits": 8, "type": "int", "symmetric": True}
    weights, inputs = channel | {"strategy": "channel"}, channel | {"strategy": "token", "dynamic": True}
    _configure(
        path,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        },
    )
    return path


def save_latent(directory: str | Path, model: TinyModel | None = None) -> Path:
    """Save a random DeepSeek V2 with dense layers only in `directory`, and return the directory. Its latent vector has
    512 values and its rotary key 64, as in the real one; `model` gives the other dimensions."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    sizes = model or TinyModel()
    config = DeepseekV2Config(
        **_dimensions(sizes) | {"num_key_value_heads": sizes.heads},
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=sizes.layers,
        n_group=1,
        topk_group=1,
    )
    # vLLM's kernels for CPUs compute a token of this family in two ways, in a prefill and in a decoding step, whose
    # results differ by more than the rounding of float32. Larger weights make other greedy tokens of that difference.
    return save_network(directory, DeepseekV2ForCausalLM, config, sizes.seed, scale=1.5)


def save_sliding_window(directory: str | Path, model: TinyModel | None = None, window: int = 512) -> Path:
    """A Gemma 3 whose last of four layers sees all tokens and whose others see a window of them."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = model or TinyModel()
    config = Gemma3TextConfig(
        **_dimensions(sizes),
        head_dim=sizes.hidden // sizes.heads,
        sliding_window=window,
        layer_types=[_every_fourth(layer, "full_attention", "sliding_attention") for layer in range(sizes.layers)],
    )
    return save_network(directory, Gemma3ForCausalLM, config, sizes.seed)


def save_windows_and_dense(directory: str | Path, model: TinyModel | None = None, window: int = 256) -> Path:
    """A Mellum with dense layers only, whose last of four layers sees all tokens and whose others see a window of
    them: SGLang keeps both kinds in pools of their own."""
    from transformers import MellumConfig, MellumForCausalLM

    sizes = model or TinyModel()
    config = MellumConfig(
        **_dimensions(sizes),
        head_dim=sizes.hidden // sizes.heads,
        sliding_window=window,
        layer_types=[_every_fourth(layer, "full_attention", "sliding_attention") for layer in range(sizes.layers)],
        mlp_layer_types=["dense"] * sizes.layers,
    )
    return save_network(directory, MellumForCausalLM, config, sizes.seed)


def save_mistral(directory: str | Path, model: TinyModel | None = None, window: int = 512) -> Path:
    """A Mistral all of whose layers see a window of the tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = model or TinyModel()
    config = MistralConfig(**_dimensions(sizes), sliding_window=window)
    return save_network(directory, MistralForCausalLM, config, sizes.seed)


def save_chunked(directory: str | Path, model: TinyModel | None = None, chunk: int = 512) -> Path:
    """A Llama 4 whose last of four layers sees all tokens and whose others see those of their own chunk."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = model or TinyModel()
    config = Llama4TextConfig(
        **_dimensions(sizes),
        head_dim=sizes.hidden // sizes.heads,
        intermediate_size_mlp=sizes.intermediate,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=chunk,
        no_rope_layers=[int(layer % 4 != 3) for layer in range(sizes.layers)],
        use_qk_norm=False,
    )
    return save_network(directory, Llama4ForCausalLM, config, sizes.seed)


def save_hybrid(directory: str | Path, model: TinyModel | None = None) -> Path:
    """A Qwen3-Next: the last of four layers has attention, the others a recurrent state of linear attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = model or TinyModel()
    config = Qwen3NextConfig(
        **_dimensions(sizes),
        head_dim=sizes.hidden // sizes.heads,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        layer_types=[_every_fourth(layer, "full_attention", "linear_attention") for layer in range(sizes.layers)],
    )
    return save_network(directory, Qwen3NextForCausalLM, config, sizes.seed)


def save_eagle(directory: str | Path, model: TinyModel | None = None) -> Path:
    """A drafting head in the format of EAGLE, of one layer, for the Llama that `save_tiny_model` writes with the same
    `model`. Its guesses are random."""
    import torch
    from safetensors.torch import load_file, save_file

    sizes = replace(model or TinyModel(), layers=1)
    path = save_tiny_model(directory, sizes)
    start = "model.layers.0."
    weights = {
        f"layers.0.{name.removeprefix(start)}": weight
        for name, weight in load_file(path / "model.safetensors").items()
        # The head has the embedding and the output layer of the model, and no norm before its layer.
        if name.startswith(start) and "input_layernorm" not in name
    }
    source = torch.Generator().manual_seed(sizes.seed)
    weights["fc.weight"] = torch.randn(sizes.hidden, 2 * sizes.hidden, generator=source) * 0.1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def save_pictures(
    directory: str | Path, model: TinyModel | None = None, queries: int = 300, window: int | None = None
) -> Path:
    """A BLIP-2 whose decoder is a Llama, or with `window` a Mistral all of whose layers see a window of that many
    tokens: `queries` tokens of an image of 32 by 32 pixels come before the text. The last
    token of the vocabulary stands for them. The directory has a tokenizer, whose tokens are `t0`, `t1` and so on."""
    import transformers
    from tokenizers import Tokenizer, models
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    sizes = model or TinyModel()
    vocabulary = {f"t{number}": number for number in range(sizes.vocabulary - 1)} | {"<image>": sizes.vocabulary - 1}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")),
        unk_token="t0",
        extra_special_tokens={"image_token": "<image>"},
    )
    text: Any = transformers.LlamaConfig(**_dimensions(sizes), architectures=["LlamaForCausalLM"])
    if window is not None:
        text = transformers.MistralConfig(
            **_dimensions(sizes), sliding_window=window, architectures=["MistralForCausalLM"]
        )
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.Blip2Config(
        vision_config={**small, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8, "initializer_range": 0.02},
        qformer_config={**small, "num_hidden_layers": 2, "encoder_hidden_size": 64, "vocab_size": 8},
        text_config=text.to_dict(),
        num_query_tokens=queries,
        image_token_index=vocabulary["<image>"],
    )
    # The queries, which are zero in a new model, stay so: all tokens of an image are equal then, and depend on it.
    path = save_network(directory, transformers.Blip2ForConditionalGeneration, config, sizes.seed)
    transformers.Blip2Processor(
        BlipImageProcessorPil(size={"height": 32, "width": 32}), tokenizer, num_query_tokens=queries
    ).save_pretrained(path)
    return path


def save_adapter(directory: str | Path, model: TinyModel | None = None, rank: int = 8, seed: int = 1) -> Path:
    """A LoRA adapter, in the format of `peft`, for the Llama that `save_tiny_model` writes with the same `model`. It
    changes the queries and values of each layer, and with them the tokens."""
    import torch
    from safetensors.torch import save_file

    sizes = model or TinyModel()
    head = sizes.hidden // sizes.heads
    outputs = {"q_proj": sizes.heads * head, "v_proj": sizes.kv_heads * head}
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(sizes.layers):
        for name, width in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, sizes.hidden, generator=source) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, rank, generator=source) * 0.1
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0}
    text = settings | {"target_modules": sorted(outputs), "bias": "none", "base_model_name_or_path": "tiny"}
    (path / "adapter_config.json").write_text(json.dumps(text, indent=2) + "\n")
    return path


def _dimensions(sizes: TinyModel) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _every_fourth(layer: int, fourth: str, others: str) -> str:
    return fourth if layer % 4 == 3 else others


def _configure(path: Path, **fields: Any) -> None:
    """Add fields to the configuration in the directory of a model."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields, indent=2) + "\n")
