"""A coding agent's sessions, as in the Claude Code sessions of kv-cache-tester: long contexts that grow by little.

Published, for 44,746 requests in 675 sessions: input 116,697 on average, median 99,140, 508,593 at the 99th percentile;
output 437; 96.2 % of the tokens found within the session. Sessions that are no copies have 42 requests in the median
and 64 on average and begin with 14,500 tokens of tools and system prompt; a third of them are resumed with a long
context; a request adds 670 tokens in the median and follows 18 s later; 0.8 % of the requests follow a compaction,
which keeps half of the context on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from tokenlake_bench.traces import BLOCK_TOKENS
from tokenlake_bench.workloads.base import Count, Draw, Positive, Share, Sigma, TraceLine, TraceSettings, Turn, lay_out


class AgentSettings(TraceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the workload of coding-agent sessions; their defaults are fitted to the published sessions. `rate`
    is reached once the first sessions have ended."""

    requests: Annotated[int, Meta(ge=1, le=10_000_000, description="Lines to write.")] = 20_000
    rate: Annotated[float, Meta(gt=0, le=1e6, description="Requests per second, in the long run.")] = 0.5
    session_median: Annotated[Positive, Meta(description="Requests of a session, median.")] = 42.0
    session_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 0.92
    system_blocks: Annotated[int, Meta(ge=0, le=4096, description="Blocks of tools and system prompt.")] = 28
    systems: Annotated[Count, Meta(description="Number of different system prompts; a session has one.")] = 100
    system_zipf: Annotated[float, Meta(ge=0, le=10, description="The n-th system prompt has weight 1 / n^this.")] = 0.6
    first_median: Annotated[Positive, Meta(description="Tokens of a fresh session's first prompt, median.")] = 21_000.0
    first_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 0.3
    resumed_share: Annotated[Share, Meta(description="Share of sessions that are resumed.")] = 0.35
    resumed_median: Annotated[Positive, Meta(description="Tokens of a resumed session's first prompt, median.")] = (
        150_000.0
    )
    resumed_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 0.65
    growth_median: Annotated[Positive, Meta(description="Tokens that a request adds, answer included, median.")] = 670.0
    growth_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 1.2
    compact_share: Annotated[Share, Meta(description="Share of requests that follow a compaction.")] = 0.0083
    output_median: Annotated[Positive, Meta(description="Tokens of an answer, median.")] = 222.0
    output_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 1.15
    gap_median_s: Annotated[Positive, Meta(description="Seconds between two requests, median.")] = 15.0
    gap_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 0.7
    pause_share: Annotated[Share, Meta(description="Share of longer pauses among these gaps.")] = 0.15
    pause_median_s: Annotated[Positive, Meta(description="Seconds of a longer pause, median.")] = 120.0
    pause_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 1.8
    longest: Annotated[Count, Meta(description="Longest prompt in tokens; compaction precedes a longer one.")] = (
        1_000_000
    )

    @property
    def turns_mean(self) -> float:
        """Mean number of requests of a session."""
        return self.session_median * math.exp(self.session_sigma**2 / 2)


def agent_sessions(settings: AgentSettings, draw: Draw, starts: Iterator[float]) -> list[TraceLine]:
    """The requests of coding-agent sessions, in time order. `starts` gives the times at which sessions begin."""
    systems = [draw.blocks(settings.system_blocks) for _ in range(settings.systems)]
    ranks = [rank**-settings.system_zipf for rank in range(1, settings.systems + 1)]

    def turns() -> Iterator[Turn]:
        system = draw.rng.choices(systems, ranks)[0]
        least = len(system) * BLOCK_TOKENS + 1
        text = draw.text(system)
        if draw.rng.random() < settings.resumed_share:
            length = draw.length(settings.resumed_median, settings.resumed_sigma, settings.longest)
        else:
            length = draw.length(settings.first_median, settings.first_sigma, settings.longest)
        length = max(least, length)
        gap_s = 0.0
        for _ in range(draw.length(settings.session_median, settings.session_sigma, 1 << 20)):
            if length > settings.longest or draw.rng.random() < settings.compact_share:
                length = max(least, round(min(length, settings.longest) * draw.rng.uniform(0.1, 0.9)))
                text = draw.text(system)
            output = draw.length(settings.output_median, settings.output_sigma, settings.longest)
            yield Turn(gap_s, length, output, text.hash_ids(length))
            length += draw.length(settings.growth_median, settings.growth_sigma, settings.longest)
            gap_s = _gap_s(settings, draw)

    return lay_out(settings.requests, starts, turns)


def _gap_s(settings: AgentSettings, draw: Draw) -> float:
    if draw.rng.random() < settings.pause_share:
        return draw.lognormal(settings.pause_median_s, settings.pause_sigma)
    return draw.lognormal(settings.gap_median_s, settings.gap_sigma)
