"""The command `bench cache-hit` in live mode: checks its arguments, replays the workload, and writes a table, JSON and
a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.fast_daemon import MAX_SPEED
from tokenlake_bench.flash import FlashCrowd
from tokenlake_bench.live import LiveOptions, notes, run_live
from tokenlake_bench.pictures import check_plot
from tokenlake_bench.plot import plot_cache_hit
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.replay import ReplayLog
from tokenlake_bench.report import cache_hit_table, format_share, write_json
from tokenlake_bench.routes import ROUTES
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.trace_lines import passed_over
from tokenlake_bench.workload import BuiltinSettings, Workload, builtin_workload

TRACE_SEGMENT_TOKENS = 512
"""Tokens of a segment when a trace is replayed. The traces name blocks of 512 tokens, so smaller segments would find no
more hits."""
TRACE_CAPACITY_TOKENS = 3_000_000
BUILTIN_SEGMENT_TOKENS = 64
BUILTIN_CAPACITY_TOKENS = 24_000
"""Default capacity of the pool in tokens for the built-in workload: less than its conversations need, so that segments
are evicted."""


@dataclass(frozen=True, kw_only=True)
class CacheHitArguments:
    """Arguments of the command `bench cache-hit`. Raises ConfigurationError for a value out of range."""

    trace: Path | None
    nodes: int
    capacity_tokens: int | None
    segment_tokens: int | None
    limit: int | None
    speed: float
    route: str | None
    seed: int
    flash_at: float | None
    shipped_deadlines: bool
    json_file: Path | None
    plot_file: Path | None
    pools: str | None = None
    baselines: str | None = None
    model: str | None = None
    gpu: str | None = None
    rate: float | None = None
    copies: int | None = None
    swarm: int | None = None
    open_loop: bool = False
    engine_cache_tokens: int | None = None
    disk_tokens: int | None = None
    disk_writes_per_day: float | None = None
    disk_directory: Path | None = None

    def __post_init__(self) -> None:
        for name in ("engine_cache_tokens", "pools", "baselines", "model", "gpu", "rate", "copies", "swarm"):
            if getattr(self, name) is not None:
                raise ConfigurationError(name, getattr(self, name), "absent, or used with '--mode simulate'")
        if not 0 <= self.speed <= MAX_SPEED:
            raise ConfigurationError("speed", self.speed, f"a number from 0 to {MAX_SPEED:g}")
        if self.route is not None and self.route not in ROUTES:
            raise ConfigurationError("route", self.route, " or ".join(ROUTES))
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError("limit", self.limit, "at least 1")
        check_plot(self.plot_file)

    def workload(self, tell: Callable[[str], object] = lambda note: None) -> Workload:
        """The workload to replay: the trace, or the built-in workload if no trace is given. `tell` is called with a
        text about malformed lines."""
        plain: Workload
        if self.trace is not None:
            plain = trace = read_trace(self.trace, limit=self.limit, seed=self.seed)
            if note := passed_over(trace.malformed):
                tell(note)
        else:
            plain = builtin_workload(BuiltinSettings(requests=self.limit or BuiltinSettings.requests, seed=self.seed))
        if self.flash_at is None:
            return plain
        return FlashCrowd(plain, self.flash_at, self.options().segment_tokens, self.seed)

    def options(self) -> LiveOptions:
        """Options of the replay, with those defaults filled in that depend on the workload."""
        builtin = self.trace is None
        capacity = BUILTIN_CAPACITY_TOKENS if builtin else TRACE_CAPACITY_TOKENS
        segment = BUILTIN_SEGMENT_TOKENS if builtin else TRACE_SEGMENT_TOKENS
        return LiveOptions(
            nodes=self.nodes,
            capacity_tokens=capacity if self.capacity_tokens is None else self.capacity_tokens,
            segment_tokens=segment if self.segment_tokens is None else self.segment_tokens,
            route=self.route or LiveOptions.route,
            speed=self.speed,
            seed=self.seed,
            flash_at=self.flash_at,
            shipped_deadlines=self.shipped_deadlines,
            open_loop=self.open_loop,
            disk_tokens=self.disk_tokens,
            disk_writes_per_day=self.disk_writes_per_day,
            disk_directory=self.disk_directory,
        )


def run_cache_hit(arguments: CacheHitArguments) -> None:
    """Run the replay, print its table, and write the JSON file and the picture if the command line names them. Raises
    TokenLakeError."""
    console = Console()
    workload, options = arguments.workload(console.print), arguments.options()
    if arguments.trace is None:
        console.print("no --trace: replaying the built-in workload")
    with LiveProgress(console, "replaying", len(workload)) as progress:
        run = run_live(workload, options, lambda log: progress.update(log.requests, _status(log, options)))
    console.print(cache_hit_table(run.result, run.details))
    for line in notes(run):
        console.print(line, soft_wrap=True)
    if arguments.json_file is not None:
        write_json(run.result, arguments.json_file)
    if arguments.plot_file is not None:
        plot_cache_hit(run.result, run.details.sent_bytes, arguments.plot_file)


def _status(log: ReplayLog, options: LiveOptions) -> str:
    rate = log.hit_segments * options.segment_tokens / max(1, log.prompt_tokens)
    return f"hits {format_share(rate)}, wrong bytes {log.wrong_bytes}"
