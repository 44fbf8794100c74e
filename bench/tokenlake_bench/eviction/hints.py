"""What is said of each request. By the engine, without being asked: how long its answer was. By a client that gives
hints: that its conversation goes on, or that it is over; and how often it is right."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenlake.errors import ConfigurationError
from tokenlake.hints import Hints, Outlook
from tokenlake_bench.baselines import Prompt

__all__ = ["hints"]


def hints(prompts: Sequence[Prompt], accuracy: float | None, seed: int) -> list[Hints]:
    """One for each prompt: the length of the answer where the trace has it, and a hint that is true with probability
    `accuracy`, as `seed` draws; None: no hint.

    A conversation goes on when a later prompt has its number.
    """
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise ConfigurationError("hint_accuracy", accuracy, "0 to 1")
    rng = random.Random(seed)
    last = {prompt.conversation: index for index, prompt in enumerate(prompts)}

    def outlook(index: int, conversation: int) -> Outlook:
        if accuracy is None:
            return Outlook.UNKNOWN
        return Outlook.GOES_ON if (last[conversation] > index) == (rng.random() < accuracy) else Outlook.OVER

    return [
        Hints(outlook(index, prompt.conversation), output_tokens=prompt.output_tokens or -1)
        for index, prompt in enumerate(prompts)
    ]
