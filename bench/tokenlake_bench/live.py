"""`bench cache-hit` in live mode: replays a workload against daemons on this machine with real bytes, compares every
byte, and compares the hit rate with other arrangements of the same memory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from tokenlake.wire import Code
from tokenlake_bench.balance import WINDOW_S, SendLog, spread
from tokenlake_bench.baselines import Accesses, Baselines, Prompt, baselines, intern_segments
from tokenlake_bench.cache_hit import CacheHitArguments
from tokenlake_bench.daemons import EVICTED, PATIENT, sent_bytes, settle
from tokenlake_bench.hits import CacheHitResult, hit_rows
from tokenlake_bench.live_client import WINDOW, LiveClient, Served
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import (
    format_bytes,
    format_duration,
    format_ratio,
    format_share,
    output,
    table,
    verdict,
    write_json,
)
from tokenlake_bench.sizing import bench_layout, pool_size
from tokenlake_bench.workload import Workload
from tokenlake_testing.cluster import Cluster


class LoadMeter:
    """Logs the bytes that each node sends to others, per window of trace time, from the daemons' counters."""

    def __init__(self, cluster: Cluster) -> None:
        self.sent = SendLog(len(cluster.nodes))
        self._cluster = cluster
        self._window = -1
        self._known = [0] * len(cluster.nodes)

    def at(self, at_s: float) -> None:
        """Set the trace time to which the bytes sent from now on are attributed. It must not decrease."""
        window = math.floor(at_s / WINDOW_S)
        if window != self._window:
            self.close_window()
            self._window = window

    def close_window(self) -> None:
        """Log the bytes of the present window; the caller calls this after the last request."""
        if self._window < 0:
            return
        settle(self._cluster)
        for number, node in enumerate(self._cluster.nodes):
            known = sent_bytes(node.metrics())
            self.sent.add(self._window * WINDOW_S, number, known - self._known[number])
            self._known[number] = known


@dataclass(slots=True)
class ReplayLog:
    """Sums over the requests that have been served so far. `cut_by`: number of requests by the code of their first
    segment that was not found; `stored`: number of segments that engines wanted to store, by the code of the result;
    `failures`: calls that a daemon did not answer in time."""

    prompts: list[Prompt] = field(default_factory=list)
    prompt_tokens: int = 0
    hit_segments: int = 0
    remote_segments: int = 0
    wrong_bytes: int = 0
    match_s: list[float] = field(default_factory=list)
    fetch_s: list[float] = field(default_factory=list)
    cut_by: Counter[Code] = field(default_factory=Counter)
    failures: int = 0
    stored: Counter[Code] = field(default_factory=Counter)
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


def run_live(arguments: CacheHitArguments) -> bool:
    """Run the replay, print its table, and write the JSON file if the command line names one. An interruption ends the
    replay early; it is reported as far as it got. Raises TokenLakeError."""
    console = output()
    workload = arguments.workload()
    if arguments.trace is None:
        console.print("no --trace: replaying the built-in workload")
    capacity, segment = arguments.size
    size = pool_size(arguments.nodes, capacity, bench_layout(segment))
    accesses = intern_segments(workload, segment)
    began = time.monotonic()
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(arguments.nodes, str(size.memory), str(size.memory), **PATIENT))
        window = size.window(WINDOW)
        pools = [stack.enter_context(cluster.connect(node, size.layout)) for node in range(arguments.nodes)]
        meter = LoadMeter(cluster)
        progress = stack.enter_context(LiveProgress("replaying", len(workload)))
        clients = [LiveClient(pool, arguments.seed, window=window) for pool in pools]
        log = _replay(workload, accesses, clients, meter, progress)
        elapsed_s = time.monotonic() - began
        settle(cluster)
        totals = cluster.totals()
    compared = baselines(
        Accesses(segment, log.prompts),
        nodes=arguments.nodes,
        capacity_tokens=size.capacity_tokens,
        seed=arguments.seed,
    )
    balance = spread(meter.sent.table())
    result = CacheHitResult(
        token_hit_rate=log.hit_segments * segment / max(1, log.prompt_tokens),
        ideal_token_hit_rate=compared.ideal.rate,
        private_token_hit_rate=compared.private.rate,
        private_routed_token_hit_rate=compared.private_routed.rate,
        private_routed_busiest=compared.private_routed.busiest,
        remote_share=log.remote_segments / max(1, log.hit_segments),
        load_cv=balance.cv,
        load_max_over_mean=balance.max_over_mean,
        bytes_moved=sent_bytes(totals),
        wrong_bytes=log.wrong_bytes,
        requests=len(log.prompts),
        nodes=arguments.nodes,
        seed=arguments.seed,
    )
    title = f"{workload.name}: {result.requests:,} requests, {result.nodes} nodes, seed {result.seed}"
    sent = zip(cluster.nodes, meter.sent.totals(), strict=True)
    rows = [
        ("capacity of the pool", f"{size.capacity_tokens:,} tokens"),
        ("segment", f"{segment:,} tokens"),
        ("segments evicted", f"{int(totals[EVICTED]):,}"),
        *((f"sent by {node.name}", format_bytes(count)) for node, count in sent),
        ("elapsed", format_duration(elapsed_s)),
    ]
    console.print(_table(title, result, compared, log, rows))
    for line in _notes(log):
        console.print(line, soft_wrap=True)
    write_json(result, arguments.json_file)
    return True


def _replay(
    workload: Workload,
    accesses: Accesses,
    clients: Sequence[LiveClient],
    meter: LoadMeter,
    progress: LiveProgress,
) -> ReplayLog:
    """Serve all requests in their recorded order, one at a time, as fast as possible and round robin over the nodes.
    KeyboardInterrupt ends it early: the log is then `interrupted` and covers the finished requests. Raises
    `Unreachable`."""
    log = ReplayLog()
    try:
        for request, prompt in zip(workload, accesses.prompts, strict=True):
            meter.at(request.at_s)
            log.add(prompt, clients[request.index % len(clients)].serve(request.tokens))
            rate = log.hit_segments * accesses.segment_tokens / max(1, log.prompt_tokens)
            progress.update(len(log.prompts), f"hits {format_share(rate)}, wrong bytes {log.wrong_bytes}")
        meter.close_window()
    except KeyboardInterrupt:
        log.interrupted = True
    return log


def _table(
    title: str, result: CacheHitResult, compared: Baselines, log: ReplayLog, rows: Sequence[tuple[str, str]]
) -> Table:
    return table(
        title,
        (),
        [
            *hit_rows(result),
            ("one cache of the same capacity, LRU", format_share(compared.global_lru.rate)),
            ("hits from another node", format_share(result.remote_share)),
            ("bytes between nodes", format_bytes(result.bytes_moved)),
            ("load CV, 10 s windows", format_ratio(result.load_cv)),
            ("load max / mean", format_ratio(result.load_max_over_mean)),
            ("match p50 / p99", _quantiles(log.match_s)),
            ("fetch p50 / p99", _quantiles(log.fetch_s)),
            *rows,
            ("wrong bytes", verdict(f"{result.wrong_bytes:,}", good=result.wrong_bytes == 0)),
        ],
    )


def _notes(log: ReplayLog) -> list[str]:
    """Lines of text below the table: the reasons for missing hits."""
    cut: dict[Code, int] = {code: count for code, count in log.cut_by.items() if code is not Code.MISSING}
    refused: dict[Code, int] = {code: count for code, count in log.stored.items() if code.refused}
    lines = [
        f"hits that ended for a reason other than a missing segment: {_counts(cut)}",
        f"segments whose store was refused: {_counts(refused)}",
    ]
    lines.append("what engines with queues make of it, first tokens and objectives: --mode simulate --rate N")
    if log.failures:
        lines.append(f"calls without an answer within their deadline: {log.failures:,}")
    if log.interrupted:
        lines.append(f"interrupted after {len(log.prompts):,} requests; all figures above cover these")
    return lines


def _counts(counted: Mapping[Code, int]) -> str:
    return ", ".join(f"{code.name} {counted[code]:,}" for code in sorted(counted)) or "none"


def _quantiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return " / ".join(map(format_duration, np.quantile(np.array(seconds), [0.5, 0.99]).tolist()))
