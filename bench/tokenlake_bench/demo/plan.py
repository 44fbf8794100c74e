"""The plan of a demo run: its requests, the size of the pool, and the number of tokens to generate per request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake_bench.baselines import Accesses, intern_segments
from tokenlake_bench.sizing import PoolSize, pool_size
from tokenlake_bench.traces import read_mooncake
from tokenlake_bench.workload import BuiltinSettings, Request, Workload, builtin_workload

NODES: Final = 3
ENGINES: Final = 2
"""Number of engine processes. They are attached to the first nodes; request i goes to engine i modulo this number."""
SEGMENT_TOKENS: Final = 32
"""Tokens of a segment in the demo: few, so that each node has hundreds of slots and tens of them are left for cached
copies and for writes."""
NEW_TOKENS: Final = 8
"""Number of tokens that an engine generates per request; they are compared with a run without the pool."""
REQUESTS: Final = 240
PROMPT_TOKENS: Final = (600, 2_000)
"""Lengths in tokens of the shortest and the longest prompt of the demo's built-in workload."""
TRACE_LONGEST: Final = 3_072
"""Longest prompt in tokens that the demo takes from a trace; longer prompts are left out because one takes seconds on a
CPU."""
CAPACITY_SHARE: Final = 0.45
"""Capacity of the pool as a share of all distinct segments of the requests. The conversations that are open at one time
fit; all conversations together do not, so that segments are evicted."""


@dataclass(frozen=True)
class DemoPlan:
    """The plan of a run of the demo: its requests, the size of the pool and of the prompts. `accesses`: the segments
    that the requests of `workload` access. `note`: text that is printed after the number of requests."""

    workload: Workload
    accesses: Accesses
    size: PoolSize
    note: str
    new_tokens: int = NEW_TOKENS


class _ShortRequests:
    """The first `count` requests of `workload` whose prompts have at most `longest` tokens, with new numbers from 0."""

    def __init__(self, workload: Workload, longest: int, count: int) -> None:
        self._workload = workload
        self._kept = [request.index for request in workload if len(request.tokens) <= longest][:count]

    @property
    def name(self) -> str:
        return self._workload.name

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Request]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Request:
        request = self._workload[self._kept[index]]
        return Request(index, request.at_s, request.conversation, request.tokens, request.output_tokens)


def make_plan(trace: Path | None, requests: int, layout: Layout, vocabulary: int, positions: int) -> DemoPlan:
    """The plan of a demo with `requests` requests of the trace, or of the built-in workload without one, for a model
    with `vocabulary` token ids and `positions` positions. Raises TokenLakeError."""
    longest = min(TRACE_LONGEST, positions - NEW_TOKENS)
    if trace is None:
        settings = BuiltinSettings(requests=requests, vocabulary=vocabulary, prompt_tokens=PROMPT_TOKENS)
        if settings.prompt_tokens[1] > longest:
            raise ConfigurationError(
                "model", f"{positions} positions", f"at least {settings.prompt_tokens[1] + NEW_TOKENS} positions"
            )
        workload, note = builtin_workload(settings), ""
    else:
        workload = _ShortRequests(read_mooncake(trace, vocabulary=vocabulary), longest, requests)
        note = f", the first of at most {longest:,} tokens; longer ones are left out"
    accesses = intern_segments(workload, layout.segment_tokens)
    distinct = len({segment for prompt in accesses.prompts for segment in prompt.chain})
    capacity = int(CAPACITY_SHARE * distinct) * layout.segment_tokens
    return DemoPlan(workload, accesses, pool_size(NODES, capacity, layout), note)
