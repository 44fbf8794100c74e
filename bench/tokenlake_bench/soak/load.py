"""The prompts of a soak's engines: some share their first segments, they belong to several tenants and layouts, and
together they have far more segments than the memory holds."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenlake.layout import Layout
from tokenlake_bench.sizing import layout_of

SEGMENT_TOKENS: Final = 16
PROMPTS: Final = 160
HEADS: Final = 10
HEAD_SEGMENTS: Final = 4
MOST_SEGMENTS: Final = 20
_POPULAR: Final = 20.0
"""Prompts are drawn with weight 1 / (rank + `_POPULAR`): some are read again soon, others only long after their
eviction."""

Tokens = NDArray[np.uint32]


class Group(NamedTuple):
    """Engines that share a cache, because they have one tenant and one layout."""

    tenant: str
    layout: Layout

    @property
    def credential(self) -> str:
        """Credential of the group's tenant in the daemons' settings."""
        return f"{self.tenant}-token-0123456789"


SMALL: Final = layout_of("soak-small", SEGMENT_TOKENS, 32, layers=2, kv_heads=4)
"""Layout with segments of 16 KiB and 4 shards."""
LARGE: Final = layout_of("soak-large", SEGMENT_TOKENS, 32, layers=4, kv_heads=8)
"""Layout with segments of 64 KiB and 8 shards."""
GROUPS: Final = (Group("red", SMALL), Group("blue", SMALL), Group("red", LARGE), Group("blue", LARGE))


def _tokens(segments: int, *seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1 << 17, segments * SEGMENT_TOKENS, dtype=np.uint32)


def prompt(seed: int, number: int) -> Tokens:
    """The prompt with this number, a whole number of segments, which is equal in every process. Prompts whose numbers
    are equal modulo `HEADS` share their first segments."""
    segments = random.Random(f"{seed} {number}").randint(1, MOST_SEGMENTS - HEAD_SEGMENTS)
    return np.concatenate([_tokens(HEAD_SEGMENTS, seed, 0, number % HEADS), _tokens(segments, seed, 1, number)])


def draw_prompt(seed: int, draw: random.Random) -> Tokens:
    """Draw a prompt; popular ones are drawn more often."""
    ranks = range(PROMPTS)
    return prompt(seed, draw.choices(ranks, [1 / (rank + _POPULAR) for rank in ranks])[0])


def fresh_prompt(seed: int, number: int, segments: int) -> Tokens:
    """A prompt that no engine requests."""
    return _tokens(segments, seed, 2, number)
