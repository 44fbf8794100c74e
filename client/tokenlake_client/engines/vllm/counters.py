"""The counts and the measured times of one side of the connector. Each is declared once, with its meaning and its
metric on vLLM's metrics page. Imports no engine.

A count belongs to the side that adds to it. vLLM takes the growth of each side after each step, adds the sides up, and
passes the sum to the process that serves the page::

    scheduler's side  --\
    first rank        ---+--  merge  --  the metrics page, and every ten seconds `summary` in vLLM's log
    further ranks     --/
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from tokenlake_client.engines.common.counts import Count, declared
from tokenlake_client.engines.common.reports import Counters

PREFIX = "vllm:tokenlake_"
"""The beginning of the names of all metrics."""
MAX_SAMPLES = 4096
"""Limit of the samples of one time that are kept until they are taken; older samples are dropped."""

Growth = dict[str, Any]
"""The growth of counts since the last reading, by the name of the count, and the new samples of times, as a list by the
name of the time. It has only the counts and times that have grown, and can be serialized."""


class Side(enum.Enum):
    """The sides of a connector."""

    SCHEDULER = enum.auto()
    FIRST_RANK = enum.auto()
    OTHER_RANK = enum.auto()


SCHEDULER = frozenset({Side.SCHEDULER})
FIRST_RANK = frozenset({Side.FIRST_RANK})
"""All ranks load and store the same tokens, each its own heads, so the first rank stands for all."""
BOTH = SCHEDULER | FIRST_RANK
ALL = frozenset(Side)


@dataclass(frozen=True, slots=True)
class SideCount(Count):
    """The declaration of a count of the connector."""

    action: tuple[str, str] | None = None
    """The values of the metric's labels `action` and `outcome`; None: the metric has none."""
    sides: frozenset[Side] = SCHEDULER
    """The sides whose count the metric adds up."""

    @property
    def labels(self) -> dict[str, str]:
        """See `Count`."""
        if self.action is not None:
            return dict(zip(("action", "outcome"), self.action, strict=True))
        return {"source": self.source} if self.source else {}


def _action(act: str, outcome: str) -> SideCount:
    return SideCount(f"actions `{act}` of routers, {outcome}", "kv_hints", action=(act, outcome))


@dataclass(slots=True)
class Counts:
    """Sums since the engine started. Tokens are counted for requests that the pool can serve."""

    requests: Annotated[
        int,
        SideCount("requests that the pool can serve and that vLLM gave blocks; again after a preemption", "requests"),
    ] = 0
    requests_not_served: Annotated[
        int,
        SideCount("requests that the pool cannot serve: with embeddings, for example", "requests_not_served"),
    ] = 0
    tokens_local: Annotated[
        int, SideCount("tokens of requests, found in vLLM's own prefix cache", "prompt_tokens", "vllm_cache")
    ] = 0
    tokens_hit_here: Annotated[
        int, SideCount("tokens taken from the pool, whose segments were on this node", "prompt_tokens", "this_node")
    ] = 0
    tokens_hit_remote: Annotated[
        int, SideCount("tokens taken from the pool, whose segments were on other nodes", "prompt_tokens", "other_nodes")
    ] = 0
    tokens_skipped_by_cost: Annotated[
        int,
        SideCount(
            "tokens found in the pool and computed, because that was predicted to be faster",
            "prompt_tokens",
            "skipped_by_cost",
        ),
    ] = 0
    tokens_not_found: Annotated[
        int,
        SideCount(
            "tokens that the pool did not have, the tokens behind the last full segment, and those that another "
            "connector within `MultiConnector` loaded",
            "prompt_tokens",
            "not_found",
        ),
    ] = 0
    tokens_not_asked: Annotated[
        int,
        SideCount(
            "tokens for which there was no answer of the pool: no daemon, a late lookup, an earlier load that failed, "
            "or a prompt without a full segment",
            "prompt_tokens",
            "not_asked",
        ),
    ] = 0
    lookups_late: Annotated[
        int,
        SideCount(
            "lookups without an answer within `match_ms`, or within the wait for another instance", "lookups_late"
        ),
    ] = 0
    loads_failed: Annotated[
        int,
        SideCount("loads with segments that were lost, corrupt or late; their tokens were recomputed", "loads_failed"),
    ] = 0
    tokens_loaded: Annotated[
        int, SideCount("tokens whose cache was copied into a rank's blocks", "loaded_tokens", sides=FIRST_RANK)
    ] = 0
    tokens_stored: Annotated[
        int,
        SideCount(
            "tokens in segments that the pool accepted and whose shards the rank filled",
            "stored_tokens",
            sides=FIRST_RANK,
        ),
    ] = 0
    tokens_not_stored: Annotated[
        int,
        SideCount(
            "tokens in segments that were not stored: the pool had them already or refused them, the queue was full, "
            "the pool failed, or vLLM reused their blocks",
            "not_stored_tokens",
            sides=FIRST_RANK,
        ),
    ] = 0
    prefills_offered: Annotated[
        int,
        SideCount("prompts that this engine computed and stores for another engine to decode", "prefills_offered"),
    ] = 0
    prefills_taken: Annotated[
        int,
        SideCount(
            "requests computed by another engine, of which this engine computed only the last token", "prefills_taken"
        ),
    ] = 0
    prefills_recomputed: Annotated[
        int,
        SideCount(
            "requests computed by another engine, of which this engine computed more tokens", "prefills_recomputed"
        ),
    ] = 0
    hints_retain_obeyed: Annotated[int, _action("retain", "obeyed")] = 0
    hints_retain_malformed: Annotated[int, _action("retain", "malformed")] = 0
    hints_retain_refused: Annotated[int, _action("retain", "refused")] = 0
    hints_demote_obeyed: Annotated[int, _action("demote", "obeyed")] = 0
    hints_demote_malformed: Annotated[int, _action("demote", "malformed")] = 0
    hints_demote_refused: Annotated[int, _action("demote", "refused")] = 0
    hints_pin_obeyed: Annotated[int, _action("pin", "obeyed")] = 0
    hints_pin_malformed: Annotated[int, _action("pin", "malformed")] = 0
    hints_pin_refused: Annotated[int, _action("pin", "refused")] = 0
    hints_prefetch_obeyed: Annotated[int, _action("prefetch", "obeyed")] = 0
    hints_prefetch_malformed: Annotated[int, _action("prefetch", "malformed")] = 0
    hints_prefetch_refused: Annotated[int, _action("prefetch", "refused")] = 0
    hints_share_obeyed: Annotated[int, _action("share", "obeyed")] = 0
    hints_share_malformed: Annotated[int, _action("share", "malformed")] = 0
    hints_share_refused: Annotated[int, _action("share", "refused")] = 0
    hints_other_unknown: Annotated[int, _action("other", "unknown")] = 0
    hints_other_malformed: Annotated[int, _action("other", "malformed")] = 0
    hints_other_refused: Annotated[int, _action("other", "refused")] = 0
    failures: Annotated[int, SideCount("errors of the pool; none of them reached vLLM", "failures", sides=ALL)] = 0
    hook_seconds: Annotated[
        float, SideCount("seconds that vLLM spent in the connector's hooks", "hook_seconds", sides=BOTH)
    ] = 0.0
    save_seconds: Annotated[
        float, SideCount("seconds that the thread that stores segments was busy", "save_seconds", sides=FIRST_RANK)
    ] = 0.0

    @property
    def tokens_hit(self) -> int:
        """The number of tokens taken from the pool."""
        return self.tokens_hit_here + self.tokens_hit_remote

    @property
    def tokens_asked(self) -> int:
        """The number of tokens of the requests that the pool can serve: the sum over all sources."""
        return sum(getattr(self, name) for name, count in COUNTS.items() if count.metric == "prompt_tokens")


COUNTS: Mapping[str, SideCount] = declared(Counts, SideCount)
"""The declarations of all counts, by name."""

TIMES: Mapping[str, str] = {
    "lookup_wait_seconds": "time that a request waited for the answer of its lookup before it could be scheduled, "
    "with the wait for another instance that computes the prompt",
    "fetch_seconds": "time until the segments of a load with segments of other nodes were on this node; the slowest "
    "rank counts",
    "copy_seconds": "time of a load from then on until its segments were copied into the blocks; the slowest rank "
    "counts",
}
"""The times that the scheduler's side measures, each a histogram with the name `PREFIX` + the time's name: their
meanings, by name."""
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The upper bounds of the histograms' buckets in seconds. The last bound is the limit of the wait for another
instance."""


class EngineCounters(Counters[Counts]):
    """The counts of one side of the connector, and the samples of the times that it measured. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(Counts)
        self._samples: dict[str, deque[float]] = {}
        self._taken = Counts()
        self._grown = False
        """True if a count other than `hook_seconds` has grown since the last reading. Most steps then need no
        reading."""

    def add(self, **amounts: float) -> None:
        """Add each amount to the count of that name."""
        super().add(**amounts)
        if len(amounts) > 1 or "hook_seconds" not in amounts:
            self._grown = True

    def add_request(
        self, tokens: int, local: int, *, here: int = 0, remote: int = 0, skipped: int = 0, asked: bool = True
    ) -> None:
        """Count a request of `tokens` tokens that vLLM gave blocks, by the sources of its tokens: `local` from vLLM's
        own cache, `here` and `remote` loaded from this and from other nodes, `skipped` found and not loaded. `asked`:
        the pool answered a lookup."""
        rest = tokens - local - here - remote - skipped
        self.add(
            requests=1,
            tokens_local=local,
            tokens_hit_here=here,
            tokens_hit_remote=remote,
            tokens_skipped_by_cost=skipped,
            tokens_not_found=rest if asked else 0,
            tokens_not_asked=0 if asked else rest,
        )

    def sample(self, **seconds: float) -> None:
        """Add a sample to each of the `TIMES` of these names."""
        with self._lock:
            for name, value in seconds.items():
                self._samples.setdefault(name, deque(maxlen=MAX_SAMPLES)).append(value)
            self._grown = True

    def take(self, side: Side) -> Growth:
        """The growth since the last call of the counts that `side` reports, and the new samples. Empty if only
        `hook_seconds` has grown, which each hook adds to: its growth is part of a later result."""
        if not self._grown:
            return {}
        with self._lock:
            self._grown = False
            now = dataclasses.replace(self._counts)
            growth: Growth = {}
            for name in _reported(side):
                grown = getattr(now, name) - getattr(self._taken, name)
                if grown:
                    growth[name] = grown
            if not self._samples and growth.keys() <= {"hook_seconds"}:
                return {}
            growth |= {name: list(samples) for name, samples in self._samples.items()}
            self._samples.clear()
            self._taken = now
            return growth


@functools.cache
def _reported(side: Side) -> tuple[str, ...]:
    return tuple(name for name, count in COUNTS.items() if side in count.sides)


def merge(into: Growth, other: Growth) -> None:
    """Add `other` to `into`. Of the samples of a time, the newest `MAX_SAMPLES` are kept."""
    for name, value in other.items():
        if isinstance(value, list):
            into[name] = [*into.get(name, ()), *value][-MAX_SAMPLES:]
        else:
            into[name] = into.get(name, 0) + value


def summary(growth: Growth) -> dict[str, int | float]:
    """A growth as numbers for a line of the log: each count, and of each time the number of samples, the mean and the
    maximum, in the order of the declarations."""
    line: dict[str, int | float] = {}
    for name in COUNTS:
        if name in growth:
            line[name] = round(growth[name], 3)
    for name in TIMES:
        samples = growth.get(name)
        if samples:
            line[f"{name}_count"] = len(samples)
            line[f"{name}_mean"] = round(sum(samples) / len(samples), 4)
            line[f"{name}_max"] = round(max(samples), 4)
    return line
