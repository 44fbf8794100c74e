"""`tokenlake bench cold`: a cluster with a cold tier is stopped or killed, and another one, without a memory of it,
goes on with its conversations."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_bench.conversations import CONVERSATIONS, Conversations
from tokenlake_bench.daemons import PATIENT
from tokenlake_bench.load import Load, hit_rate, ideal_rate
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_bytes, format_duration, format_share, output, table, write_json
from tokenlake_bench.sizing import layout_of
from tokenlake_client import Deadlines
from tokenlake_testing.cluster import SERVER, START_S, Cluster

SEGMENT_TOKENS: Final = 32
LAYOUT: Final = layout_of("tokenlake-bench-cold", SEGMENT_TOKENS, 2048)
"""256 KiB per segment."""
MEMORY, REGION = "64MiB", "16MiB"
"""Of each node: 250 segments, fewer than those of its open conversations."""
COLD_SIZE: Final = "8GiB"
RATE: Final = 10.0
"""Requests per second of each engine; one at each node."""
WARM: Final = 6 * CONVERSATIONS
"""Requests before the end of the first cluster, per node."""
CALL_S: Final = 5.0
ENDS: Final = ("stopped", "killed", "late", "empty")
"""What happens to the first cluster, and what the second one has: SIGTERM; SIGKILL; SIGTERM, and each read of the tier
begins `late_ms` later; an empty tier."""
SLOW: Final = "tokenlake_testing.slow_cold"


@dataclass(frozen=True, kw_only=True)
class ColdArguments:
    """Arguments of the command. Raises ConfigurationError for a value out of range."""

    nodes: int = 2
    requests: int = 200
    late_ms: float = 50.0
    directory: Path | None = None
    """Where the tier's directory is made; None: with the temporary files."""
    seed: int = 0
    json_file: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 16:
            raise ConfigurationError("nodes", self.nodes, "1 to 16")
        if self.requests < 1:
            raise ConfigurationError("requests", self.requests, "at least 1")
        if not 0 <= self.late_ms <= 10_000:
            raise ConfigurationError("late_ms", self.late_ms, "0 to 10000 milliseconds")


class ColdRun(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster after another. `end`: as of `ENDS`. The hit rates are segments found / asked for, of the last
    requests of the first cluster and the first ones of the second; `ideal_after`: of a cache that forgets nothing.
    `written_per_day`: bytes that a node of the first cluster wrote to the tier per day, at this load. `cold_segments`:
    read from the tier by the second cluster. `fetch_s`: median and greatest seconds of its fetches."""

    end: str
    hit_rate_before: float
    hit_rate_after: float
    ideal_after: float
    written_bytes: int
    written_per_day: float
    cold_segments: int
    fetch_s: tuple[float, float]
    wrong_bytes: int


class ColdResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench cold`. `failures`: calls of engines that ended without an answer."""

    runs: list[ColdRun]
    nodes: int
    requests: int
    late_ms: float
    seed: int
    failures: int
    wrong_bytes: int


def run_cold(arguments: ColdArguments, console: Console | None = None) -> ColdResult:
    """Run all ends and print the table. Raises TokenLakeError: `Unreachable` where a daemon does not start or end, and
    after the table where bytes differ."""
    console = console or output()
    runs, failures = list[ColdRun](), 0
    with LiveProgress("ends", len(ENDS)) as progress:
        for done, end in enumerate(ENDS, 1):
            progress.update(done - 1, f"a cluster that is {end}")
            run, failed = _run(arguments, end)
            runs.append(run)
            failures += failed
    result = ColdResult(
        runs=runs,
        nodes=arguments.nodes,
        requests=arguments.requests,
        late_ms=arguments.late_ms,
        seed=arguments.seed,
        failures=failures,
        wrong_bytes=sum(run.wrong_bytes for run in runs),
    )
    console.print(_table(result))
    write_json(result, arguments.json_file)
    if result.wrong_bytes:
        raise Unreachable(f"{result.wrong_bytes} bytes differ")
    return result


def _run(arguments: ColdArguments, end: str) -> tuple[ColdRun, int]:
    """One end: its figures, and the calls that failed."""
    source = Conversations(arguments.seed, arguments.nodes, LAYOUT)
    with (
        tempfile.TemporaryDirectory(prefix="tokenlake-cold-", dir=arguments.directory) as first_place,
        tempfile.TemporaryDirectory(prefix="tokenlake-cold-", dir=arguments.directory) as empty_place,
    ):
        with _cluster(arguments, first_place) as cluster:
            with _load(arguments, cluster, source) as first:
                first.next(WARM * arguments.nodes)
                before = first.next(arguments.requests)
            seconds = first.at_s
            written = _sum(cluster.totals(), "tokenlake_cold_written_bytes_total")
            _end(cluster, kill=end == "killed")
        place, late_ms = (empty_place if end == "empty" else first_place), (arguments.late_ms if end == "late" else 0.0)
        with _cluster(arguments, place, late_ms) as cluster:
            with _load(arguments, cluster, source) as second:
                after = second.next(arguments.requests)
            read = _sum(cluster.totals(), "tokenlake_cold_read_segments_total")
    fetches = sorted(seconds for answer in after for seconds in answer.served.fetch_s) or [0.0]
    run = ColdRun(
        end=end,
        hit_rate_before=hit_rate(before),
        hit_rate_after=hit_rate(after),
        ideal_after=ideal_rate(after),
        written_bytes=int(written),
        written_per_day=written / arguments.nodes / seconds * 86_400,
        cold_segments=int(read),
        fetch_s=(fetches[len(fetches) // 2], fetches[-1]),
        wrong_bytes=first.wrong_bytes + second.wrong_bytes,
    )
    return run, first.failures + second.failures


@contextmanager
def _cluster(arguments: ColdArguments, place: str, late_ms: float = 0.0) -> Any:
    """A cluster whose cold tier, in the directory `place`, is in use."""
    settings = {"cold": place, "cold_size": COLD_SIZE, **PATIENT}
    cluster = Cluster(arguments.nodes, MEMORY, REGION, None, SLOW if late_ms else SERVER, **settings)
    cluster.deadlines = Deadlines(call_s=CALL_S)
    os.environ["SLOW_COLD_S"] = str(late_ms / 1e3)
    try:
        with cluster:
            until = time.monotonic() + START_S
            while any(_sum(node.metrics(), "tokenlake_cold_writable") < 1 for node in cluster.nodes):
                if time.monotonic() > until:
                    raise Unreachable("the cold tier is not in use")
                time.sleep(0.05)
            yield cluster
    finally:
        del os.environ["SLOW_COLD_S"]


def _load(arguments: ColdArguments, cluster: Cluster, source: Conversations) -> Load:
    sockets = [node.socket for node in cluster.nodes]
    return Load(sockets, LAYOUT, source, arguments.seed, RATE, cluster.deadlines)


def _end(cluster: Cluster, *, kill: bool) -> None:
    for node in cluster.nodes:
        if kill:
            node.kill()
        else:
            node.terminate()
    for node in cluster.nodes:
        status = node.stop(START_S)
        if status and not kill:
            raise Unreachable(f"{node.name} ended with status {status}: {node.log.read_text()[-2000:]}")


def _sum(metrics: dict[str, float], name: str) -> float:
    return sum(value for series, value in metrics.items() if series.partition("{")[0] == name)


def _table(result: ColdResult) -> Table:
    return table(
        f"{result.nodes} nodes: hits of {result.requests} requests before the end and of the next cluster",
        ("", "before", "after", "no limit", "read", "fetch p50 / max", "written/day", "wrong"),
        [
            (
                f"{run.end} {result.late_ms:.0f} ms" if run.end == "late" else run.end,
                format_share(run.hit_rate_before),
                format_share(run.hit_rate_after),
                format_share(run.ideal_after),
                f"{run.cold_segments:,}",
                " / ".join(map(format_duration, run.fetch_s)),
                format_bytes(int(run.written_per_day)),
                str(run.wrong_bytes),
            )
            for run in result.runs
        ],
        "no limit: a cache that forgets nothing; read: segments from the cold tier; written: per node",
    )
