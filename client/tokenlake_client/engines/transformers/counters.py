"""The counts of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Sums since the engine was made. `tokens_asked == tokens_hit + tokens_shipped + tokens_computed`. A request is
    counted at its end. In mode `ship` the cache of a token may have come from several sources in turn: the last one
    counts."""

    requests: int = 0
    """Number of prompts that were looked up in the pool; each prompt of a batch counts."""
    requests_without_pool: int = 0
    """Number of calls of `generate` or `prefill` that the model served alone, because the pool cannot serve them, had
    no daemon, or failed."""
    tokens_asked: int = 0
    tokens_hit: int = 0
    """Number of prompt tokens whose cache was copied from the pool."""
    tokens_shipped: int = 0
    """Number of prompt tokens whose cache stayed in an arena, of this node or another, to the end of the request."""
    tokens_computed: int = 0
    tokens_skipped: int = 0
    """Number of tokens among `tokens_computed` that the pool had, and that mode `auto` did not use, because it
    predicted that computing them is faster."""
    tokens_stored: int = 0
    tokens_not_stored: int = 0
    """Number of computed tokens whose segment was not stored: the pool refused it or had it already, or it did not fit
    into the writer's queue."""
    tokens_refused: int = 0
    """Number of tokens among `tokens_not_stored` whose segment the pool refused; the log names each code of a refusal
    once."""
    queries_sent: int = 0
    """Number of query tokens sent to other nodes, counted once for each layer and node."""
    bytes_sent: int = 0
    """Bytes of queries sent to query engines of other nodes."""
    bytes_received: int = 0
    """Bytes of attention received from query engines of other nodes."""
    steps_void: int = 0
    """Number of forward passes that were repeated because a part of a prefix was lost during the pass."""
    failures: int = 0
    """Number of errors of the pool; none of them reached the engine's caller."""
    pool_seconds: float = 0.0
    """Seconds that requests spent on matching, fetching, copying, and waiting for other engines. Without the time of
    the background writer."""
