"""What a converted log holds: sums over its requests, and the tokens that a cache without a limit would have found, in
bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tokenlake_bench.convert.base import Logged

MOST_IDS: Final = 1 << 20
"""Block ids that are remembered. Beyond them every second id is, then every fourth, and so on: a spatial sample, as in
SHARDS (Waldspurger et al., FAST '15)."""


@dataclass(slots=True)
class Summary:
    """Sums over requests. `shared_tokens` are those of full blocks that an earlier prompt began with; `distinct_tokens`
    those of all different full blocks. Both are estimates where `every` is above 1: one block id in so many was
    looked at."""

    block_tokens: int
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    unanswered: int = 0
    """Requests whose answer the log does not have."""
    first_s: float = 0.0
    last_s: float = 0.0
    shared_tokens: int = 0
    every: int = 1
    most_ids: int = MOST_IDS
    _known: set[int] = field(default_factory=set)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all different full blocks: what a cache without a limit holds at the end."""
        return len(self._known) * self.every * self.block_tokens

    @property
    def shared(self) -> float:
        """The share of the prompts' tokens that a cache without a limit would have found."""
        return self.shared_tokens / max(1, self.input_tokens)

    def add(self, logged: Logged) -> None:
        """Add the next request in order of time."""
        if not self.requests:
            self.first_s = logged.at_s
        self.last_s = logged.at_s
        self.requests += 1
        self.input_tokens += logged.input_tokens
        self.output_tokens += logged.output_tokens or 0
        self.unanswered += logged.output_tokens is None
        full = logged.block_ids[: logged.input_tokens // self.block_tokens]
        # The id of a block stands for the whole prefix up to its end: if it was seen, so were those before it.
        for block in full[full % np.uint64(self.every) == 0].tolist():
            if block in self._known:
                self.shared_tokens += self.every * self.block_tokens
            else:
                self._known.add(block)
        while len(self._known) > self.most_ids:
            self.every *= 2
            self._known = {block for block in self._known if block % self.every == 0}
