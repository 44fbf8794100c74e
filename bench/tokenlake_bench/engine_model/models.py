"""The dimensions of models, and what follows from them: parameters and their bytes, KV cache per token, arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenlake_bench.engine_model.layers import Attention, FeedForward, GroupedAttention

CACHE_BYTES: Final = 2
"""Bytes of one element of the KV cache: bfloat16."""
PLAIN_BYTES: Final = 2
"""Bytes of a parameter that is not quantised: bfloat16."""


@dataclass(frozen=True, slots=True)
class Model:
    """The dimensions of a model. `attention` and `feed_forward` have (number of layers, part) for each kind of part, in
    any order: sums over layers do not depend on it."""

    name: str
    hidden: int
    vocabulary: int
    attention: tuple[tuple[int, Attention], ...]
    feed_forward: tuple[tuple[int, FeedForward], ...]
    tied: bool = False
    """The output layer is the embedding."""
    small_parameters: int = 0
    """Parameters of norms and biases, which no matrix product has."""
    weight_bytes: float = PLAIN_BYTES
    """Bytes per parameter of the layers' matrices; embedding and output layer are not quantised."""
    expert_bytes: float | None = None
    """The same of routed experts; None: `weight_bytes`."""
    fp8: bool = False
    """Matrix products run at the GPU's FP8 rate."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(count for count, _ in self.attention)

    @property
    def mixture_layers(self) -> int:
        """Number of layers with routed experts."""
        return sum(count for count, part in self.feed_forward if part.experts)

    @property
    def cached(self) -> tuple[tuple[int, Attention], ...]:
        """The layers whose cache grows with the prompt: those that attend to all of it. The cache of a layer with a
        window does not grow, and is not counted, unless all layers have one."""
        return tuple(each for each in self.attention if not each[1].window) or self.attention

    @property
    def cache_layers(self) -> int:
        """Number of layers in `cached`."""
        return sum(count for count, _ in self.cached)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache of one token over all layers in `cached`."""
        return self.cache_bytes_on(1)

    def cache_bytes_on(self, gpus: int) -> int:
        """The same with tensor parallelism over so many GPUs, each copy counted."""
        return CACHE_BYTES * sum(count * part.cache_elements * part.copies(gpus) for count, part in self.cached)

    @property
    def query_elements(self) -> int:
        """Elements of the queries of one token over all layers."""
        return sum(count * part.query_elements for count, part in self.attention)

    @property
    def common_parameters(self) -> int:
        """Parameters of all layers that are multiplied with every token: all but the routed experts, the embedding and
        the output layer."""
        attention = sum(count * part.parameters for count, part in self.attention)
        return attention + sum(count * part.common for count, part in self.feed_forward)

    @property
    def active_parameters(self) -> int:
        """Parameters of all layers that are multiplied with one token: `common_parameters`, and the chosen experts."""
        return self.common_parameters + sum(count * part.chosen * part.expert for count, part in self.feed_forward)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        return sum(count * part.experts * part.expert for count, part in self.feed_forward)

    @property
    def output_parameters(self) -> int:
        """Parameters of the output layer, which a forward pass multiplies only with tokens after which the model
        samples."""
        return self.hidden * self.vocabulary

    @property
    def stored_parameters(self) -> int:
        """All parameters of the model, the embedding included."""
        return self.common_parameters + self.expert_parameters + self._plain_parameters

    @property
    def stored_bytes(self) -> float:
        """Bytes of all parameters."""
        matrices = self.common_parameters * self.weight_bytes + self.expert_parameters * self._expert_bytes
        return matrices + self._plain_parameters * PLAIN_BYTES

    def bytes_read(self, tokens: int) -> float:
        """Expected bytes of parameters that a forward pass over `tokens` tokens reads from memory, the output layer
        included."""
        experts = sum(count * part.experts_read(tokens) * part.expert for count, part in self.feed_forward)
        matrices = self.common_parameters * self.weight_bytes + experts * self._expert_bytes
        return matrices + self.output_parameters * PLAIN_BYTES

    @property
    def _plain_parameters(self) -> int:
        return (1 if self.tied else 2) * self.output_parameters + self.small_parameters

    @property
    def _expert_bytes(self) -> float:
        return self.weight_bytes if self.expert_bytes is None else self.expert_bytes


def dense(name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int) -> Model:
    """A dense model, with grouped-query attention and heads of hidden / `heads` dimensions in all layers."""
    attention = GroupedAttention(hidden, heads, kv_heads, hidden // heads)
    return Model(name, hidden, vocabulary, ((layers, attention),), ((layers, FeedForward(hidden, inner)),))


MODELS: Final[dict[str, Model]] = {
    model.name: model
    for model in (
        dense("llama-2-7b", 32, 4096, 32, 32, 11_008, 32_000),
        dense("llama-3-8b", 32, 4096, 32, 8, 14_336, 128_256),
        dense("llama-3-70b", 80, 8192, 64, 8, 28_672, 128_256),
    )
}
"""The models that have a name; their dimensions are from the published config.json of each."""
