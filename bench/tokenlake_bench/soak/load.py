"""The prompts of a soak's engines: some share their first segments, they belong to several tenants and layouts, and
together they have far more segments than the memory holds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tokenlake.layout import Layout
from tokenlake_bench.payload import PayloadIdentity

SEGMENT_TOKENS: Final = 16
PROMPTS: Final = 160
HEADS: Final = 10
HEAD_SEGMENTS: Final = 4
MOST_SEGMENTS: Final = 20
_POPULAR: Final = 20.0
"""Prompts are drawn with weight 1 / (rank + `_POPULAR`): some are read again soon, others only long after their
eviction."""


@dataclass(frozen=True, slots=True)
class Group:
    """Engines that share a cache, because they have one tenant and one layout."""

    tenant: str
    layout: Layout

    @property
    def credential(self) -> str:
        """Credential of the group's tenant in the daemons' settings."""
        return f"{self.tenant}-token-0123456789"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a soak. `tokens`: one-dimensional, a whole number of segments."""

    number: int
    tokens: NDArray[np.uint32]

    @property
    def segments(self) -> int:
        """Number of segments of the prompt."""
        return len(self.tokens) // SEGMENT_TOKENS

    def digests(self, identity: PayloadIdentity) -> list[bytes]:
        """Digests of the prompt's segments, from which `payload` computes the expected bytes."""
        return identity.digests(self.tokens, SEGMENT_TOKENS)


def _layout(name: str, layers: int, kv_heads: int) -> Layout:
    return Layout(
        model_id=name,
        weights_digest="00",
        dtype="float16",
        layers=layers,
        kv_heads=kv_heads,
        key_dim=32,
        value_dim=32,
        position="none",
        segment_tokens=SEGMENT_TOKENS,
    )


SMALL: Final = _layout("soak-small", 2, 4)
"""Layout with segments of 16 KiB and 4 shards."""
LARGE: Final = _layout("soak-large", 4, 8)
"""Layout with segments of 64 KiB and 8 shards."""
GROUPS: Final = (Group("red", SMALL), Group("blue", SMALL), Group("red", LARGE), Group("blue", LARGE))


def prompt(seed: int, number: int) -> Prompt:
    """The prompt with this number, which is equal in every process. Prompts whose numbers are equal modulo `HEADS`
    share their first segments."""
    head = np.random.default_rng((seed, 0, number % HEADS))
    tail = np.random.default_rng((seed, 1, number))
    segments = int(tail.integers(1, MOST_SEGMENTS - HEAD_SEGMENTS + 1))
    tokens = [
        draw.integers(0, 1 << 17, count * SEGMENT_TOKENS, dtype=np.uint32)
        for draw, count in ((head, HEAD_SEGMENTS), (tail, segments))
    ]
    return Prompt(number, np.concatenate(tokens))


def draw_prompt(seed: int, draw: random.Random) -> Prompt:
    """Draw a prompt; popular ones are drawn more often."""
    ranks = range(PROMPTS)
    return prompt(seed, draw.choices(ranks, [1 / (rank + _POPULAR) for rank in ranks])[0])


def fresh_prompt(seed: int, number: int, segments: int) -> Prompt:
    """A prompt with this number that no engine requests."""
    return Prompt(
        number,
        np.random.default_rng((seed, 2, number)).integers(0, 1 << 17, segments * SEGMENT_TOKENS, dtype=np.uint32),
    )
