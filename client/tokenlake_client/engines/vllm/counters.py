"""The counts of one side of the connector. Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """Sums since the engine started. Tokens are counted for requests that the pool can serve."""

    requests: int = 0
    """Requests that were given blocks; a preempted request counts again."""
    requests_not_served: int = 0
    """Requests that the pool cannot serve: with adapters, images or embeddings, for example."""
    tokens_asked: int = 0
    tokens_local: int = 0
    """Tokens found in vLLM's own prefix cache."""
    tokens_hit: int = 0
    """Tokens taken from the pool."""
    tokens_skipped_by_cost: int = 0
    """Tokens found in the pool and computed, because that was predicted to be faster."""
    lookups_late: int = 0
    """Lookups whose answer did not come in time; the whole prompt counts as a miss."""
    loads_failed: int = 0
    """Loads with segments that were lost, corrupt or late; their tokens were recomputed."""
    tokens_loaded: int = 0
    """Tokens copied into this rank's blocks."""
    tokens_stored: int = 0
    """Tokens of the segments that the pool accepted and whose shards this rank filled."""
    tokens_not_stored: int = 0
    """Tokens of segments that the pool had already or refused, or that were not stored because the queue was full, the
    pool failed, or vLLM reused their blocks."""
    failures: int = 0
    """Errors of the pool; none of them reached vLLM."""
    hook_seconds: float = 0.0
    """Time in the connector's hooks."""
    load_seconds: float = 0.0
    """Time of fetching and copying into blocks, during steps or in the background."""
    save_seconds: float = 0.0
    """Time of the thread that stores segments."""
