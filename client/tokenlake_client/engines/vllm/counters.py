"""What one side of the connector counts. Imports no engine."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

__all__ = ["Counters", "Counts"]


@dataclass(slots=True)
class Counts:
    """Sums since the engine started. Tokens are those of requests that the pool can serve."""

    requests: int = 0
    """Requests that were given blocks; a preempted one again."""
    requests_not_served: int = 0
    """Requests with adapters, images or embeddings, and requests while there was no daemon."""
    tokens_asked: int = 0
    tokens_local: int = 0
    """Found in vLLM's own prefix cache."""
    tokens_hit: int = 0
    """Taken from the pool."""
    tokens_skipped_by_cost: int = 0
    """Found in the pool and not taken, because computing them is expected to be faster."""
    lookups_late: int = 0
    """Answers of the daemon that came too late: the prompt counted as unknown."""
    loads_failed: int = 0
    """Loads whose segments were lost, corrupt or late; their tokens were recomputed."""
    tokens_loaded: int = 0
    """Copied into this rank's blocks."""
    tokens_stored: int = 0
    """Of segments that this rank filled its part of, and that were granted a slot."""
    tokens_not_stored: int = 0
    """Known to the pool already, refused, or given up because the queue was full or the blocks were needed."""
    failures: int = 0
    """Errors of the pool's path, none of which reached vLLM."""
    hook_seconds: float = 0.0
    """Time inside vLLM's calls of the connector."""
    load_seconds: float = 0.0
    """Time of fetching and copying in, in the step or beside it."""
    save_seconds: float = 0.0
    """Time of the writer's thread."""


class Counters:
    """Counts that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()

    def add(self, **amounts: float) -> None:
        """Add each amount to the count of that name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def read(self) -> Counts:
        """A consistent copy."""
        with self._lock:
            return Counts(**asdict(self._counts))
