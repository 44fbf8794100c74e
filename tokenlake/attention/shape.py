"""Heads, dimensions and scale of attention, and the bytes of its queries on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout

LSE_BYTES = 4
"""Bytes of a log-sum-exp on the wire, a float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention of one layer. A logit is `scale` x query . key.

    Query head `h` reads KV head `h // group`: multi-head where `group` is 1, multi-query where `kv_heads` is 1,
    grouped-query between.
    """

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    latent: bool = False
    """The value of a token is the first `value_dim` columns of its key row, as in DeepSeek's absorbed MLA (1 KV head,
    `key_dim` 576, `value_dim` 512)."""

    def __post_init__(self) -> None:
        """Raises LayoutRefused, which names the field."""
        for field in ("q_heads", "kv_heads", "key_dim", "value_dim"):
            if getattr(self, field) < 1:
                raise LayoutRefused(f"attention's '{field}' is {getattr(self, field)}; expected at least 1")
        if self.q_heads % self.kv_heads:
            raise LayoutRefused(
                f"attention's 'q_heads' is {self.q_heads}; expected a multiple of its {self.kv_heads} KV heads"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise LayoutRefused(f"attention's 'scale' is {self.scale}; expected finite and above 0")
        if self.latent and self.value_dim > self.key_dim:
            raise LayoutRefused(
                f"attention's 'value_dim' is {self.value_dim}; expected at most the {self.key_dim} columns of a key"
            )

    @classmethod
    def of(cls, layout: Layout, q_heads: int, scale: float | None = None) -> AttentionShape:
        """The shape for caches of `layout`. `scale` defaults to 1 / sqrt(key dim). Raises LayoutRefused."""
        return cls(
            q_heads=q_heads,
            kv_heads=layout.kv_heads,
            key_dim=layout.key_dim,
            value_dim=layout.value_dim,
            scale=layout.key_dim**-0.5 if scale is None else scale,
            latent=layout.latent,
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    def query_bytes(self, q_size: int, out_size: int) -> int:
        """Bytes that one query token of one layer moves in both directions, without frames::

            q_heads x (key_dim x q_size + value_dim x out_size + 4)

        `q_size`, `out_size`: bytes of an element of the query and of the output. The 4 bytes are the log-sum-exp.
        """
        return self.q_heads * (self.key_dim * q_size + self.value_dim * out_size + LSE_BYTES)
