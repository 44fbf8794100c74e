"""What a client says of each request: that its conversation goes on, or that it is over, and how often it is right."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenlake.advice import NO_ADVICE, Advice, Outlook
from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Prompt

__all__ = ["hints"]


def hints(prompts: Sequence[Prompt], accuracy: float | None, seed: int) -> list[Advice]:
    """One for each prompt: what it says is true with probability `accuracy`, as `seed` draws; None: nothing is said.

    A conversation goes on when a later prompt has its number.
    """
    if accuracy is None:
        return [NO_ADVICE] * len(prompts)
    if not 0 <= accuracy <= 1:
        raise ConfigurationError("hint_accuracy", accuracy, "0 to 1")
    rng = random.Random(seed)
    words = {True: Advice(Outlook.GOES_ON), False: Advice(Outlook.OVER)}
    last = {prompt.conversation: index for index, prompt in enumerate(prompts)}
    return [
        words[(last[prompt.conversation] > index) == (rng.random() < accuracy)] for index, prompt in enumerate(prompts)
    ]
