"""The parts of a model's layers: their parameters, their cache and their arithmetic. A multiplication and an addition
count as two flops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Attention(Protocol):
    """Sizes and arithmetic of the attention in one layer."""

    @property
    def window(self) -> int:
        """Tokens to which a token attends at most; 0: all before it."""
        ...

    @property
    def parameters(self) -> int:
        """Parameters of the projections."""
        ...

    @property
    def cache_elements(self) -> int:
        """Elements of the KV cache of one token."""
        ...

    @property
    def query_elements(self) -> int:
        """Elements of the queries of one token, as they are when they attend to the cache."""
        ...

    @property
    def prefill_flops(self) -> int:
        """Flops in a prefill per pair of a new token and a token that it attends to."""
        ...

    @property
    def decode_flops(self) -> int:
        """The same in a decode step."""
        ...

    def copies(self, gpus: int) -> int:
        """Number of GPUs of an instance that hold the same cache elements, with tensor parallelism over `gpus`."""
        ...


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Multi-head attention, or grouped-query attention where `kv_heads` < `heads`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0

    @property
    def parameters(self) -> int:
        """Of queries, keys, values and output."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def cache_elements(self) -> int:
        """A key and a value per KV head."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def query_elements(self) -> int:
        """A query per head."""
        return self.heads * self.head_dim

    @property
    def prefill_flops(self) -> int:
        """Those of a score and a weighted value, for each query head."""
        return 4 * self.heads * self.head_dim

    @property
    def decode_flops(self) -> int:
        """As many as in a prefill."""
        return self.prefill_flops

    def copies(self, gpus: int) -> int:
        """1 with at most as many GPUs as KV heads, which are split over the GPUs; more with more GPUs."""
        return max(1, gpus // self.kv_heads)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: the cache is one latent vector and one rotated key per token, for all heads.

    A prefill expands the latent vectors to keys and values of each head; a decode step attends to the latent vectors
    themselves, with the expansion absorbed in its projections. `query_rank`: 0 where queries are not compressed.
    """

    hidden: int
    heads: int
    query_rank: int
    latent: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    window: int = 0

    @property
    def parameters(self) -> int:
        """Of queries (down and up), latent vectors (down and up) and output."""
        queries = self.heads * (self.nope_dim + self.rope_dim)
        asking = self.query_rank * (self.hidden + queries) if self.query_rank else self.hidden * queries
        cached = self.hidden * (self.latent + self.rope_dim)
        expansion = self.latent * self.heads * (self.nope_dim + self.value_dim)
        return asking + cached + expansion + self.heads * self.value_dim * self.hidden

    @property
    def cache_elements(self) -> int:
        """The latent vector and the rotated key."""
        return self.latent + self.rope_dim

    @property
    def query_elements(self) -> int:
        """A latent and a rotated query per head."""
        return self.heads * (self.latent + self.rope_dim)

    @property
    def prefill_flops(self) -> int:
        """Scores and weighted values per head, on the expanded keys and values."""
        return 2 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)

    @property
    def decode_flops(self) -> int:
        """Per head a score over latent and rotated part, and a weighted latent vector."""
        return 2 * self.heads * (2 * self.latent + self.rope_dim)

    def copies(self, gpus: int) -> int:
        """All GPUs: every head needs the whole latent vector."""
        return gpus


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A gated feed-forward network in one layer, of three matrices. A token passes through `chosen` of the `experts`
    routed experts of width `inner`, and through shared ones of `shared` width together; a dense layer has `shared`
    alone."""

    hidden: int
    shared: int
    experts: int = 0
    chosen: int = 0
    inner: int = 0

    @property
    def common(self) -> int:
        """Parameters that every token is multiplied with: of shared experts, and of the choice of experts."""
        return 3 * self.hidden * self.shared + self.hidden * self.experts

    @property
    def expert(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.hidden * self.inner

    def experts_read(self, tokens: int) -> float:
        """Expected number of routed experts that `tokens` tokens choose, independently and uniformly."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** tokens) if self.experts else 0.0
