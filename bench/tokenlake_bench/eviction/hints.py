"""The hints of each request: the length of the answer, as an engine reports it, and, as from a client, whether the
conversation goes on, which is right with a given probability."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenlake.errors import ConfigurationError
from tokenlake.hints import Hints, Outlook
from tokenlake_bench.baselines import Prompt


def hints(prompts: Sequence[Prompt], accuracy: float | None, seed: int) -> list[Hints]:
    """The hints of each prompt: the length of the answer where the trace has it, and whether the conversation goes on,
    which is right with probability `accuracy` and drawn by `seed`; with `accuracy` None that part of the hint is
    absent.

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
