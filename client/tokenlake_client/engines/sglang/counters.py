"""The counts of the backend. Each is declared once, with its meaning and its metric on SGLang's metrics page. Imports
no engine."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from tokenlake_client.engines.common.reports import Counters
from tokenlake_client.engines.vllm.counters import Count

PREFIX = "sglang:tokenlake_"
"""The beginning of the names of all metrics."""


@dataclass(slots=True)
class Counts:
    """Sums since the engine started, of one rank. Tokens are those of pages of keys and values; the pages of other
    cache pools stand for the same tokens."""

    lookups: Annotated[int, Count("lookups of prompts", "lookups")] = 0
    tokens_hit_here: Annotated[
        int, Count("tokens found in the pool, in pages on this node", "looked_up_tokens", "this_node")
    ] = 0
    tokens_hit_remote: Annotated[
        int, Count("tokens found in the pool, in pages on other nodes", "looked_up_tokens", "other_nodes")
    ] = 0
    tokens_not_found: Annotated[int, Count("tokens that the pool did not have", "looked_up_tokens", "not_found")] = 0
    tokens_not_asked: Annotated[
        int,
        Count(
            "tokens for which there was no answer of the pool: no daemon, or a late one",
            "looked_up_tokens",
            "not_asked",
        ),
    ] = 0
    lookups_late: Annotated[int, Count("lookups without an answer within `match_ms`", "lookups_late")] = 0
    tokens_loaded: Annotated[
        int, Count("tokens whose pages were copied into SGLang's host memory", "loaded_tokens")
    ] = 0
    loads_failed: Annotated[
        int,
        Count(
            "batches of a load with pages that were lost, corrupt or late; SGLang computes their tokens", "loads_failed"
        ),
    ] = 0
    pages_not_read: Annotated[
        int,
        Count(
            "pages of all cache pools that a lookup found and leased, and that SGLang did not read in time: aborted "
            "requests, hits below its threshold, no host memory",
            "pages_not_read",
        ),
    ] = 0
    tokens_stored: Annotated[int, Count("tokens in pages that the pool has accepted", "stored_tokens")] = 0
    tokens_not_stored: Annotated[
        int,
        Count(
            "tokens in pages that were not stored: the pool had them already or refused them, or there was no daemon",
            "not_stored_tokens",
        ),
    ] = 0
    failures: Annotated[int, Count("errors of the pool; none of them reached SGLang", "failures")] = 0
    load_seconds: Annotated[
        float, Count("seconds that SGLang's thread for loads spent in the backend", "load_seconds")
    ] = 0.0
    save_seconds: Annotated[
        float, Count("seconds that SGLang's backup thread spent in the backend", "save_seconds")
    ] = 0.0


def _declared(counts: type[Counts]) -> dict[str, Count]:
    hints = typing.get_type_hints(counts, include_extras=True)
    return {each.name: hints[each.name].__metadata__[0] for each in dataclasses.fields(counts)}


COUNTS: Mapping[str, Count] = _declared(Counts)
"""The declarations of all counts, by name."""


def series_of(count: Count) -> str:
    """The time series of a count on SGLang's metrics page, without the labels that all of them have."""
    label = f'{{source="{count.source}"}}' if count.source else ""
    return f"{PREFIX}{count.metric}_total{label}"


class StorageCounters(Counters[Counts]):
    """The counts of one rank, and their growth. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(Counts)
        self._taken = Counts()

    def take(self) -> dict[str, float]:
        """The growth of each count that has grown since the last call. For one thread."""
        now, before = self.read(), self._taken
        self._taken = now
        growth = {name: getattr(now, name) - getattr(before, name) for name in COUNTS}
        return {name: grown for name, grown in growth.items() if grown}
