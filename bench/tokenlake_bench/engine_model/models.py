"""The dimensions of models, and what follows from them: parameters, KV cache per token, arithmetic per token. A
multiplication and an addition count as two flops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenlake.errors import ConfigurationError

CACHE_BYTES: Final = 2
"""Bytes of one element of the KV cache: bfloat16."""


@dataclass(frozen=True, slots=True)
class Model:
    """The dimensions of a dense model: multi-head attention, or grouped-query attention where `kv_heads` < `heads`, and
    a gated feed-forward network of three matrices."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    weight_bytes: int = 2
    """Bytes per parameter of the weights: 2 in bfloat16; 1 in FP8, in which matrix products run at the GPU's FP8
    rate."""

    @property
    def cache_elements(self) -> int:
        """Cache elements of one token in one layer: a key and a value per KV head."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache of one token over all layers."""
        return self.layers * self.cache_elements * CACHE_BYTES

    @property
    def attention_flops(self) -> int:
        """Flops of one layer per pair of a new token and a token that it attends to: those of a score and a weighted
        value, for each query head."""
        return 4 * self.heads * self.head_dim

    def copies(self, gpus: int) -> int:
        """Number of GPUs of an instance that hold the same cache elements, with tensor parallelism over `gpus` GPUs: 1
        with at most as many as KV heads, which are split over the GPUs; more with more GPUs."""
        return max(1, gpus // self.kv_heads)

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of all layers, each of which is multiplied with every token: the projections of queries,
        keys, values and output, and the feed-forward network. The embedding and the output layer are not among
        them."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def output_parameters(self) -> int:
        """Number of parameters of the output layer, which a forward pass multiplies only with tokens after which the
        model samples."""
        return self.hidden * self.vocabulary

    @property
    def stored_parameters(self) -> int:
        """Number of all parameters of the model, the embedding included."""
        return self.layer_parameters + 2 * self.output_parameters


def _llama(name: str, layers: int, hidden: int, kv_heads: int, inner: int, vocabulary: int) -> Model:
    return Model(name, layers, hidden, hidden // 128, kv_heads, 128, inner, vocabulary)


MODELS: Final[dict[str, Model]] = {
    model.name: model
    for model in (
        _llama("llama-2-7b", 32, 4096, 32, 11_008, 32_000),
        _llama("llama-3-8b", 32, 4096, 8, 14_336, 128_256),
        _llama("llama-3-70b", 80, 8192, 8, 28_672, 128_256),
    )
}
"""The known models by name; their dimensions are from the published config.json of each."""


def model_named(name: str) -> Model:
    """The dimensions of the model with this name. Raises ConfigurationError for a name that is not in `MODELS`."""
    if name not in MODELS:
        raise ConfigurationError("model", name, " or ".join(MODELS))
    return MODELS[name]
