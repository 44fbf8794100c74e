"""`bench cache-hit` in live mode: replays a workload against daemons on this machine with real bytes, and compares the
hit rate with other arrangements of the same memory."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenlake.config import ServerConfig
from tokenlake.config.values import LEAST_DISK_BYTES
from tokenlake.errors import ConfigurationError
from tokenlake.wire import Code
from tokenlake_bench.balance import SendLog, load, max_over_mean_from
from tokenlake_bench.baselines import (
    Accesses,
    baselines,
    intern_segments,
)
from tokenlake_bench.copies import copies_per_segment
from tokenlake_bench.live_client import WINDOW, LiveClient
from tokenlake_bench.load_meter import LoadMeter, settle
from tokenlake_bench.replay import ReplayLog, replay
from tokenlake_bench.report import CacheHitDetails, CacheHitResult, Quantiles
from tokenlake_bench.routes import ROUTES
from tokenlake_bench.routing.outcome import DiskUse
from tokenlake_bench.sizing import PoolSize, bench_layout, disk_bytes, pool_size
from tokenlake_bench.workload import Workload
from tokenlake_server.disk.store import OWN_BYTES
from tokenlake_testing.cluster import SERVER, Cluster

FAST_DAEMON = "tokenlake_bench.fast_daemon"
CACHED_SHARE = ServerConfig().cached_share
PATIENT = {"match_deadline_ms": "1000", "suspect_ms": "5000"}
"""Settings of the daemons unless `shipped_deadlines` is set: deadlines so long that delays of a busy machine do not
change the hits."""
DEADLINES = {"match_deadline_ms": 600_000, "suspect_ms": 600_000, "lease_s": 3600, "reservation_s": 3600}
"""Those settings of a daemon that are durations, with the largest value that each may have."""
SENT_BYTES = "tokenlake_sent_bytes_total"
EVICTED = "tokenlake_evicted_segments_total"
DISK_TOKENS = 'tokenlake_supplied_tokens_total{source="disk",tenant="default"}'
DISK_WRITTEN_BYTES = "tokenlake_disk_written_bytes_total"
DAY_S = 86_400.0
FLASH_WINDOWS = 2


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """Options of a live replay. `capacity_tokens` is that of the whole pool; `speed` 0 replays as fast as possible, any
    other value scales the daemons' clocks too. `shipped_deadlines`: the daemons keep their default deadlines.
    `flash_at`: the time of the workload's flash crowd. `open_loop`: requests arrive at their recorded times, answered
    or not. `disk_tokens`: tokens that the disks of all nodes hold, None for no disks; `disk_writes_per_day`: their
    budget of writes in the setting's unit, None for the setting's default, or for no limit where `speed` is 0, because
    a day of the trace has no length there; `disk_directory`: where the files of the disks are, None for the system's
    directory for temporary files. Raises ConfigurationError for a disk that holds fewer tokens than memory."""

    nodes: int = 3
    capacity_tokens: int
    segment_tokens: int
    route: str = "round-robin"
    speed: float = 0.0
    seed: int = 0
    flash_at: float | None = None
    shipped_deadlines: bool = False
    open_loop: bool = False
    disk_tokens: int | None = None
    disk_writes_per_day: float | None = None
    disk_directory: Path | None = None

    def __post_init__(self) -> None:
        if self.disk_tokens is not None and self.disk_tokens < self.capacity_tokens:
            raise ConfigurationError(
                "disk_tokens", self.disk_tokens, f"at least {self.capacity_tokens}, the tokens in memory"
            )

    def size(self) -> PoolSize:
        """Size of the pool's nodes. With disks, segments are so large that a disk has the least size that a daemon
        takes."""
        segments = 0 if self.disk_tokens is None else self.disk_tokens // max(1, self.nodes) // self.segment_tokens
        plain = bench_layout(self.segment_tokens)
        least = max(plain.segment_bytes, -(-LEAST_DISK_BYTES // segments) if segments else 0)
        return pool_size(self.nodes, self.capacity_tokens, bench_layout(self.segment_tokens, least))

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

    @property
    def haste(self) -> float:
        """Speed of the daemons' clocks: their seconds per real second, at least 1."""
        return max(1.0, self.speed)


@dataclass(frozen=True)
class LiveRun:
    """Result of a replay against real daemons. `global_lru` is the token hit rate of one LRU cache of the pool's
    capacity."""

    result: CacheHitResult
    details: CacheHitDetails
    log: ReplayLog
    global_lru: float
    evicted: int


def run_live(workload: Workload, options: LiveOptions, progress: Callable[[ReplayLog], None]) -> LiveRun:
    """Replay `workload` against real daemons and compute the baselines for the same requests. An interrupted replay is
    reported as far as it got. Raises TokenLakeError."""
    size = options.size()
    accesses = intern_segments(workload, options.segment_tokens)
    if options.open_loop:
        accesses = accesses.open_loop()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        module = FAST_DAEMON if options.speed > 0 else SERVER
        memory = str(size.memory)
        cluster = Cluster(options.nodes, memory, memory, None, module, **options.settings())
        if options.disk_tokens is not None:
            within = tempfile.TemporaryDirectory(prefix="tokenlake-bench-disk-", dir=options.disk_directory)
            nbytes = OWN_BYTES + disk_bytes(options.disk_tokens // options.nodes, size.layout)
            cluster.give_disks(Path(stack.enter_context(within)), max(LEAST_DISK_BYTES, nbytes))
        stack.enter_context(cluster)
        for node in cluster.nodes if options.disk_tokens is not None else ():
            node.wait_disk()
        # A fetch takes at most as many segments as a node may keep as cached copies, which fetched segments become.
        window = max(1, min(WINDOW, int(CACHED_SHARE * size.node_segments)))
        clients = [
            LiveClient(pool, options.seed, window=window, haste=options.haste)
            for pool in (stack.enter_context(cluster.connect(node, size.layout)) for node in range(options.nodes))
        ]
        meter = LoadMeter(cluster, size.layout.segment_bytes)
        route = ROUTES[options.route](options.nodes, options.seed)
        log = replay(workload, accesses, clients, route, meter=meter, speed=options.speed, progress=progress)
        elapsed_s = time.monotonic() - began
        settle(cluster)
        totals = cluster.totals()
        # New clients count the copies, because an interruption may have left those of the replay in the middle of a
        # call.
        pools = [stack.enter_context(cluster.connect(node, size.layout)) for node in range(options.nodes)]
        duplication = copies_per_segment(pools, log.keys.values(), options.haste)
        sent_bytes = dict(zip([node.name for node in cluster.nodes], meter.sent.totals(), strict=True))
    done = Accesses(accesses.segment_tokens, log.prompts)
    compared = baselines(done, nodes=options.nodes, capacity_tokens=size.capacity_tokens, seed=options.seed)
    spread = load(meter.sent)
    disk = _disk_use(options, size, totals, log.seconds)
    from_disk = 0 if disk is None else disk.tokens // options.segment_tokens
    result = CacheHitResult(
        token_hit_rate=log.hit_segments * options.segment_tokens / max(1, log.prompt_tokens),
        ideal_token_hit_rate=compared.ideal.rate,
        private_token_hit_rate=compared.private.rate,
        private_routed_token_hit_rate=compared.private_routed.rate,
        # A segment that lies on disk is fetched like one of another node, from the node itself.
        remote_share=max(0, log.remote_segments - from_disk) / max(1, log.hit_segments),
        duplication=duplication,
        load_cv=spread.cv,
        load_cv_floor=None,
        load_max_over_mean=spread.max_over_mean,
        flash_max_over_mean=_flash(options, meter.sent_to_readers),
        flash_floor=(),
        bytes_moved=int(totals[SENT_BYTES]),
        wrong_bytes=log.wrong_bytes,
        requests=log.requests,
        nodes=options.nodes,
        seed=options.seed,
        disk=disk,
    )
    details = CacheHitDetails(
        workload=workload.name,
        segment_tokens=options.segment_tokens,
        capacity_tokens=size.capacity_tokens,
        disk_tokens=options.disk_tokens,
        match=_quantiles(log.match_s),
        fetch=_quantiles(log.fetch_s),
        sent_bytes=sent_bytes,
        elapsed_s=elapsed_s,
    )
    return LiveRun(result, details, log, compared.global_lru.rate, int(totals[EVICTED]))


def _disk_use(options: LiveOptions, size: PoolSize, totals: Mapping[str, float], seconds: float) -> DiskUse | None:
    """Use of the disks in a replay of so many seconds of the trace; None without disks."""
    if options.disk_tokens is None:
        return None
    written = int(sum(value for name, value in totals.items() if name.startswith(DISK_WRITTEN_BYTES)))
    per_day = written * DAY_S / max(seconds, 1e-9)
    capacity = options.disk_tokens // options.segment_tokens * size.layout.segment_bytes
    return DiskUse(
        tokens=int(totals[DISK_TOKENS]),
        written_bytes=written,
        written_bytes_per_day=per_day,
        writes_per_day=per_day / capacity,
        written_share=written / max(1.0, totals[EVICTED] * size.layout.segment_bytes),
    )


def _flash(options: LiveOptions, sent: SendLog) -> tuple[float, ...]:
    """Bytes that the most loaded node sent divided by the mean over the nodes, in each of the first `FLASH_WINDOWS`
    time windows of the flash crowd; empty for a run without a flash crowd."""
    return () if options.flash_at is None else tuple(max_over_mean_from(sent, options.flash_at, FLASH_WINDOWS))


def notes(run: LiveRun) -> list[str]:
    """Lines of text that are printed below the table: the hit rate of the compared cache, and the reasons for missing
    hits."""
    cut: dict[Code, int] = {code: count for code, count in run.log.cut_by.items() if code is not Code.MISSING}
    refused: dict[Code, int] = {code: count for code, count in run.log.stored.items() if code.refused}
    lines = [
        f"one cache of the same capacity would hit {run.global_lru * 100:.1f} %; segments evicted: {run.evicted:,}",
        f"hits that ended for a reason other than a missing segment: {_counts(cut)}",
        f"segments whose store was refused: {_counts(refused)}",
    ]
    if run.log.failures:
        lines.append(f"calls without an answer within their deadline: {run.log.failures:,}")
    if run.log.interrupted:
        lines.append(f"interrupted after {run.log.requests:,} requests; all figures above cover these")
    return lines


def _counts(counted: Mapping[Code, int]) -> str:
    return ", ".join(f"{code.name} {counted[code]:,}" for code in sorted(counted)) or "none"


def _quantiles(seconds: Sequence[float]) -> Quantiles:
    if not seconds:
        return Quantiles(0.0, 0.0)
    p50, p99 = np.quantile(np.array(seconds), [0.5, 0.99]) * 1e3
    return Quantiles(float(p50), float(p99))
