"""What an engine counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields

__all__ = ["Counters", "Counts"]


@dataclass(slots=True)
class Counts:
    """Sums since the engine was made. `tokens_asked == tokens_hit + tokens_shipped + tokens_computed`; in mode `ship` a
    request is counted when it is done, by what became of each token."""

    requests: int = 0
    """Rows of batches whose prompt was looked up."""
    requests_without_pool: int = 0
    """Calls served by the model alone: not servable, no daemon, or a failure."""
    tokens_asked: int = 0
    tokens_hit: int = 0
    """Whose cache was copied from the pool."""
    tokens_shipped: int = 0
    """Whose cache was attended where it lies, on this node or another, to the end of the request."""
    tokens_computed: int = 0
    tokens_skipped: int = 0
    """Those among `tokens_computed` that the pool had: mode `auto` found them faster to compute."""
    tokens_stored: int = 0
    tokens_not_stored: int = 0
    """New tokens whose segment was refused, was there already, or found the writer's queue full."""
    tokens_refused: int = 0
    """Those among `tokens_not_stored` that the pool refused; the log names each code once."""
    queries_sent: int = 0
    """Query tokens that went to other nodes, once for each layer and node."""
    bytes_sent: int = 0
    """Queries that went to other nodes."""
    bytes_received: int = 0
    """Attention that came back from there."""
    steps_void: int = 0
    """Forward passes that were repeated because a part of a prefix was lost in them."""
    failures: int = 0
    """Errors of the pool's path, none of which reached the caller."""
    pool_seconds: float = 0.0
    """Time that requests spent matching, fetching and copying, and waiting for what others compute; the background
    writer's is not in it."""


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
            return Counts(**{field.name: getattr(self._counts, field.name) for field in fields(Counts)})
