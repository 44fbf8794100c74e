"""Outcomes of requests, and the row of a system in the comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from tokenlake_bench import balance
from tokenlake_bench.balance import ReadLog
from tokenlake_bench.engine_model import EngineModel

__all__ = ["SLO_FACTOR", "Answered", "SystemRow", "row_of"]

SLO_FACTOR: Final = 10.0
"""A request meets its objective when both its first token and its time per further token took at most this many times
as long as alone on an idle instance without a cache (TokenLake, arXiv 2508.17219, section 7)."""


class Answered(msgspec.Struct, frozen=True, gc=False):
    """One finished request. Times in seconds of the workload."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    first_s: float
    finished_s: float

    @property
    def ttft_s(self) -> float:
        """Time from the arrival to the first token."""
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time between two further tokens; 0 for an answer of one token."""
        return (self.finished_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class SystemRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `systems` in the JSON of `tokenlake bench cache-hit --mode simulate`.

    The load is defined in `balance`; `duplication` is copies per held segment at the end; `goodput_rps` counts requests
    within their objective per second of arrivals, `slo_attainment` is their share; `bytes_moved` went between
    instances, the hand-over from prefill to decode included.
    """

    token_hit_rate: float
    load_cv: float
    load_cv_floor: float
    duplication: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    goodput_rps: float
    slo_attainment: float
    bytes_moved: int


def within_objective(answered: Answered, engine: EngineModel) -> bool:
    """Whether a request met its objective, which is relative to the times of the same engine at batch 1."""
    prompt, output = answered.prompt_tokens, answered.output_tokens
    first = answered.ttft_s <= SLO_FACTOR * engine.prefill_s(prompt)
    return first and answered.tpot_s <= SLO_FACTOR * engine.decode_s(1, prompt + output // 2)


def row_of(
    answers: Sequence[Answered],
    reads: ReadLog,
    engine: EngineModel,
    *,
    duplication: float,
    bytes_moved: int,
    seed: int,
) -> SystemRow:
    """The row of a system with these answers, at least one. Answers of one token have no time per further token."""
    met = sum(within_objective(answered, engine) for answered in answers)
    arrivals = [answered.at_s for answered in answers]
    duration_s = max(arrivals) - min(arrivals)
    ttft = [answered.ttft_s for answered in answers]
    tpot = [answered.tpot_s for answered in answers if answered.output_tokens > 1]
    return SystemRow(
        token_hit_rate=sum(a.hit_tokens for a in answers) / sum(a.prompt_tokens for a in answers),
        load_cv=balance.spread(reads).cv,
        load_cv_floor=balance.floor(reads, seed).cv,
        duplication=duplication,
        ttft_p50_ms=_quantile_ms(ttft, 0.5),
        ttft_p99_ms=_quantile_ms(ttft, 0.99),
        tpot_p50_ms=_quantile_ms(tpot, 0.5),
        tpot_p99_ms=_quantile_ms(tpot, 0.99),
        goodput_rps=met / duration_s if duration_s > 0 else math.nan,
        slo_attainment=met / len(answers),
        bytes_moved=bytes_moved,
    )


def _quantile_ms(seconds: Sequence[float], quantile: float) -> float:
    return float(np.quantile(seconds, quantile)) * 1000 if seconds else 0.0
