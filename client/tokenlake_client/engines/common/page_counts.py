"""The counts of integrations whose engine names its pages by hashes (`pages`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from tokenlake_client.engines.common.counts import Count, declared
from tokenlake_client.engines.common.reports import Counters


@dataclass(slots=True)
class PageCounts:
    """Sums since the engine started, of one rank. Tokens are those of one cache pool, that of keys and values; the
    pages of other cache pools stand for the same tokens."""

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
    tokens_loaded: Annotated[int, Count("tokens whose pages were copied into the engine's memory", "loaded_tokens")] = 0
    loads_failed: Annotated[
        int,
        Count(
            "batches of a load with pages that were lost, corrupt or late; the engine computes their tokens",
            "loads_failed",
        ),
    ] = 0
    pages_not_read: Annotated[
        int,
        Count(
            "pages of all cache pools that a lookup found and leased, and that the engine did not read in time: "
            "aborted requests, hits below its threshold, no memory",
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
    failures: Annotated[int, Count("errors of the pool; none of them reached the engine", "failures")] = 0
    load_seconds: Annotated[float, Count("seconds that the engine's thread spent in loads", "load_seconds")] = 0.0
    save_seconds: Annotated[float, Count("seconds that the engine's thread spent in stores", "save_seconds")] = 0.0


COUNTS: Mapping[str, Count] = declared(PageCounts, Count)
"""The declarations of all counts, by name."""
_FAMILIES = {"looked_up_tokens": "tokens of lookups by what was found"}


def documentation(count: Count) -> str:
    """The text of a count's metric on the metrics page."""
    return f"TokenLake: {_FAMILIES.get(count.metric, count.meaning)}."


class PageCounters(Counters[PageCounts]):
    """The counts of one rank, and their growth. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(PageCounts)
        self._taken = PageCounts()

    def take(self) -> dict[str, float]:
        """The growth of each count that has grown since the last call. For one thread."""
        now, before = self.read(), self._taken
        self._taken = now
        growth = {name: getattr(now, name) - getattr(before, name) for name in COUNTS}
        return {name: grown for name, grown in growth.items() if grown}
