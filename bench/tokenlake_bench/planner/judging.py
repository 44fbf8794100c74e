"""Rows of `bench planner`: per link and batch the planner's choice, and its regret, by how much it is slower than the
fastest way to use the cached prefix."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import Batch, Costs, Model, PrefixTree, Rates, Request, choose, grow
from tokenlake_bench.planner.rig import OWNER, READER, SEGMENT_TOKENS, PrefixUse, Work

BOUND = 1.05
"""Factor of the planner's promise: a request with the pool should take at most this many times the time of recomputing
its prefix, plus `DEADLINE_S`."""
DEADLINE_S = 0.050
"""The constant part of a fetch's deadline: the time that a request may lose to a node that does not answer, beyond the
predicted time of the fetch."""


class Prediction(msgspec.Struct, frozen=True):
    """The way that the planner chooses for one batch whose prefix lies at one node, and the seconds that it
    predicts."""

    chosen: PrefixUse
    seconds: dict[str, float]
    """Predicted seconds from the request to the last token, by the way to use the prefix."""

    @property
    def regret(self) -> float:
        """Regret if the predictions were exact: predicted seconds of the chosen way divided by those of the fastest
        way, less 1."""
        return self.seconds[self.chosen.value] / min(self.seconds.values()) - 1


class Row(msgspec.Struct, frozen=True):
    """The planner's choice and the measured times of one batch over one link. `here`: the prefix lies at the engine's
    node, otherwise at the other one."""

    megabytes_per_s: float
    delay_ms: float
    prefix: int
    new: int
    decode: int
    sharing: int
    here: bool
    chosen: str
    best: str
    measured_ms: dict[str, float]
    """Milliseconds to the last token, median over the repetitions, by the way to use the prefix."""
    predicted_ms: dict[str, float]
    regret: float
    model_regret: float
    promise_held: bool
    unserved: int
    """Number of runs in which the prefix was not used in the intended way throughout; their times are included."""


class Totals(msgspec.Struct, frozen=True):
    """Totals over the questions about the demo's document over one link, all served by one strategy."""

    megabytes_per_s: float
    delay_ms: float
    way: str
    moved_bytes: int
    ttft_ms: float
    """Median milliseconds to the first token."""
    ways: dict[str, int]
    """Number of requests by the way in which their prefix was used."""


class Result(msgspec.Struct, frozen=True):
    """The JSON of `bench planner`. The first three fields cover rows whose prefix lies at another node."""

    planner_mean_regret: float
    planner_max_regret: float
    model_regret: float
    """The greatest regret by predicted times (`Prediction.regret`) over these rows."""
    here_mean_regret: float
    here_max_regret: float
    promise_rows: int
    """Number of rows, of all, in which the chosen way took at most 1.05 times the time of recomputing the prefix plus
    the deadline."""
    tokens_equal: bool
    """True if every way to use the prefix gave the same tokens in every repetition."""
    unequal_turns: int
    coefficients: dict[str, dict[str, list[float]]]
    """The planner's inputs by link, as they were after the last batch measured over the link."""
    rows: list[Row]
    documents: list[Totals]


def predict(work: Work, keys: Sequence[SegmentKey], at: str, model: Model, rates: Rates) -> Prediction:
    """The planner's choice, at the engine's node, for a batch whose prefix with the segments `keys` lies at the node
    `at`."""
    requests = [
        Request(name=str(row), keys=tuple(keys), tokens=work.prefix + work.new, answer_tokens=work.decode)
        for row in range(work.sharing)
    ]
    tree = grow(requests, dict.fromkeys(keys, (NodeId(at),)), SEGMENT_TOKENS)
    costs = Costs(tree, Batch(tree, range(work.sharing), rates), NodeId(READER), model, rates)
    (decision,), _ = choose(costs)
    recomputed = costs.recompute(0) + costs.attention(0)
    whole = work.sharing * rates.prefill.seconds(work.prefix + work.new, 0)
    whole += work.decode * rates.decode.seconds(work.sharing, work.prefix + work.new + work.decode / 2)
    ways = {way.value: whole + cost - recomputed for way, cost in _costs(tree, costs, at).items()}
    return Prediction(PrefixUse(decision.way.value), ways)


def _costs(tree: PrefixTree, costs: Costs, at: str) -> dict[PrefixUse, float]:
    """Predicted cost in seconds of using the whole prefix, by way."""
    found = {PrefixUse.RECOMPUTE: costs.recompute(0) + costs.attention(0)}
    if at == READER:
        found[PrefixUse.LOCAL] = costs.local(0)
    else:
        found[PrefixUse.FETCH] = costs.fetch(0, NodeId(OWNER)) + costs.local(0)
        found[PrefixUse.SHIP] = costs.ship(0, NodeId(OWNER)) + costs.round_trips(NodeId(OWNER))
    return found


def row_of(
    link: tuple[float, float],
    work: Work,
    prediction: Prediction,
    measured: Mapping[PrefixUse, Sequence[float]],
    unserved: int,
) -> Row:
    """The row of one batch. `link`: (bytes per second, seconds of delay). `measured`: by way, the seconds of each
    repetition; ways that `prediction` lacks are left out."""
    seconds = {use.value: statistics.median(measured[use]) for use in measured if use.value in prediction.seconds}
    best = min(seconds, key=lambda way: seconds[way])
    chosen = seconds[prediction.chosen.value]
    return Row(
        megabytes_per_s=link[0] / 1e6,
        delay_ms=link[1] * 1e3,
        prefix=work.prefix,
        new=work.new,
        decode=work.decode,
        sharing=work.sharing,
        here=PrefixUse.LOCAL.value in seconds,
        chosen=prediction.chosen.value,
        best=best,
        measured_ms={way: value * 1e3 for way, value in seconds.items()},
        predicted_ms={way: value * 1e3 for way, value in prediction.seconds.items()},
        regret=chosen / seconds[best] - 1,
        model_regret=prediction.regret,
        promise_held=chosen <= BOUND * seconds[PrefixUse.RECOMPUTE.value] + DEADLINE_S,
        unserved=unserved,
    )


def result_of(
    rows: Sequence[Row],
    documents: Sequence[Totals],
    coefficients: dict[str, dict[str, list[float]]],
    unequal_turns: int,
) -> Result:
    """The result over all rows. `rows` must contain at least one whose prefix is at another node and one whose prefix
    is at the engine's node."""
    there, here = ([row.regret for row in rows if row.here is place] for place in (False, True))
    return Result(
        planner_mean_regret=statistics.mean(there),
        planner_max_regret=max(there),
        model_regret=max(row.model_regret for row in rows),
        here_mean_regret=statistics.mean(here),
        here_max_regret=max(here),
        promise_rows=sum(row.promise_held for row in rows),
        tokens_equal=not unequal_turns,
        unequal_turns=unequal_turns,
        coefficients=coefficients,
        rows=list(rows),
        documents=list(documents),
    )
