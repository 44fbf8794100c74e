"""The dimensions of models, and what follows from them: parameters, KV cache per token, arithmetic per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from tokenlake.errors import ConfigurationError

CACHE_BYTES: Final = 2
"""Bytes of one element of the KV cache: bfloat16."""


class Attention(Protocol):
    """Sizes and arithmetic of the attention in one layer of a model; a multiplication and an addition count as two
    flops."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the attention's projections in one layer."""
        ...

    @property
    def cache_elements(self) -> int:
        """Number of KV cache elements of one token in one layer."""
        ...

    @property
    def prefill_flops(self) -> int:
        """Flops of the attention of one layer in a prefill, per pair of a new token and a token that it attends to."""
        ...

    @property
    def decode_flops(self) -> int:
        """Flops of the attention of one layer in a decode step, per pair of a new token and a token that it attends
        to."""
        ...

    def copies(self, gpus: int) -> int:
        """Number of GPUs of an instance that hold the same cache elements of a token, with tensor parallelism over
        `gpus` GPUs."""
        ...


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Sizes of multi-head attention, or of grouped-query attention where `kv_heads` < `heads`, in one layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def parameters(self) -> int:
        """Parameters of the projections of queries, keys, values and output in one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def cache_elements(self) -> int:
        """Cache elements of one token in one layer: a key and a value per KV head."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def prefill_flops(self) -> int:
        """Flops per pair of tokens in a prefill: those of a score and a weighted value, for each query head."""
        return 4 * self.heads * self.head_dim

    @property
    def decode_flops(self) -> int:
        """Flops per pair of tokens in a decode step, as many as in a prefill."""
        return self.prefill_flops

    def copies(self, gpus: int) -> int:
        """Number of GPUs that hold the same KV head: 1 with at most as many GPUs as KV heads, which are split over the
        GPUs; more with more GPUs."""
        return max(1, gpus // self.kv_heads)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: the cache is one latent vector and one rotated key per token, for all heads.

    The prefill expands the latent vectors to keys and values of each head; a decode step attends to the latent vectors
    themselves, with the expansion absorbed in its projections.
    """

    hidden: int
    heads: int
    query_rank: int
    latent: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def parameters(self) -> int:
        """Parameters of the projections of queries (down and up), of latent vectors (down and up) and of the output in
        one layer."""
        queries = self.query_rank * (self.hidden + self.heads * (self.nope_dim + self.rope_dim))
        cached = self.hidden * (self.latent + self.rope_dim)
        expansion = self.latent * self.heads * (self.nope_dim + self.value_dim)
        return queries + cached + expansion + self.heads * self.value_dim * self.hidden

    @property
    def cache_elements(self) -> int:
        """Cache elements of one token in one layer: the latent vector and the rotated key."""
        return self.latent + self.rope_dim

    @property
    def prefill_flops(self) -> int:
        """Flops per pair of tokens in a prefill: scores and weighted values per head, computed on the expanded keys and
        values."""
        return 2 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)

    @property
    def decode_flops(self) -> int:
        """Flops per pair of tokens in a decode step, computed on the latent vectors: per head a score over latent and
        rotated part, and a weighted latent vector."""
        return 2 * self.heads * (2 * self.latent + self.rope_dim)

    def copies(self, gpus: int) -> int:
        """Number of GPUs that hold the same cache elements, which is all of them: every head needs the whole latent
        vector."""
        return gpus


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Sizes of a gated feed-forward network in one layer (three matrices per expert). A token passes through `chosen`
    of the `experts` routed experts and through all `shared` ones.

    A dense layer is one shared expert.
    """

    hidden: int
    inner: int
    experts: int = 0
    chosen: int = 0
    shared: int = 1

    @property
    def expert(self) -> int:
        """Number of parameters of one expert."""
        return 3 * self.hidden * self.inner

    @property
    def active(self) -> int:
        """Number of parameters that are multiplied with one token, including those that choose the experts."""
        return self.expert * (self.chosen + self.shared) + self.hidden * self.experts

    def read(self, tokens: int) -> float:
        """Expected number of parameters that a forward pass over `tokens` tokens reads; the tokens choose experts
        independently and uniformly."""
        routed = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens) if self.experts else 0.0
        return self.expert * (routed + self.shared) + self.hidden * self.experts


@dataclass(frozen=True, slots=True)
class Model:
    """The dimensions of a model. `dense_layers` of its `layers` have the feed-forward network `dense`; the others have
    `mixture`, with routed experts."""

    name: str
    layers: int
    dense_layers: int
    hidden: int
    vocabulary: int
    attention: Attention
    dense: FeedForward
    mixture: FeedForward | None = None
    weight_bytes: int = 2
    """Bytes per parameter of the weights: 2 in bfloat16; 1 in FP8, in which matrix products run at the GPU's FP8
    rate."""

    @property
    def mixture_layers(self) -> int:
        """Number of layers whose feed-forward network has routed experts."""
        return self.layers - self.dense_layers

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache of one token over all layers."""
        return self.layers * self.attention.cache_elements * CACHE_BYTES

    @property
    def active_parameters(self) -> int:
        """Number of parameters of all layers that are multiplied with one token, without embedding and output layer."""
        mixture = self.mixture.active * self.mixture_layers if self.mixture else 0
        return self.layers * self.attention.parameters + self.dense.active * self.dense_layers + mixture

    @property
    def output_parameters(self) -> int:
        """Number of parameters of the output layer, which a forward pass multiplies only with tokens after which the
        model samples."""
        return self.hidden * self.vocabulary

    @property
    def stored_parameters(self) -> int:
        """Number of all parameters of the model, the embedding included."""
        stored = self.dense.expert * (self.dense.experts + self.dense.shared) * self.dense_layers
        if self.mixture:
            each = self.mixture.expert * (self.mixture.experts + self.mixture.shared)
            stored += (each + self.hidden * self.mixture.experts) * self.mixture_layers
        return stored + self.layers * self.attention.parameters + 2 * self.output_parameters

    def parameters_read(self, tokens: int) -> float:
        """Expected number of parameters that a forward pass over `tokens` tokens reads from memory, the output layer
        included."""
        mixture = self.mixture.read(tokens) * self.mixture_layers if self.mixture else 0.0
        dense = self.dense.read(tokens) * self.dense_layers
        return self.layers * self.attention.parameters + dense + mixture + self.output_parameters


def _llama(name: str, layers: int, hidden: int, kv_heads: int, inner: int, vocabulary: int) -> Model:
    heads = hidden // 128
    return Model(
        name=name,
        layers=layers,
        dense_layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        attention=GroupedAttention(hidden, heads, kv_heads, head_dim=128),
        dense=FeedForward(hidden, inner),
    )


_DEEPSEEK_V3: Final = Model(
    name="deepseek-v3",
    layers=61,
    dense_layers=3,
    hidden=7168,
    vocabulary=129_280,
    attention=LatentAttention(
        hidden=7168, heads=128, query_rank=1536, latent=512, nope_dim=128, rope_dim=64, value_dim=128
    ),
    dense=FeedForward(7168, 18_432),
    mixture=FeedForward(7168, 2048, experts=256, chosen=8, shared=1),
    weight_bytes=1,
)

MODELS: Final[dict[str, Model]] = {
    model.name: model
    for model in (
        _llama("llama-2-7b", 32, 4096, 32, 11_008, 32_000),
        _llama("llama-3-8b", 32, 4096, 8, 14_336, 128_256),
        _llama("llama-3-70b", 80, 8192, 8, 28_672, 128_256),
        _DEEPSEEK_V3,
    )
}
"""The known models by name; their dimensions are from the published config.json of each."""


def model_named(name: str) -> Model:
    """The dimensions of the model with this name. Raises ConfigurationError for a name that is not in `MODELS`."""
    if name not in MODELS:
        raise ConfigurationError("model", name, " or ".join(MODELS))
    return MODELS[name]
