"""Reads a call of `generate`: its prompts, or the reason why the pool cannot serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SERVED_MODES = ("greedy_search", "sample")
# fmt: off
OWN_ARGUMENTS = frozenset((
    "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "streamer",
    "generation_config", "negative_prompt_ids", "negative_prompt_attention_mask", "use_model_defaults",
    "tokenizer",
))
# fmt: on
"""Arguments of `generate` that neither reach the model's forward pass nor change the cache of the prompt."""


class NotServed(Exception):
    """The pool cannot serve the call, so the model alone must. The message states the reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """A batch of prompts, padded on the left."""

    input_ids: Any
    """int64 [rows, width]."""
    attention_mask: Any
    """The batch's attention mask, int64 [rows, width]: in each row zeros for the padding, then ones for the tokens."""
    padding: list[int]
    tokens: list[list[int]]
    """The token ids of each prompt of the batch, without padding; each prompt has at least one token."""
    copies: int
    """The number of sequences that `generate` makes for each prompt."""
    new_tokens: int
    """The largest number of tokens that decode may add to a prompt."""
    stop_tokens: frozenset[int]


def check_state(model: Any, adapter: str | None) -> None:
    """Raise `NotServed` while the state of `model` (training, autocast, adapters) gives its cache another meaning than
    its layout states."""
    if model.training:
        raise NotServed("the model is in training mode")
    if torch.is_autocast_enabled(model.device.type):
        raise NotServed("autocast is enabled")
    if adapter is None and has_adapters(model):
        raise NotServed("LoRA adapters are loaded and no adapter id was given")


def has_adapters(model: Any) -> bool:
    """True if transformers or peft has added LoRA adapters to `model`."""
    return bool(getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None))


def read_request(model: Any, input_ids: Any, attention_mask: Any, arguments: Mapping[str, Any]) -> Request:
    """The prompts of a call. Raises `NotServed` for a call that must go to the model unchanged."""
    config = _generation_config(model, arguments)
    if not torch.is_tensor(input_ids) or input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise NotServed("input_ids are not a tensor of [rows, tokens]")
    mask = _inferred_mask(config, input_ids) if attention_mask is None else attention_mask
    if not torch.is_tensor(mask) or mask.shape != input_ids.shape:
        raise NotServed("the attention mask has another shape than input_ids")
    padding = (mask == 0).sum(dim=1)
    columns = torch.arange(mask.shape[1], device=mask.device)
    if not torch.equal(mask.long(), (columns >= padding[:, None]).long()):
        raise NotServed("the attention mask is not of left padding")
    paddings: list[int] = padding.tolist()
    rows: list[list[int]] = input_ids.tolist()
    tokens = [row[pad:] for row, pad in zip(rows, paddings, strict=True)]
    if not all(tokens):
        raise NotServed("a row has no token")
    width = input_ids.shape[1]
    limit = config.max_new_tokens if config.max_new_tokens is not None else (config.max_length or 0) - width
    stop = config.eos_token_id
    return Request(
        input_ids=input_ids,
        attention_mask=mask,
        padding=paddings,
        tokens=tokens,
        copies=config.num_return_sequences or 1,
        new_tokens=max(0, limit),
        stop_tokens=frozenset([stop] if isinstance(stop, int) else stop or ()),
    )


def answer_of(request: Request, tokens: list[int]) -> tuple[list[int], str]:
    """The answer at the beginning of the new `tokens` of a sequence, and the reason of its end: "stop" for an end
    token, which is part of the answer, "length" for the limit of new tokens, "" for a stopping criterion of the
    caller."""
    for index, token in enumerate(tokens):
        if token in request.stop_tokens:
            return tokens[: index + 1], "stop"
    return tokens, "length" if len(tokens) >= request.new_tokens else ""


def _generation_config(model: Any, arguments: Mapping[str, Any]) -> Any:
    """The effective settings of the call, as transformers combines them. Raises `NotServed`."""
    named = ("assistant_model", "custom_generate", "past_key_values", "inputs_embeds", "inputs")
    for name in named:
        if arguments.get(name) is not None:
            raise NotServed(f"argument '{name}' is given")
    settings = {name: value for name, value in arguments.items() if name not in OWN_ARGUMENTS}
    config, others = model._prepare_generation_config(arguments.get("generation_config"), **settings)
    for name, value in others.items():
        if value is not None and name not in named:
            raise NotServed(f"argument '{name}' reaches the model's forward pass")
    mode = str(config.get_generation_mode(None).value)
    if mode not in SERVED_MODES:
        raise NotServed(f"generation mode '{mode}' is not served; served: {', '.join(SERVED_MODES)}")
    if config.use_cache is False:
        raise NotServed("use_cache is False")
    if config.cache_implementation not in (None, "dynamic"):
        raise NotServed(f"cache_implementation '{config.cache_implementation}' is asked for")
    return config


def _inferred_mask(config: Any, input_ids: Any) -> Any:
    """The mask that `generate` infers: padding tokens are masked, unless the padding token is also an end token."""
    pad, stop = config.pad_token_id, config.eos_token_id
    ends = [stop] if isinstance(stop, int) else list(stop or ())
    if pad is None or pad in ends:
        return torch.ones_like(input_ids)
    return input_ids.ne(pad).long()
