"""The attention function of a model while the prefixes of its prompts are not in its cache.

The function is registered with transformers under `NAME`, and calls the `Attending` object of the current `attending`
context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from tokenlake_client.engines.transformers.cache import CacheShape
from tokenlake_client.engines.transformers.partial_attention import attend_own

NAME = "tokenlake"
PROBE_TOKENS = 8
UNCONCERNED = frozenset((
    "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "is_causal", "logits_to_keep", "labels", "num_items_in_batch",
))  # fmt: skip
"""Arguments of attention functions that have no effect in a causal forward pass without training."""


class Attending(Protocol):
    """Computes the attention of a model's forward pass in place of the model's own attention function."""

    def attend(self, module: Any, query: Any, keys: Any, values: Any, scale: float, others: dict[str, Any]) -> Any:
        """The attention output, [rows, heads, tokens, value dim], of any dtype. `query`: [rows, heads, tokens, key
        dim]. `keys`, `values`: the result of the cache's `update`. `others`: all further arguments."""
        ...


@dataclass(frozen=True, slots=True)
class QueryShape:
    """The number of heads and the scale of the logits, which the attention queries of all layers of a model share."""

    heads: int
    scale: float


_current: ContextVar[Attending] = ContextVar("attending")


@contextlib.contextmanager
def attending(model: Any, by: Attending) -> Iterator[None]:
    """A context in which `model` computes its attention with `by`. transformers builds no attention mask then."""
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    token = _current.set(by)
    try:
        yield
    finally:
        _current.reset(token)
        model.config._attn_implementation = before


def query_shape(model: Any, shape: CacheShape) -> QueryShape:
    """The shape of the model's queries, found by a forward pass of a few tokens with plain attention in place of the
    model's own. Raises ValueError with the unsupported property of the model's attention, also when the logits differ
    from those of the model's own attention."""
    tokens = torch.arange(PROBE_TOKENS, device=model.device)[None] % model.config.vocab_size
    probe = _Probe(shape)

    def logits() -> Any:
        cache = DynamicCache(config=model.config)
        outputs = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, use_cache=True)
        return outputs.logits.float()

    with torch.no_grad():
        expected = logits()
        with attending(model, probe):
            got = logits()
    if probe.layers != list(range(len(shape.devices))):
        raise ValueError(
            f"each of its {len(shape.devices)} layers should call the attention interface once; it was called by the "
            f"layers {probe.layers}"
        )
    if len(probe.seen) != 1:
        raise ValueError(f"its layers' queries differ: (heads, scale) in {sorted(probe.seen)}")
    tolerance = 1e-3 if shape.dtype == torch.float32 else 0.1
    if (difference := float((got - expected).abs().max())) > tolerance * float(expected.abs().max()):
        raise ValueError(f"its logits differ by {difference:.3g} from those of plain attention")
    return QueryShape(*probe.seen.pop())


class _Probe:
    """Plain causal attention that records its calls, and raises ValueError for arguments that it does not support."""

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self.layers: list[int] = []
        self.seen: set[tuple[int, float]] = set()

    def attend(self, module: Any, query: Any, keys: Any, values: Any, scale: float, others: dict[str, Any]) -> Any:
        for name, value in others.items():
            if name not in UNCONCERNED and value is not None:
                raise ValueError(f"its attention takes '{name}', whose meaning is not known")
        if query.dtype != self._shape.dtype or query.shape[1] % keys.shape[1] or query.shape[3] != keys.shape[3]:
            raise ValueError(
                f"its queries are {query.dtype} of shape {tuple(query.shape)}, its keys of shape {tuple(keys.shape)}"
            )
        if not scale > 0:
            raise ValueError(f"its attention has a scale of {scale}")
        self.layers.append(module.layer_idx)
        self.seen.add((query.shape[1], float(scale)))
        return attend_own(query, keys, values, scale).out


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **others: Any
) -> tuple[Any, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _current.get().attend(module, query, key, value, scale, others)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
