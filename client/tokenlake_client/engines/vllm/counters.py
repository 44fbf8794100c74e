"""The counts of one side of the connector. Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """Sums since the engine started. Tokens are counted for requests that the pool can serve."""

    requests: int = 0
    """Number of requests to which vLLM gave blocks; a preempted request counts again."""
    requests_not_served: int = 0
    """Number of requests that the pool cannot serve: with adapters, images or embeddings, for example."""
    tokens_asked: int = 0
    tokens_local: int = 0
    """Number of prompt tokens found in vLLM's own prefix cache."""
    tokens_hit: int = 0
    """Number of prompt tokens whose cache was taken from the pool."""
    tokens_skipped_by_cost: int = 0
    """Number of tokens that the pool had and the engine computed, because computing was predicted to be faster."""
    lookups_late: int = 0
    """Number of lookups whose answer did not come in time; the whole prompt counts as a miss."""
    loads_failed: int = 0
    """Number of loads with segments that were lost, corrupt or late; their tokens were recomputed."""
    tokens_loaded: int = 0
    """Number of tokens whose cache was copied into this rank's blocks."""
    tokens_stored: int = 0
    """Number of tokens in segments that the pool accepted and whose shards this rank filled."""
    tokens_not_stored: int = 0
    """Number of tokens in segments that were not stored: the pool had them already or refused them, the queue was full,
    the pool failed, or vLLM reused their blocks."""
    failures: int = 0
    """Number of errors of the pool; none of them reached vLLM."""
    hook_seconds: float = 0.0
    """Seconds that vLLM spent in the connector's hooks."""
    load_seconds: float = 0.0
    """Seconds of fetching segments and copying them into blocks, during steps or in the background."""
    save_seconds: float = 0.0
    """Seconds that the thread that stores segments was busy."""
