"""The command `bench cache-hit` in live mode: replays a workload against daemons on this machine with real bytes,
compares every byte, and compares the hit rate with other arrangements of the same memory."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from tokenlake.config import ServerConfig
from tokenlake.config.values import LEAST_DISK_BYTES
from tokenlake.errors import ConfigurationError
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_bench.balance import load, max_over_mean_from
from tokenlake_bench.baselines import Accesses, Prompt, baselines, intern_segments
from tokenlake_bench.daemons import EVICTED, PATIENT, SENT_BYTES, LoadMeter, copies_per_segment, settle
from tokenlake_bench.fast_daemon import MAX_SPEED
from tokenlake_bench.flash import FlashCrowd
from tokenlake_bench.hits import CacheHitResult, disk_rows, hit_rates, hit_rows
from tokenlake_bench.live_client import MATCH_S, WINDOW, LiveClient, Served
from tokenlake_bench.pictures import bars, check_plot, drawn
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_bytes, format_duration, format_ratio, format_share, table, verdict, write_json
from tokenlake_bench.routes import ROUTES, Route
from tokenlake_bench.routing.outcome import DiskUse
from tokenlake_bench.sizing import PoolSize, bench_layout, disk_bytes, pool_size
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.trace_lines import passed_over
from tokenlake_bench.turns import DueTurns
from tokenlake_bench.workload import BuiltinSettings, Workload, builtin_workload
from tokenlake_server.disk.store import OWN_BYTES
from tokenlake_testing.cluster import SERVER, Cluster

TRACE_SEGMENT_TOKENS, TRACE_CAPACITY_TOKENS = 512, 3_000_000
"""The traces name blocks of 512 tokens, so smaller segments would find no more hits."""
BUILTIN_SEGMENT_TOKENS, BUILTIN_CAPACITY_TOKENS = 64, 24_000
"""The capacity is less than the conversations need, so that segments are evicted."""
FAST_DAEMON = "tokenlake_bench.fast_daemon"
CACHED_SHARE = ServerConfig().cached_share
DEADLINES = {"match_deadline_ms": 600_000, "suspect_ms": 600_000, "lease_s": 3600, "reservation_s": 3600}
"""Those settings of a daemon that are durations, with the largest value that each may have."""
DISK_TOKENS = 'tokenlake_supplied_tokens_total{source="disk",tenant="default"}'
DISK_WRITTEN_BYTES = "tokenlake_disk_written_bytes_total"
DAY_S: Final = 86_400.0
FLASH_WINDOWS: Final = 2
SIMULATED = ("engine_cache_tokens", "pools", "baselines", "model", "gpu", "rate", "copies", "swarm")
"""Arguments that need simulated engines."""


@dataclass(frozen=True, kw_only=True)
class CacheHitArguments:
    """Arguments of the command in live mode. `capacity_tokens` is that of the whole pool; `speed` 0 replays as fast as
    possible, any other value scales the daemons' clocks too. `shipped_deadlines`: the daemons keep their default
    deadlines. `flash_at`: the time of the workload's flash crowd. `open_loop`: requests arrive at their recorded times,
    answered or not. `disk_tokens`: tokens that the disks of all nodes hold, None for no disks; `disk_writes_per_day`:
    their budget of writes in the setting's unit, None for the setting's default, or for no limit where `speed` is 0,
    because a day of the trace has no length there; `disk_directory`: where the files of the disks are, None for the
    system's directory for temporary files. Raises ConfigurationError for a value out of range."""

    trace: Path | None = None
    nodes: int = 3
    capacity_tokens: int | None = None
    segment_tokens: int | None = None
    limit: int | None = None
    speed: float = 0.0
    route: str | None = None
    seed: int = 0
    flash_at: float | None = None
    shipped_deadlines: bool = False
    open_loop: bool = False
    disk_tokens: int | None = None
    disk_writes_per_day: float | None = None
    disk_directory: Path | None = None
    json_file: Path | None = None
    plot_file: Path | None = None
    pools: str | None = None
    baselines: str | None = None
    model: str | None = None
    gpu: str | None = None
    rate: float | None = None
    copies: int | None = None
    swarm: int | None = None
    engine_cache_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in SIMULATED:
            if getattr(self, name) is not None:
                raise ConfigurationError(name, getattr(self, name), "absent, or used with '--mode simulate'")
        if not 0 <= self.speed <= MAX_SPEED:
            raise ConfigurationError("speed", self.speed, f"a number from 0 to {MAX_SPEED:g}")
        if self.route is not None and self.route not in ROUTES:
            raise ConfigurationError("route", self.route, " or ".join(ROUTES))
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError("limit", self.limit, "at least 1")
        if self.disk_tokens is not None and self.disk_tokens < self.capacity:
            raise ConfigurationError("disk_tokens", self.disk_tokens, f"at least {self.capacity}, the tokens in memory")
        check_plot(self.plot_file)

    @property
    def capacity(self) -> int:
        """Tokens of the whole pool, with the default filled in."""
        default = BUILTIN_CAPACITY_TOKENS if self.trace is None else TRACE_CAPACITY_TOKENS
        return default if self.capacity_tokens is None else self.capacity_tokens

    @property
    def segment(self) -> int:
        """Tokens of a segment, with the default filled in."""
        default = BUILTIN_SEGMENT_TOKENS if self.trace is None else TRACE_SEGMENT_TOKENS
        return default if self.segment_tokens is None else self.segment_tokens

    @property
    def haste(self) -> float:
        """Speed of the daemons' clocks: their seconds per real second, at least 1."""
        return max(1.0, self.speed)

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
        return plain if self.flash_at is None else FlashCrowd(plain, self.flash_at, self.segment, self.seed)

    def size(self) -> PoolSize:
        """Size of the pool's nodes. With disks, segments are so large that a disk has the least size that a daemon
        takes."""
        segments = 0 if self.disk_tokens is None else self.disk_tokens // max(1, self.nodes) // self.segment
        plain = bench_layout(self.segment)
        least = max(plain.segment_bytes, -(-LEAST_DISK_BYTES // segments) if segments else 0)
        return pool_size(self.nodes, self.capacity, bench_layout(self.segment, least))

    def settings(self) -> dict[str, str]:
        """Settings of the replay's daemons apart from sizes and addresses. With a faster clock the deadlines are
        multiplied, so that they last as many real seconds: the sockets of this machine are no faster in a replay."""
        settings = {} if self.shipped_deadlines else dict(PATIENT)
        if self.disk_tokens is not None:
            # The files are removed at the end, so nothing is saved to them then.
            settings["disk_save_s"] = "0"
            if self.disk_writes_per_day is not None or not self.speed:
                settings["disk_writes_per_day"] = str(self.disk_writes_per_day or 0)
        if self.speed > 0:
            settings["speed"] = str(self.speed)
            plain = ServerConfig()
            for name, longest in DEADLINES.items():
                lasts = float(settings.get(name, getattr(plain, name))) * self.haste
                settings[name] = str(min(lasts, longest))
        return settings


@dataclass(slots=True)
class ReplayLog:
    """Sums over the requests of a replay that have been served so far. `cut_by`: number of requests by the code of
    their first segment that was not found; `stored`: number of segments that engines wanted to store, by the code of
    the result; `failures`: calls that a daemon did not answer in time. `keys`: the keys of all requested segments, by
    their ids. `seconds`: of trace time, from the first request to the last."""

    prompts: list[Prompt] = field(default_factory=list)
    seconds: float = 0.0
    prompt_tokens: int = 0
    hit_segments: int = 0
    remote_segments: int = 0
    wrong_bytes: int = 0
    match_s: list[float] = field(default_factory=list)
    fetch_s: list[float] = field(default_factory=list)
    cut_by: Counter[Code] = field(default_factory=Counter)
    failures: int = 0
    stored: Counter[Code] = field(default_factory=Counter)
    keys: dict[int, SegmentKey] = field(default_factory=dict)
    interrupted: bool = False

    def add(self, prompt: Prompt, served: Served) -> None:
        """Add the result of a finished request."""
        self.prompts.append(prompt)
        self.prompt_tokens += prompt.tokens
        self.hit_segments += served.hits
        self.remote_segments += len(served.remote)
        self.wrong_bytes += served.wrong_bytes
        self.match_s.append(served.match_s)
        self.fetch_s += served.fetch_s
        if served.cut_by is not None:
            self.cut_by[served.cut_by] += 1
        self.failures += served.failures
        self.stored += served.stored
        self.keys.update(zip(prompt.chain, served.keys, strict=True))


def _replay(
    workload: Workload,
    accesses: Accesses,
    clients: Sequence[LiveClient],
    route: Route,
    meter: LoadMeter,
    speed: float,
    progress: Callable[[ReplayLog], None],
) -> ReplayLog:
    """Serve all requests, one at a time, and return the sums. `speed`: trace seconds per second; 0 replays without
    waiting for the requests' times, and answers take no trace time. KeyboardInterrupt ends it early: the log is then
    `interrupted` and covers the finished requests. Raises `Unreachable`."""
    log = ReplayLog()
    began = time.monotonic()
    first_s: float | None = None
    try:
        turns = DueTurns(accesses.prompts)
        for at_s, number, prompt in turns:
            request = workload[number]
            if speed > 0:
                time.sleep(max(0.0, at_s / speed - (time.monotonic() - began)))
            meter.at(at_s)
            served = clients[route(request)].serve(request.tokens)
            turns.answered(number, max(at_s, (time.monotonic() - began) * speed))
            log.add(prompt, served)
            first_s = at_s if first_s is None else first_s
            log.seconds = at_s - first_s
            progress(log)
        meter.close_window()
    except KeyboardInterrupt:
        log.interrupted = True
    return log


@dataclass(frozen=True)
class LiveRun:
    """Result of a replay against real daemons. `global_lru` is the token hit rate of one LRU cache of the pool's
    capacity; `sent_bytes` are the bytes that each node sent to other nodes, by name of the node."""

    result: CacheHitResult
    log: ReplayLog
    size: PoolSize
    global_lru: float
    evicted: int
    sent_bytes: dict[str, int]
    elapsed_s: float


def run_live(workload: Workload, arguments: CacheHitArguments, progress: Callable[[ReplayLog], None]) -> LiveRun:
    """Replay `workload` against real daemons and compute the baselines for the same requests. An interrupted replay is
    reported as far as it got. Raises TokenLakeError."""
    size, segment = arguments.size(), arguments.segment
    accesses = intern_segments(workload, segment)
    if arguments.open_loop:
        accesses = accesses.open_loop()
    began = time.monotonic()
    with ExitStack() as stack:
        module, memory = FAST_DAEMON if arguments.speed > 0 else SERVER, str(size.memory)
        cluster = Cluster(arguments.nodes, memory, memory, None, module, **arguments.settings())
        if arguments.disk_tokens is not None:
            within = tempfile.TemporaryDirectory(prefix="tokenlake-bench-disk-", dir=arguments.disk_directory)
            nbytes = OWN_BYTES + disk_bytes(arguments.disk_tokens // arguments.nodes, size.layout)
            cluster.give_disks(Path(stack.enter_context(within)), max(LEAST_DISK_BYTES, nbytes))
        stack.enter_context(cluster)
        for node in cluster.nodes if arguments.disk_tokens is not None else ():
            node.wait_disk()
        # A fetch takes at most as many segments as a node may keep as cached copies, which fetched segments become.
        window = max(1, min(WINDOW, int(CACHED_SHARE * size.node_segments)))
        nodes = range(arguments.nodes)
        pools = [stack.enter_context(cluster.connect(node, size.layout)) for node in nodes]
        clients = [LiveClient(pool, arguments.seed, window=window, haste=arguments.haste) for pool in pools]
        meter = LoadMeter(cluster, size.layout.segment_bytes)
        route = ROUTES[arguments.route or next(iter(ROUTES))](arguments.nodes, arguments.seed)
        log = _replay(workload, accesses, clients, route, meter, arguments.speed, progress)
        elapsed_s = time.monotonic() - began
        settle(cluster)
        totals = cluster.totals()
        # New clients count the copies, because an interruption may have left those of the replay in the middle of a
        # call.
        pools = [stack.enter_context(cluster.connect(node, size.layout)) for node in nodes]
        duplication = copies_per_segment(pools, log.keys.values(), MATCH_S * arguments.haste)
        sent_bytes = dict(zip([node.name for node in cluster.nodes], meter.sent.totals(), strict=True))
    done = Accesses(segment, log.prompts)
    compared = baselines(done, nodes=arguments.nodes, capacity_tokens=size.capacity_tokens, seed=arguments.seed)
    spread = load(meter.sent)
    disk = _disk_use(arguments, size, totals, log.seconds)
    from_disk = 0 if disk is None else disk.tokens // segment
    flash_at = arguments.flash_at
    result = CacheHitResult(
        token_hit_rate=log.hit_segments * segment / max(1, log.prompt_tokens),
        ideal_token_hit_rate=compared.ideal.rate,
        private_token_hit_rate=compared.private.rate,
        private_routed_token_hit_rate=compared.private_routed.rate,
        # A segment that lies on disk is fetched like one of another node, from the node itself.
        remote_share=max(0, log.remote_segments - from_disk) / max(1, log.hit_segments),
        duplication=duplication,
        load_cv=spread.cv,
        load_max_over_mean=spread.max_over_mean,
        flash_max_over_mean=()
        if flash_at is None
        else tuple(max_over_mean_from(meter.sent_to_readers, flash_at, FLASH_WINDOWS)),
        bytes_moved=int(totals[SENT_BYTES]),
        wrong_bytes=log.wrong_bytes,
        requests=len(log.prompts),
        nodes=arguments.nodes,
        seed=arguments.seed,
        disk=disk,
    )
    return LiveRun(result, log, size, compared.global_lru.rate, int(totals[EVICTED]), sent_bytes, elapsed_s)


def _disk_use(
    arguments: CacheHitArguments, size: PoolSize, totals: Mapping[str, float], seconds: float
) -> DiskUse | None:
    """Use of the disks in a replay of so many seconds of the trace; None without disks."""
    if arguments.disk_tokens is None:
        return None
    written = int(sum(value for name, value in totals.items() if name.startswith(DISK_WRITTEN_BYTES)))
    per_day = written * DAY_S / max(seconds, 1e-9)
    capacity = arguments.disk_tokens // arguments.segment * size.layout.segment_bytes
    return DiskUse(
        tokens=int(totals[DISK_TOKENS]),
        written_bytes=written,
        written_bytes_per_day=per_day,
        writes_per_day=per_day / capacity,
        written_share=written / max(1.0, totals[EVICTED] * size.layout.segment_bytes),
    )


def run_cache_hit(arguments: CacheHitArguments) -> LiveRun:
    """Run the replay, print its table, and write the JSON file and the picture if the command line names them. Raises
    TokenLakeError."""
    console = Console()
    workload = arguments.workload(console.print)
    if arguments.trace is None:
        console.print("no --trace: replaying the built-in workload")

    def tell(log: ReplayLog) -> None:
        rate = log.hit_segments * arguments.segment / max(1, log.prompt_tokens)
        progress.update(len(log.prompts), f"hits {format_share(rate)}, wrong bytes {log.wrong_bytes}")

    with LiveProgress(console, "replaying", len(workload)) as progress:
        run = run_live(workload, arguments, tell)
    console.print(_table(workload.name, run, arguments))
    for line in _notes(run):
        console.print(line, soft_wrap=True)
    write_json(run.result, arguments.json_file)
    if arguments.plot_file is not None:
        _plot(run, arguments.plot_file)
    return run


def _table(workload: str, run: LiveRun, arguments: CacheHitArguments) -> Table:
    result, log = run.result, run.log
    flash = [
        (f"load max / mean, window {number} of the flash crowd", format_ratio(ratio))
        for number, ratio in enumerate(result.flash_max_over_mean, 1)
    ]
    return table(
        f"{workload}: {result.requests:,} requests, {result.nodes} nodes, seed {result.seed}",
        (),
        [
            *hit_rows(result),
            ("one cache of the same capacity, LRU", format_share(run.global_lru)),
            ("capacity of the pool", f"{run.size.capacity_tokens:,} tokens"),
            ("segment", f"{arguments.segment:,} tokens"),
            ("hits from another node", format_share(result.remote_share)),
            ("copies per segment", f"{result.duplication:.3f}"),
            ("segments evicted", f"{run.evicted:,}"),
            ("bytes between nodes", format_bytes(result.bytes_moved)),
            *disk_rows(result.disk, arguments.disk_tokens, result.nodes),
            *((f"sent by {name}", format_bytes(count)) for name, count in run.sent_bytes.items()),
            ("load CV, 10 s windows", format_ratio(result.load_cv)),
            ("load max / mean", format_ratio(result.load_max_over_mean)),
            *flash,
            ("match p50 / p99", _quantiles(log.match_s)),
            ("fetch p50 / p99", _quantiles(log.fetch_s)),
            ("elapsed", format_duration(run.elapsed_s)),
            ("wrong bytes", verdict(f"{result.wrong_bytes:,}", good=result.wrong_bytes == 0)),
        ],
    )


def _notes(run: LiveRun) -> list[str]:
    """Lines of text below the table: the reasons for missing hits."""
    cut: dict[Code, int] = {code: count for code, count in run.log.cut_by.items() if code is not Code.MISSING}
    refused: dict[Code, int] = {code: count for code, count in run.log.stored.items() if code.refused}
    lines = [
        f"hits that ended for a reason other than a missing segment: {_counts(cut)}",
        f"segments whose store was refused: {_counts(refused)}",
    ]
    if run.log.failures:
        lines.append(f"calls without an answer within their deadline: {run.log.failures:,}")
    if run.log.interrupted:
        lines.append(f"interrupted after {run.result.requests:,} requests; all figures above cover these")
    return lines


def _counts(counted: Mapping[Code, int]) -> str:
    return ", ".join(f"{code.name} {counted[code]:,}" for code in sorted(counted)) or "none"


def _quantiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return " / ".join(map(format_duration, np.quantile(np.array(seconds), [0.5, 0.99]).tolist()))


def _plot(run: LiveRun, path: Path) -> None:
    """Draw the token hit rates, and the GiB that each node sent to others."""
    with drawn(path, (10, 4), 2) as (_, (left, right)):
        bars(left, "token hit rate, %", hit_rates(run.result), "pool")
        loads = [count / 2**30 for count in run.sent_bytes.values()]
        right.bar(list(run.sent_bytes), loads, color="tab:blue")
        right.axhline(sum(loads) / max(1, len(loads)), color="black", linewidth=1, linestyle="--")
        right.set_ylabel("sent to other nodes, GiB")
        right.set_title(f"CV per 10 s {format_ratio(run.result.load_cv)}")
