"""Conversations as in Mooncake's conversation trace (FAST '25): heavy tails, little sharing, one block in all prompts.

Published, for 12,031 requests in 3,537 s: input 12,035 on average, median 6,909, 85,400 at the 99th percentile; output
343; 37.4 % of the tokens found in an infinite cache; 182,790 blocks, 75.8 % of them used once; 5.7 and 12.2 % of the
accesses go to the top 0.1 and 1 % of the blocks, and one block is in every request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from tokenlake_bench.traces import BLOCK_TOKENS
from tokenlake_bench.workloads.base import (
    Count,
    Draw,
    Positive,
    Share,
    Sigma,
    TraceLine,
    TraceSettings,
    Turn,
    lay_out,
    zipf_mean,
)


class ConversationSettings(TraceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the workload of conversations. Their defaults are fitted to the requests of Mooncake's trace, which
    were grouped into conversations by the blocks that they share."""

    requests: Annotated[int, Meta(ge=1, le=10_000_000, description="Lines to write.")] = 12_000
    system_blocks: Annotated[int, Meta(ge=0, le=4096, description="Blocks that all prompts begin with.")] = 1
    turns_exponent: Annotated[
        float, Meta(ge=0, le=10, description="A conversation of k turns has weight 1 / k^this.")
    ] = 2.5
    most_turns: Annotated[int, Meta(ge=1, le=1000, description="Most turns of a conversation.")] = 16
    first_median: Annotated[Positive, Meta(description="Tokens of a first prompt, median.")] = 5_500.0
    first_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 1.16
    document_share: Annotated[Share, Meta(description="Share of conversations that begin with a shared document.")] = (
        0.05
    )
    documents: Annotated[Count, Meta(description="Number of shared documents.")] = 150
    document_blocks: Annotated[float, Meta(gt=0, le=4096, description="Blocks of a document, mean.")] = 5.0
    document_zipf: Annotated[float, Meta(ge=0, le=10, description="The n-th document has weight 1 / n^this.")] = 0.6
    user_median: Annotated[Positive, Meta(description="Tokens of a further message, median.")] = 50.0
    user_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 1.3
    paste_share: Annotated[Share, Meta(description="Share of messages with pasted text.")] = 0.25
    paste_median: Annotated[Positive, Meta(description="Tokens of such a message, median.")] = 3_300.0
    paste_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 0.9
    output_mean: Annotated[Positive, Meta(description="Tokens of an answer, mean (gamma, shape 2).")] = 343.0
    gap_median_s: Annotated[Positive, Meta(description="Seconds between two turns, median.")] = 123.0
    gap_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 1.05
    longest: Annotated[Count, Meta(description="Longest prompt in tokens; a conversation ends before it.")] = 131_072

    @property
    def turns_mean(self) -> float:
        """Mean number of requests of a conversation, if no conversation ends early because its prompt is too long."""
        return zipf_mean(self.turns_exponent, self.most_turns)


def conversations(settings: ConversationSettings, draw: Draw, starts: Iterator[float]) -> list[TraceLine]:
    """The requests of conversations, in time order. `starts` gives the times at which conversations begin."""
    system = draw.blocks(settings.system_blocks)
    documents = [
        system + draw.blocks(1 + int(draw.rng.expovariate(1 / max(1e-9, settings.document_blocks - 0.5))))
        for _ in range(settings.documents)
    ]
    ranks = [rank**-settings.document_zipf for rank in range(1, settings.documents + 1)]
    turn_weights = [k**-settings.turns_exponent for k in range(1, settings.most_turns + 1)]

    def turns() -> Iterator[Turn]:
        begins = system
        if draw.rng.random() < settings.document_share:
            begins = draw.rng.choices(documents, ranks)[0]
        text = draw.text(begins)
        least = len(begins) * BLOCK_TOKENS + 1
        length = max(least, draw.length(settings.first_median, settings.first_sigma, settings.longest))
        gap_s = 0.0
        for _ in range(draw.rng.choices(range(1, settings.most_turns + 1), turn_weights)[0]):
            if length > settings.longest:
                return
            output = max(1, round(draw.rng.gammavariate(2.0, settings.output_mean / 2)))
            yield Turn(gap_s, length, output, text.hash_ids(length))
            length += output + _message(settings, draw)
            gap_s = draw.lognormal(settings.gap_median_s, settings.gap_sigma)

    return lay_out(settings.requests, starts, turns)


def _message(settings: ConversationSettings, draw: Draw) -> int:
    if draw.rng.random() < settings.paste_share:
        return draw.length(settings.paste_median, settings.paste_sigma, settings.longest)
    return draw.length(settings.user_median, settings.user_sigma, settings.longest)
