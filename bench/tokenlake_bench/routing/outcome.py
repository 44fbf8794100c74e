"""Outcomes of simulated requests, and the row of a system in the comparison, which is computed from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from tokenlake_bench.balance import BusyLog, SendLog, spread
from tokenlake_bench.engine_model import EngineModel
from tokenlake_bench.hits import LongPrompts, long_prompts

SLO_FACTOR: Final = 10.0
"""Factor of the objective of a request: its time to the first token and its time per further token must both be at most
this many times as long as alone on an idle instance without a cache (TokenLake, arXiv 2508.17219, section 7)."""


class Answered(msgspec.Struct, frozen=True, gc=False):
    """One finished request of a simulation. Times are in seconds of the workload."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    remote_tokens: int
    """Number of those of the `hit_tokens` that came from other instances."""
    first_s: float
    finished_s: float
    engine_tokens: int = 0
    """Number of those of the `hit_tokens` that were in the instance's own GPU cache."""

    @property
    def ttft_s(self) -> float:
        """Seconds from the arrival of the request to its first token."""
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds between two tokens after the first one; 0 for an answer of one token."""
        return (self.finished_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class DiskUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the disks of all nodes over a run. `tokens`: those of the hits that were read from disk. `written_share`:
    written bytes of the bytes that memory evicted; `writes_per_day`: how often a disk would be written whole in a
    day."""

    tokens: int
    written_bytes: int
    written_bytes_per_day: float
    writes_per_day: float
    written_share: float


class ColdUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the cold tier by all nodes over a run. `tokens`: those of the hits that were read from it.
    `written_share`: written bytes of the bytes that memory evicted."""

    tokens: int
    written_bytes: int
    written_bytes_per_day: float
    written_share: float


class SystemRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `systems` in the JSON of `tokenlake bench cache-hit --mode simulate`.

    `remote_share` is the part of the hit tokens that came from another instance, `engine_share` the part that was in
    the instance's own GPU cache (0 where it has none); the others are read from the memory of its node. The load is
    defined in `balance`; it is None for a system whose instances sent nothing to each other, as that of a router with
    private caches. `busy_share` is the share of the time from the first arrival to the last answer in which an instance
    computes, on average, `busy_cv` the spread of these seconds over the instances, per window as for the load.
    `duplication` is copies per held segment at the end; `goodput_rps` counts requests within their objective per second
    of arrivals, or, where requests follow answers, per second from the first arrival to the last answer: there a slow
    system stretches the arrivals. `slo_attainment` is their share; `bytes_moved` went between instances, the hand-over
    from prefill to decode included. `long_prompts` are those longer than a node's part of `capacity_tokens`; None where
    there are none.
    """

    token_hit_rate: float
    remote_share: float
    engine_share: float
    load_cv: float | None
    busy_share: float
    busy_cv: float
    duplication: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    goodput_rps: float
    slo_attainment: float
    bytes_moved: int
    disk_share: float = 0.0
    disk_written_bytes_per_day: float | None = None
    disk_written_share: float | None = None
    cold_share: float = 0.0
    cold_written_bytes_per_day: float | None = None
    cold_written_share: float | None = None
    long_prompts: LongPrompts | None = None


def within_objective(answered: Answered, engine: EngineModel) -> bool:
    """Whether the time to the first token and the time per further token are at most `SLO_FACTOR` times those of the
    same engine when it computes the request alone."""
    prompt, output = answered.prompt_tokens, answered.output_tokens
    first = answered.ttft_s <= SLO_FACTOR * engine.prefill_s(prompt)
    return first and answered.tpot_s <= SLO_FACTOR * engine.decode_s(1, prompt + output // 2)


def row_of(
    answers: Sequence[Answered],
    sent: SendLog,
    busy: BusyLog,
    engine: EngineModel,
    *,
    duplication: float,
    node_tokens: int,
    closed_loop: bool = False,
    disk: DiskUse | None = None,
    cold: ColdUse | None = None,
) -> SystemRow:
    """The row of a system in the comparison, from its answers, at least one. Answers of one token have no time per
    further token. `sent`: all bytes between the instances. `node_tokens`: memory for caches of one node.
    `closed_loop`: some requests waited for the answer to another one."""
    met = sum(within_objective(answered, engine) for answered in answers)
    arrivals = [answered.at_s for answered in answers]
    finished_s = max(answered.finished_s for answered in answers)
    duration_s = (finished_s if closed_loop else max(arrivals)) - min(arrivals)
    hits = sum(answered.hit_tokens for answered in answers)
    from_disk = 0 if disk is None else disk.tokens
    from_cold = 0 if cold is None else cold.tokens
    ttft = [answered.ttft_s for answered in answers]
    tpot = [answered.tpot_s for answered in answers if answered.output_tokens > 1]
    return SystemRow(
        token_hit_rate=hits / sum(a.prompt_tokens for a in answers),
        remote_share=max(0, sum(a.remote_tokens for a in answers) - from_disk - from_cold) / max(1, hits),
        engine_share=sum(a.engine_tokens for a in answers) / max(1, hits),
        load_cv=spread(sent.table()).cv,
        busy_share=busy.total_s / busy.instances / (finished_s - min(arrivals)),
        busy_cv=spread(busy.table()).cv or 0.0,
        duplication=duplication,
        ttft_mean_ms=1e3 * sum(ttft) / len(ttft),
        ttft_p50_ms=_quantile_ms(ttft, 0.5),
        ttft_p99_ms=_quantile_ms(ttft, 0.99),
        tpot_p50_ms=_quantile_ms(tpot, 0.5),
        tpot_p99_ms=_quantile_ms(tpot, 0.99),
        goodput_rps=met / duration_s if duration_s > 0 else math.nan,
        slo_attainment=met / len(answers),
        bytes_moved=sum(sent.totals()),
        disk_share=from_disk / max(1, hits),
        disk_written_bytes_per_day=None if disk is None else disk.written_bytes_per_day,
        disk_written_share=None if disk is None else disk.written_share,
        cold_share=from_cold / max(1, hits),
        cold_written_bytes_per_day=None if cold is None else cold.written_bytes_per_day,
        cold_written_share=None if cold is None else cold.written_share,
        long_prompts=long_prompts(((a.prompt_tokens, a.hit_tokens) for a in answers), node_tokens),
    )


def _quantile_ms(seconds: Sequence[float], quantile: float) -> float:
    return float(np.quantile(seconds, quantile)) * 1000 if seconds else 0.0
