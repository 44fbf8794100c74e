"""Prompts of one length behind equally popular prefixes: their hit rates can be computed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from tokenlake_bench.traces import BLOCK_TOKENS
from tokenlake_bench.workloads.base import Count, Draw, TraceLine, TraceSettings, Turn, lay_out


class UniformSettings(TraceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the workload of equally popular prefixes. With r requests and p prefixes an infinite cache finds (r
    - p (1 - (1 - 1/p)^r)) / r of the prefixes' tokens, because it misses each prefix that occurs once."""

    prefixes: Annotated[Count, Meta(description="Number of prefixes, equally popular.")] = 1_000
    prefix_blocks: Annotated[int, Meta(ge=0, le=4096, description="Blocks of a prefix.")] = 4
    own_tokens: Annotated[Count, Meta(description="Tokens behind the prefix.")] = 2_048
    output_tokens: Annotated[Count, Meta(description="Tokens of an answer.")] = 128

    @property
    def turns_mean(self) -> float:
        """The number of requests of a session: 1, because a session is a single prompt."""
        return 1.0


def uniform_prompts(settings: UniformSettings, draw: Draw, starts: Iterator[float]) -> list[TraceLine]:
    """The requests of the workload in order of time. `starts` gives their times."""
    prefixes = [draw.blocks(settings.prefix_blocks) for _ in range(settings.prefixes)]
    length = settings.prefix_blocks * BLOCK_TOKENS + settings.own_tokens

    def prompt() -> Iterator[Turn]:
        text = draw.text(draw.rng.choice(prefixes))
        yield Turn(0.0, length, settings.output_tokens, text.hash_ids(length))

    return lay_out(settings.requests, starts, prompt)
