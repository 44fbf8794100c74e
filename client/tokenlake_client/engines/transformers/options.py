"""The options of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tokenlake.errors import ConfigurationError
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines

Mode = Literal["auto", "fetch", "ship"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine that uses the pool. Raises `ConfigurationError` for an unknown mode."""

    credential: str | None = None
    daemon_uid: int | None = None
    """The user id that the daemon runs as, if it is neither root nor this process's user."""
    deadlines: Deadlines = DEFAULT_DEADLINES
    """The deadlines of the connection to the daemon that the engine opens."""
    adapter: str | None = None
    """The id of the active LoRA adapters; it is part of every segment key."""
    salt: str | None = None
    """A string that is part of every segment key: requests share segments only with requests of the same salt."""
    mode: Mode = "auto"
    """`auto`: the planner (`tokenlake.planner`) chooses between the other two modes for each batch, and lets the engine
    recompute segments that would take longer to fetch. It predicts from this engine's own measurements.

    `fetch` copies the known prefix of a prompt into the engine's cache. `ship` leaves the prefix on its node:
    `generate` sends the queries of each layer to the query engine of that node. If no query engine runs, or it does not
    support the model's attention, the log states the reason and the prefix is fetched. No other thread may run the
    model during `generate`."""
    segment_tokens: int = 256
    weights_digest: str | None = None
    """The digest of the model's weights, from `tokenlake_client.weights`; None: it is computed from the model."""
    window: int = 32
    """The number of segments that are fetched at a time."""
    prefill_chunk: int = 2048
    """The largest number of tokens of one forward pass of a prefill; it bounds the memory that a long prompt needs."""
    write_queue: int = 64
    """The largest number of prompts whose segments wait to be stored; each keeps its cache alive. The segments of
    further prompts are not stored."""
    write_patience: float = 1.0
    """The seconds for which the background writer waits for the pool's write budget."""
    query_deadline: float = 2.0
    """Mode `ship`: the deadline of attention over the prefixes in one layer: this many seconds for each started 4 Mi
    pairs of a query token and a prefix token. When it is missed, the forward pass is void, and is repeated after the
    prefix was fetched or computed."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigurationError("mode", self.mode, f"one of {', '.join(get_args(Mode))}")
