"""Results of a simulated comparison: the JSON that is written and the table that is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.table import Table

from tokenlake_bench.balance import WINDOW_S, SendLog, max_over_mean_from
from tokenlake_bench.baselines import Accesses, baselines
from tokenlake_bench.engine_model import EngineModel
from tokenlake_bench.hits import CacheHitResult, disk_rows, hit_rows
from tokenlake_bench.pictures import bars, drawn
from tokenlake_bench.report import format_bytes, format_duration, format_ratio, format_share, table
from tokenlake_bench.routing import SystemRow
from tokenlake_bench.routing.outcome import DiskUse
from tokenlake_bench.simulation.arrivals import accesses_of
from tokenlake_bench.simulation.pooled import PooledRun
from tokenlake_bench.simulation.run import Measured, Totals

FLASH_WINDOWS = 2


class SimulatedResult(CacheHitResult, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench cache-hit --mode simulate`.

    The fields it shares with live mode describe the first form of the pool in `systems`; by default that is `pool`, in
    which requests under way take no memory, as in live mode. `wrong_bytes` is 0 because segments have no bytes.
    `systems`: every form of the pool and every other system, by name. An instance
    is `gpus` GPUs; `engine_cache_tokens` is the length of its GPU cache, None where `capacity_tokens` is all memory for
    caches; `disk_tokens` are those that the pool's disks hold, None without disks. `rate`: arriving requests per
    second. `messages_per_request`: frames between nodes of the pool. `complete`: the run was not interrupted.
    """

    systems: dict[str, SystemRow]
    model: str
    gpu: str
    gpus: int
    capacity_tokens: int
    engine_cache_tokens: int | None = None
    disk_tokens: int | None = None
    rate: float
    messages_per_request: float
    processor_s: float
    complete: bool


@dataclass(frozen=True, slots=True, eq=False)
class PoolView:
    """Figures of one run of the pool that are kept after the simulated cluster is released."""

    measured: Measured
    totals: Totals
    sent: SendLog
    sent_to_readers: SendLog
    done: Accesses
    """The answered requests, in the order in which they arrived."""
    seed: int
    nodes: int
    segment_tokens: int
    capacity_tokens: int
    read_s: tuple[float, float]
    """Median and 99th percentile of the seconds from the match to the last byte of the prefix, over the requests that
    read something."""
    seconds: float
    disk: DiskUse | None

    @classmethod
    def of(cls, run: PooledRun) -> PoolView:
        """The figures of a run of the pool at its end, or where it was interrupted."""
        simulation = run.simulation
        cluster = simulation.cluster
        seconds = max(answer.at_s for answer in run.answers)
        return cls(
            measured=simulation.measure(),
            totals=simulation.totals(),
            sent=cluster.sent,
            sent_to_readers=cluster.sent_to_readers,
            done=accesses_of(sorted(run.done, key=attrgetter("at_s")), simulation.options.segment_tokens),
            seed=simulation.options.seed,
            nodes=simulation.options.nodes,
            segment_tokens=simulation.options.segment_tokens,
            capacity_tokens=cluster.size.capacity_tokens,
            read_s=(simulation.read_s(0.5), simulation.read_s(0.99)),
            seconds=seconds,
            disk=simulation.disk_use(seconds),
        )


def result_of(
    view: PoolView,
    rows: Mapping[str, SystemRow],
    engine: EngineModel,
    *,
    engine_cache_tokens: int | None = None,
    disk_tokens: int | None = None,
    flash_at: float | None,
    complete: bool,
) -> SimulatedResult:
    """The JSON result: combines the figures of the pool with the rows of all systems that are finished."""
    measured, totals, seed, prompts = view.measured, view.totals, view.seed, view.done.prompts
    compared = baselines(view.done, nodes=view.nodes, capacity_tokens=view.capacity_tokens, seed=seed)
    duration_s = prompts[-1].at_s - prompts[0].at_s
    return SimulatedResult(
        token_hit_rate=measured.token_hit_rate,
        ideal_token_hit_rate=compared.ideal.rate,
        private_token_hit_rate=compared.private.rate,
        private_routed_token_hit_rate=compared.private_routed.rate,
        remote_share=measured.remote_share,
        duplication=totals.duplication,
        load_cv=measured.load.cv,
        load_max_over_mean=measured.load.max_over_mean,
        flash_max_over_mean=()
        if flash_at is None
        else tuple(max_over_mean_from(view.sent_to_readers, flash_at, FLASH_WINDOWS)),
        bytes_moved=totals.bytes_moved,
        wrong_bytes=0,
        requests=totals.requests,
        nodes=view.nodes,
        seed=seed,
        disk=view.disk,
        systems=dict(rows),
        model=engine.model.name,
        gpu=engine.gpu.name,
        gpus=engine.gpus,
        capacity_tokens=view.capacity_tokens,
        engine_cache_tokens=engine_cache_tokens,
        disk_tokens=disk_tokens,
        rate=(len(prompts) - 1) / duration_s if duration_s > 0 else 0.0,
        messages_per_request=totals.messages_per_request,
        processor_s=totals.processor_s,
        complete=complete,
    )


def pool_table(result: SimulatedResult, view: PoolView, workload: str) -> Table:
    """The figures of the pool as a table for a terminal."""
    flash = [
        (f"the same of the reads in window {number} of the flash crowd", format_ratio(ratio))
        for number, ratio in enumerate(result.flash_max_over_mean, 1)
    ]
    return table(
        f"{workload}: {result.requests:,} requests, {result.nodes} nodes, seed {result.seed}",
        (),
        [
            *hit_rows(result),
            ("capacity of the pool", f"{result.capacity_tokens:,} tokens"),
            ("segment", f"{view.segment_tokens:,} tokens"),
            ("hits from another node", format_share(result.remote_share)),
            ("load max / mean", format_ratio(result.load_max_over_mean)),
            *flash,
            *disk_rows(view.disk, result.disk_tokens, result.nodes),
            ("time to read a prefix, p50 / p99", " / ".join(map(format_duration, view.read_s))),
            ("messages between nodes per request", f"{result.messages_per_request:.1f}"),
            ("processor time", format_duration(result.processor_s)),
        ],
    )


def systems_table(result: SimulatedResult) -> Group:
    """All compared systems as two tables for a terminal, with a row per system: caches and load, then latency."""
    per = f"{result.gpus} x {result.gpu}" if result.gpus > 1 else result.gpu
    disks = any(row.disk_written_share is not None for row in result.systems.values())
    caches = [
        (
            name,
            format_share(row.token_hit_rate),
            format_share(row.remote_share),
            format_share(row.engine_share),
            *([format_share(row.disk_share)] if disks else []),
            f"{row.duplication:.2f}",
            format_bytes(row.bytes_moved),
            "-" if row.load_cv is None else f"{row.load_cv:.2f}",
        )
        for name, row in result.systems.items()
    ]
    times = [
        (
            name,
            *(format_duration(ms / 1e3) for ms in (row.ttft_p50_ms, row.ttft_p99_ms, row.tpot_p50_ms)),
            format_share(row.slo_attainment),
            f"{row.goodput_rps:.2f}",
            format_share(row.busy_share),
        )
        for name, row in result.systems.items()
    ]
    head = ("system", "hits", "remote", "in GPU", *(["disk"] if disks else []), "copies", "moved", "load CV")
    late = ("system", "TTFT", "p99", "TPOT", "in SLO", "good/s", "busy")
    return Group(
        table(f"{result.model}, {per} per instance, {result.rate:.2f} requests/s", head, caches),
        table("medians and p99; good/s: requests within their objective per second", late, times),
    )


def plot(result: SimulatedResult, view: PoolView, path: Path) -> None:
    """Draw hit rates, requests within their objective, and the load of each node over time."""
    with drawn(path, (15, 1.5 + max(3.0, 0.35 * len(result.systems))), 3) as (figure, (hits, within, load)):
        bars(hits, "token hit rate, %", {name: row.token_hit_rate for name, row in result.systems.items()}, "pool")
        attained = {name: row.slo_attainment for name, row in result.systems.items()}
        bars(within, "requests within their objective, %", attained, "pool")
        hits.set_title(f"{result.requests:,} requests, {result.nodes} nodes, {result.rate:.1f}/s")
        starts, sent = view.sent.table()
        if len(starts):
            by_window = np.zeros((view.nodes, round(starts[-1] / WINDOW_S) + 1))
            by_window[:, np.rint(starts / WINDOW_S).astype(np.int64)] = sent.T
            relative = by_window / np.maximum(1.0, by_window.mean(axis=0))
            extent = (0.0, by_window.shape[1] * WINDOW_S, view.nodes - 0.5, -0.5)
            image = load.imshow(relative, aspect="auto", vmin=0, vmax=2, cmap="coolwarm", extent=extent)
            figure.colorbar(image, ax=load, label="bytes sent / mean")
        load.set_xlabel("trace time, s")
        load.set_ylabel("node")
        load.set_title(f"load per {WINDOW_S:g} s: CV {format_ratio(result.load_cv)}")
