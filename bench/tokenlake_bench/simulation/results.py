"""Results of a simulated comparison: the JSON that is written and the tables that are printed."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from rich.console import Group
from rich.table import Table

from tokenlake_bench.baselines import baselines
from tokenlake_bench.hits import CacheHitResult, hit_rows
from tokenlake_bench.report import format_bytes, format_duration, format_ratio, format_share, table
from tokenlake_bench.routing import SystemRow
from tokenlake_bench.routing.outcome import ColdUse, DiskUse
from tokenlake_bench.simulation.arrivals import accesses_of
from tokenlake_bench.simulation.pooled import PooledRun
from tokenlake_bench.simulation.stopped import StopFigures

GIB = 1 << 30


class SimulatedResult(CacheHitResult, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench cache-hit --mode simulate`.

    The figures of the pool are those of the first form of it in `systems`; by default that is `pool`, in which requests
    under way take no memory, as in live mode. `wrong_bytes` is 0 because segments have no bytes. `duplication` is the
    mean number of copies per stored segment. `systems`: every form of the pool and every other system, by name. An
    instance is `gpus` GPUs; `engine_cache_tokens` is the length of its GPU cache, None where `capacity_tokens` is all
    memory for caches; `disk_tokens` are those that the pool's disks hold, None without disks;
    `cold_tokens` those that the cold tier holds; `stop`: what is found behind a stop of all nodes. `rate`: arriving
    requests per second. `messages_per_request`: frames between nodes of the pool. `read_s`: median and 99th percentile
    of the seconds from the match to the last byte of the prefix, over the requests that read something.
    `flash_busiest`: the load of the busiest node in the 10 s that begin with the flash crowd, divided by the mean and
    in bytes; None without one. `complete`: the run was not interrupted.
    """

    duplication: float
    disk: DiskUse | None
    cold: ColdUse | None = None
    systems: dict[str, SystemRow]
    model: str
    gpu: str
    gpus: int
    capacity_tokens: int
    segment_tokens: int
    engine_cache_tokens: int | None = None
    disk_tokens: int | None = None
    cold_tokens: int | None = None
    stop: StopFigures | None = None
    rate: float
    messages_per_request: float
    read_s: tuple[float, float]
    processor_s: float
    flash_busiest: tuple[float, int] | None = None
    complete: bool


def figures_of(run: PooledRun) -> dict[str, Any]:
    """The fields of `SimulatedResult` that describe one run of the pool, at its end or where it was interrupted; the
    run may be released afterwards."""
    simulation, engine = run.simulation, run.engine
    options, figures, capacity_tokens = (
        simulation.options,
        simulation.figures(),
        simulation.cluster.size.capacity_tokens,
    )
    done = accesses_of(sorted(run.done, key=attrgetter("at_s")), options.segment_tokens)
    compared = baselines(done, nodes=options.nodes, capacity_tokens=capacity_tokens, seed=options.seed)
    duration_s = done.prompts[-1].at_s - done.prompts[0].at_s
    return {
        "token_hit_rate": figures.token_hit_rate,
        "ideal_token_hit_rate": compared.ideal.rate,
        "private_token_hit_rate": compared.private.rate,
        "private_routed_token_hit_rate": compared.private_routed.rate,
        "private_routed_busiest": compared.private_routed.busiest,
        "remote_share": figures.remote_share,
        "duplication": figures.duplication,
        "load_cv": figures.load.cv,
        "load_max_over_mean": figures.load.max_over_mean,
        "bytes_moved": figures.bytes_moved,
        "wrong_bytes": 0,
        "requests": figures.requests,
        "nodes": options.nodes,
        "seed": options.seed,
        "disk": simulation.disk_use(max(answer.at_s for answer in run.answers)),
        "cold": simulation.cold_use(max(answer.at_s for answer in run.answers)),
        "model": engine.model.name,
        "gpu": engine.gpu.name,
        "gpus": engine.gpus,
        "capacity_tokens": capacity_tokens,
        "segment_tokens": options.segment_tokens,
        "rate": (len(done.prompts) - 1) / duration_s if duration_s > 0 else 0.0,
        "messages_per_request": figures.messages_per_request,
        "read_s": (simulation.read_s(0.5), simulation.read_s(0.99)),
        "processor_s": figures.processor_s,
    }


def pool_table(result: SimulatedResult, workload: str) -> Table:
    """The figures of the pool as a table for a terminal."""
    disk = result.disk
    disks = (
        []
        if disk is None
        else [
            ("capacity of the disks", f"{result.disk_tokens or 0:,} tokens"),
            ("hits from the node's own disk", f"{disk.tokens:,} tokens"),
            ("written to disk per day, per node", format_bytes(int(disk.written_bytes_per_day / result.nodes))),
            ("the same in sizes of the disk", f"{disk.writes_per_day:.1f}"),
            ("written, of what memory evicted", format_share(disk.written_share)),
        ]
    )
    cold = result.cold
    disks += (
        []
        if cold is None
        else [
            ("capacity of the cold tier", f"{result.cold_tokens or 0:,} tokens"),
            ("hits from the cold tier", f"{cold.tokens:,} tokens"),
            (
                "written to the cold tier per day, per node",
                format_bytes(int(cold.written_bytes_per_day / result.nodes)),
            ),
            ("written, of what memory evicted", format_share(cold.written_share)),
        ]
    )
    long = next(iter(result.systems.values())).long_prompts
    longer = (
        []
        if long is None
        else [
            ("prompts longer than a node's memory", f"{long.prompts:,}, {format_share(long.token_share)} of the tokens")
        ]
    )
    busiest = result.flash_busiest
    flash = (
        []
        if busiest is None
        else [
            ("the same in the first 10 s of the flash crowd", format_ratio(busiest[0])),
            ("bytes sent by the busiest node in them", format_bytes(busiest[1])),
        ]
    )
    return table(
        f"{workload}: {result.requests:,} requests, {result.nodes} nodes, seed {result.seed}",
        (),
        [
            *hit_rows(result),
            ("capacity of the pool", f"{result.capacity_tokens:,} tokens"),
            ("segment", f"{result.segment_tokens:,} tokens"),
            *longer,
            ("hits from another node", format_share(result.remote_share)),
            ("load max / mean", format_ratio(result.load_max_over_mean)),
            *flash,
            *disks,
            ("time to read a prefix, p50 / p99", " / ".join(map(format_duration, result.read_s))),
            ("messages between nodes per request", f"{result.messages_per_request:.1f}"),
            ("processor time", format_duration(result.processor_s)),
        ],
    )


def systems_table(result: SimulatedResult) -> Group:
    """All compared systems as two tables for a terminal, with a row per system: what a user sees, then caches and
    load."""
    per = f"{result.gpus} x {result.gpu}" if result.gpus > 1 else result.gpu
    colds = any(row.cold_written_share is not None for row in result.systems.values())
    disks = any(row.disk_written_share is not None for row in result.systems.values())
    long = any(row.long_prompts is not None for row in result.systems.values())
    seen = [
        (
            name,
            _percent(row.token_hit_rate),
            _seconds(row.ttft_p50_ms),
            _seconds(row.ttft_p99_ms),
            f"{row.tpot_p50_ms:.0f}",
            _percent(row.slo_attainment),
            f"{row.goodput_rps:.2f}",
        )
        for name, row in result.systems.items()
    ]
    caches = [
        (
            name,
            *([_others(row)] if long else []),
            _percent(row.remote_share),
            _percent(row.engine_share),
            *([_percent(row.disk_share)] if disks else []),
            *([_percent(row.cold_share)] if colds else []),
            f"{row.duplication:.2f}",
            f"{row.bytes_moved / GIB:.0f}",
            "-" if row.load_cv is None else f"{row.load_cv:.2f}",
            _percent(row.busy_share),
        )
        for name, row in result.systems.items()
    ]
    return Group(
        table(
            f"{result.model}, {per} per instance, {result.rate:.2f} requests/s",
            ("", "hits %", "TTFT s", "p99 s", "TPOT ms", "in SLO %", "good/s"),
            seen,
            "TTFT, p99: time to the first token, median and 99th percentile; good/s: requests in SLO per second",
        ),
        table(
            "",
            (
                "",
                *(["fits %"] if long else []),
                "remote %",
                "in GPU %",
                *(["disk %"] if disks else []),
                *(["cold %"] if colds else []),
                "copies",
                "GiB",
                "load CV",
                "busy %",
            ),
            caches,
            "remote, in GPU: of the hits; GiB: moved between nodes",
        ),
    )


def _percent(share: float) -> str:
    return f"{share * 100:.1f}"


def _seconds(milliseconds: float) -> str:
    """Seconds with three digits: 0.346, 12.8, 166."""
    seconds = milliseconds / 1e3
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.3g}"


def _others(row: SystemRow) -> str:
    """Hit rate of the prompts that fit into a node's memory."""
    return _percent(row.token_hit_rate if row.long_prompts is None else row.long_prompts.others_hit_rate)
