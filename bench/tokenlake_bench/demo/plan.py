"""The plan of a demo run: its requests, the size of the pool, and the number of tokens to generate per request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake_bench.baselines import Accesses, intern_segments
from tokenlake_bench.sizing import PoolSize, pool_size
from tokenlake_bench.workload import BuiltinWorkload

NODES: Final = 2
"""Number of nodes; each has a daemon and an engine process."""
SEGMENT_TOKENS: Final = 32
"""Tokens of a segment in the demo: few, so that each node has hundreds of slots and tens of them are left for cached
copies and for writes."""
NEW_TOKENS: Final = 8
"""Number of tokens that an engine generates per request; they are compared with a run without the pool."""
REQUESTS: Final = 240
PROMPT_TOKENS: Final = (600, 2_000)
"""Lengths in tokens of the shortest and the longest prompt of the demo's built-in workload."""
CAPACITY_SHARE: Final = 0.45
"""Capacity of the pool as a share of all distinct segments of the requests. The conversations that are open at one time
fit; all conversations together do not, so that segments are evicted."""


@dataclass(frozen=True)
class DemoPlan:
    """The plan of a run of the demo: its requests, the size of the pool and of the prompts. `accesses`: the segments
    that the requests of `workload` access."""

    workload: BuiltinWorkload
    accesses: Accesses
    size: PoolSize
    new_tokens: int = NEW_TOKENS

    def tokens(self, number: int) -> list[int]:
        """The prompt of a request."""
        return [int(token) for token in self.workload[number].tokens]


def make_plan(requests: int, layout: Layout, vocabulary: int, positions: int) -> DemoPlan:
    """The plan of a demo with `requests` requests of the built-in workload, for a model with `vocabulary` token ids and
    `positions` positions. Raises TokenLakeError."""
    least = PROMPT_TOKENS[1] + NEW_TOKENS
    if positions < least:
        raise ConfigurationError("model", f"{positions} positions", f"at least {least} positions")
    workload = BuiltinWorkload(requests, vocabulary=vocabulary, prompt_tokens=PROMPT_TOKENS)
    accesses = intern_segments(workload, layout.segment_tokens)
    distinct = len({segment for prompt in accesses.prompts for segment in prompt.chain})
    capacity = int(CAPACITY_SHARE * distinct) * layout.segment_tokens
    return DemoPlan(workload, accesses, pool_size(NODES, capacity, layout))
