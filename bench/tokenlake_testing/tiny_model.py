"""A small Llama that is generated with seeded random weights, without a download or a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHT_SCALE = 4.0
"""Factor by which the random weights are multiplied. transformers initialises them for training, which gives almost
uniform logits; with larger weights the greedy token depends on the context, so that a wrong cache changes the
tokens."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Dimensions of the generated model. With the defaults a prefill of 1,024 tokens takes at least 100 ms on one CPU
    thread in float32."""

    seed: int = 0
    vocabulary: int = 1024
    hidden: int = 384
    intermediate: int = 1024
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    positions: int = 32768


def save_tiny_model(directory: str | Path, model: TinyModel | None = None) -> Path:
    """Write configuration and float32 weights to `directory` and return it. Equal `model` gives equal bytes. Needs the
    `transformers` extra. There are no special tokens: generation ends by length."""
    # transformers is imported here, so that this module can be imported without the extra.
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = model or TinyModel()
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return save_network(directory, LlamaForCausalLM, config, sizes.seed)


def save_network(
    directory: str | Path, network_class: Any, config: Any, seed: int, scale: float = WEIGHT_SCALE
) -> Path:
    """Write configuration and float32 weights of a model of `transformers` to `directory`, and return the directory.
    The weights are random numbers that follow from `seed`; those of more than one dimension are multiplied by
    `scale`."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Any = network_class(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
    path = Path(directory)
    network.save_pretrained(path)
    return path


def save_tokenizer(directory: str | Path, vocabulary: int = 1024) -> Path:
    """Write a tokenizer to `directory` and return it: the words t0, t1, ... are one token each. Its chat template joins
    the messages."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0")
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    wrapped.save_pretrained(directory)
    return Path(directory)
