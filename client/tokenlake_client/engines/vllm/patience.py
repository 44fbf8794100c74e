"""Whether and how long a prompt waits for whoever computes it already, instead of being computed here too.

::

    another engine computes it   wait until it is stored, for `PATIENCE` times what computing it is expected to take
    nobody does                  the pool says so at once: it is computed here, and the others wait for it; where that
                                 takes several steps the pool is told of the rest, since each step stores what it can
    a request of this engine     nobody waits: what that one computes is found in vLLM's own cache, before it is stored
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.identity import SegmentKey
from tokenlake_client.engines.vllm.weighing import Loads

__all__ = ["LEAST_S", "LONGEST_S", "MOST_WAITING", "PATIENCE", "Patience"]

PATIENCE = 1.5
"""Whoever computes the same may have begun a moment ago, and what it has to store comes a little later than it is
computed."""
LONGEST_S = 10.0
"""The pool waits no longer."""
LEAST_S = 0.02
"""What is computed sooner is not waited for."""
MOST_WAITING = 16
"""Requests at a time: what is found of their prompts stays leased while they wait."""


class Patience:
    """Of one engine. For the scheduler's thread."""

    def __init__(self, worth: Loads, segment_tokens: int, *, stores: bool) -> None:
        """`stores`: what is computed here is stored."""
        self._worth = worth
        self._segment = segment_tokens
        self._stores = stores
        self._computing: dict[str, tuple[int, SegmentKey]] = {}
        """By request, the first segment that the pool did not have: its place in the prompt, and its key."""
        self._waiting: dict[str, None] = {}
        """Requests whose question may wait, and was not answered yet."""

    def begin(self, request: str, keys: Sequence[SegmentKey], total: int, local: int) -> tuple[float, float]:
        """How long a question for `keys` may wait, and how much of that for each segment that turns out to be missing;
        zeros where it does not."""
        if len(self._waiting) >= MOST_WAITING or self.computed_here(keys):
            return 0.0, 0.0
        in_flight_wait_s = self.seconds(total, local)
        if not in_flight_wait_s:
            return 0.0, 0.0
        self._waiting[request] = None
        # As for the last segment, which is computed behind all others.
        return in_flight_wait_s, PATIENCE * (self._worth.prefill_s(total, max(0, total - self._segment)) or 0.0)

    def answered(self, request: str) -> None:
        """Its question waits no longer."""
        self._waiting.pop(request, None)

    def seconds(self, total: int, local: int) -> float:
        """For a prompt of `total` tokens, `local` of which vLLM itself has; 0: it does not wait, and nobody waits for
        it. So it is while the prefill's time is not known, where loading takes longer than computing, and where nothing
        is stored."""
        expected = self._worth.prefill_s(total, local)
        if not self._stores or expected is None or expected < LEAST_S or not self._worth.pays(total):
            return 0.0
        return min(PATIENCE * expected, LONGEST_S)

    def computes(self, request: str, index: int, key: SegmentKey) -> None:
        """The pool lacks `key`, segment `index` of `request`: it is computed here."""
        self._computing[request] = index, key

    def ended(self, request: str) -> None:
        """`request` is done."""
        self.answered(request)
        self._computing.pop(request, None)

    def computed_here(self, keys: Sequence[SegmentKey]) -> bool:
        """Does a request of this engine compute one of these, the keys of a prompt? Before it lost its blocks, it may
        have been this very prompt."""
        return any(index < len(keys) and keys[index] == key for index, key in self._computing.values())
