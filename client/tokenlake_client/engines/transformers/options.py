"""How an engine uses the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tokenlake.errors import ConfigurationError
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines

__all__ = ["EngineOptions"]

Mode = Literal["auto", "fetch", "ship"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine uses the pool. Raises `ConfigurationError` for an unknown mode."""

    credential: str | None = None
    daemon_uid: int | None = None
    """The user that the daemon runs as, where that is neither root nor this process's."""
    deadlines: Deadlines = DEFAULT_DEADLINES
    """Of the pool that the engine opens."""
    adapter: str | None = None
    """Id of the LoRA adapters that are active; part of every key."""
    salt: str | None = None
    """Part of every key: requests share only with requests of the same salt."""
    mode: Mode = "auto"
    """`auto` lets the planner choose for each batch between the other two, and recompute what would take longer to
    bring (`tokenlake.planner`), from what this engine measures as it serves.

    `fetch` copies the known prefix of a prompt into the engine's cache. `ship` leaves it where it is, on this node
    or another: `generate` sends each layer's queries there, by the query engine of its node. Where none runs, or a
    model's attention cannot be served so, the log says why, and the prefix is fetched. Nobody else may run the model
    while `generate` does."""
    segment_tokens: int = 256
    weights_digest: str | None = None
    """From `tokenlake_client.weights`; computed from the model where None."""
    window: int = 32
    """Segments that are fetched at a time."""
    prefill_chunk: int = 2048
    """Most tokens of one forward pass; bounds the memory of a long prompt."""
    write_queue: int = 64
    """Prompts waiting to be stored; each keeps its cache alive. Beyond it nothing is stored."""
    write_patience: float = 1.0
    """Seconds the background writer waits for the pool's write budget."""
    query_deadline: float = 2.0
    """Mode `ship`: seconds that one layer of a forward pass waits for attention over its prefixes, once for every
    4 Mi pairs of a new and a cached token that are begun. After that the pass is void, and repeated with the prefix
    fetched or computed."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigurationError("mode", self.mode, f"one of {', '.join(get_args(Mode))}")
