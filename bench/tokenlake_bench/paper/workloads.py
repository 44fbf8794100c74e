"""Workloads with the published lengths and sharing of LooGLE, SCBench and ShareGPT; the data sets themselves have no
times of arrival, and their texts are not needed.

Published: LooGLE has 776 documents of 24,000 tokens and more on average, with 6,448 questions. SCBench has 931 sessions
of 5 turns in 12 tasks, 227K tokens on average over the tasks. ShareGPT has first prompts of 161 tokens and answers of
338 on average. The TokenLake paper puts a long system prompt before ShareGPT's, whose length it does not tell.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final

from tokenlake_bench.baselines import Accesses, Prompt
from tokenlake_bench.traces import BLOCK_TOKENS
from tokenlake_bench.workloads.base import Draw, TraceLine, poisson
from tokenlake_bench.workloads.command import generate

LOOGLE_TOKENS: Final = 47 * BLOCK_TOKENS
QUESTIONS: Final = 8
"""Number of questions about a document of LooGLE, on average."""
SYSTEM_TOKENS: Final = 8 * BLOCK_TOKENS
"""Length of the system prompt before ShareGPT's prompts: our choice."""
SCBENCH: Final = (
    *((125_000, 100), (112_000, 100), (124_000, 90), (65_000, 88), (198_000, 69), (188_000, 58)),
    *((120_000, 100), (22_000, 54), (104_000, 79), (105_000, 70), (68_000, 88)),
)
"""(mean length in tokens, number of sessions) of the tasks of SCBench but Zh.QA, whose 35 sessions have 1.5M tokens
each, more than the 1M of context of the paper's model. Without them a session has 111K tokens on average; over the 12
tasks, each counted once, it is 227K."""
TURNS: Final = 5
PAUSE_S: Final = 10.0
"""Seconds from an answer to the next turn of the session, on average (exponential): our choice."""


def loogle(requests: int, seed: int) -> Accesses:
    """Questions about documents in random order, `QUESTIONS` for each document on average."""
    return _documents(
        requests=requests,
        documents=max(1, requests // QUESTIONS),
        document_tokens=LOOGLE_TOKENS,
        question_mean=60,
        output_mean=60,
        rate=2.0,
        seed=seed,
    )


def sharegpt(requests: int, seed: int) -> Accesses:
    """Prompts behind one system prompt."""
    return _documents(
        requests=requests,
        documents=1,
        document_tokens=SYSTEM_TOKENS,
        question_mean=161,
        output_mean=338,
        rate=20.0,
        seed=seed,
    )


def scbench(requests: int, seed: int) -> Accesses:
    """Sessions of `TURNS` turns over one context each, which begin by a Poisson process. A turn follows the answer to
    the one before it; the answers are part of no later prompt, as no system stores generated tokens."""
    draw, starts = Draw(seed), poisson(0.5 / TURNS, seed)
    rng = random.Random(seed)
    lengths, weights = zip(*SCBENCH, strict=True)
    prompts: list[Prompt] = []
    while len(prompts) < requests:
        (tokens,) = rng.choices(lengths, weights)
        at_s, context = next(starts), draw.blocks(tokens // BLOCK_TOKENS)
        for turn in range(TURNS):
            asked = len(context) * BLOCK_TOKENS + 1 + round(rng.expovariate(1 / 60))
            output = 1 + round(rng.expovariate(1 / 60))
            follows, pause_s = (len(prompts) - 1, rng.expovariate(1 / PAUSE_S)) if turn else (None, 0.0)
            prompts.append(Prompt(asked, tuple(context), at_s, output, follows=follows, pause_s=pause_s))
    return Accesses(BLOCK_TOKENS, prompts)


def _documents(**values: float) -> Accesses:
    return Accesses(BLOCK_TOKENS, list(_prompts(generate("documents", values))))


def _prompts(lines: Iterable[TraceLine]) -> Iterable[Prompt]:
    for line in lines:
        chain = tuple(line.hash_ids[: line.input_length // BLOCK_TOKENS])
        yield Prompt(line.input_length, chain, line.timestamp / 1000, line.output_length)


WORKLOADS: Final[dict[str, Callable[[int, int], Accesses]]] = {
    "loogle": loogle,
    "scbench": scbench,
    "sharegpt": sharegpt,
}
"""By name, functions that make a workload of so many requests, from a seed."""
