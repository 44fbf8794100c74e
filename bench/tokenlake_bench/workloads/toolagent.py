"""Tool calls behind hot prompt templates, beside conversations, as in the toolagent-like trace.

Two templates of 12 and 5 blocks in 37 and 14 % of the requests, followed by one to four blocks of their own, with short
answers; the other requests are conversations. Published, for 24,585 requests in 3,537 s: input 8,864 on average, median
6,464, 66,228 at the 99th percentile; output 177; 54.6 % of the tokens found in an infinite cache; 205,018 blocks, 78.5
% used once; 32.7 and 37.4 % of the accesses to the top 0.1 and 1 %; the hottest block is in 49 % of the requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from tokenlake_bench.traces import BLOCK_TOKENS
from tokenlake_bench.workloads.base import Draw, Positive, Share, TraceLine, TraceSettings, Turn, lay_out, poisson
from tokenlake_bench.workloads.conversation import ConversationSettings, conversations


class ToolAgentSettings(TraceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the workload of tool calls. The conversations beside them have the defaults of
    `ConversationSettings`."""

    requests: Annotated[int, Meta(ge=1, le=10_000_000, description="Lines to write.")] = 24_000
    rate: Annotated[float, Meta(gt=0, le=1e6, description="Requests per second, in the long run.")] = 6.95
    first_share: Annotated[Share, Meta(description="Share of requests with the first template.")] = 0.372
    first_blocks: Annotated[int, Meta(ge=1, le=4096, description="Blocks of that template.")] = 12
    second_share: Annotated[Share, Meta(description="Share of requests with the second template.")] = 0.138
    second_blocks: Annotated[int, Meta(ge=1, le=4096, description="Blocks of that template.")] = 5
    own_mean: Annotated[Positive, Meta(description="Tokens behind a template, mean (exponential).")] = 640.0
    call_share: Annotated[Share, Meta(description="Share of answers to the first template that are a bare call.")] = 0.6
    call_output: Annotated[int, Meta(ge=1, le=1 << 20, description="Tokens of a bare call.")] = 3
    other_output: Annotated[Positive, Meta(description="Tokens of other answers, mean (exponential).")] = 29.0

    def __post_init__(self) -> None:
        if self.first_share + self.second_share > 1:
            raise ValueError(f"second_share: at most {1 - self.first_share:g}, the rest beside first_share")

    @property
    def turns_mean(self) -> float:
        """The number of requests of a session: 1, because a session is a single tool call."""
        return 1.0


def tool_calls(settings: ToolAgentSettings, draw: Draw, starts: Iterator[float]) -> list[TraceLine]:
    """Tool calls and conversations, in time order. `starts` gives the times of the tool calls; the conversations begin
    at the times of a Poisson process."""
    share = settings.first_share + settings.second_share
    chats = round(settings.requests * (1 - share))
    lines = [_chats(settings, draw, chats)] if chats else []
    if chats < settings.requests:
        first, second = draw.blocks(settings.first_blocks), draw.blocks(settings.second_blocks)

        def call() -> Iterator[Turn]:
            hot = draw.rng.random() * share < settings.first_share
            template = first if hot else second
            length = len(template) * BLOCK_TOKENS + 16 + round(draw.rng.expovariate(1 / settings.own_mean))
            if hot and draw.rng.random() < settings.call_share:
                output = settings.call_output
            else:
                output = 1 + round(draw.rng.expovariate(1 / settings.other_output))
            yield Turn(0.0, length, output, draw.text(template).hash_ids(length))

        calls = ((at_s / share) for at_s in starts)
        lines.append(lay_out(settings.requests - chats, calls, call))
    return list(heapq.merge(*lines, key=lambda line: line.timestamp))


def _chats(settings: ToolAgentSettings, draw: Draw, requests: int) -> list[TraceLine]:
    chat = ConversationSettings(requests=requests)
    share = requests / settings.requests
    return conversations(chat, draw, poisson(settings.rate * share / chat.turns_mean, settings.seed + 1))
