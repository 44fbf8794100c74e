"""`tokenlake bench restart`: a cluster with disks under load, whose daemons are ended by SIGTERM and SIGKILL, one after
another and all at once, and what it has again after each start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from tokenlake.errors import ConfigurationError, DeadlinePassed, Unreachable
from tokenlake.identity import SegmentKey
from tokenlake_bench.conversations import CONVERSATIONS, Conversations
from tokenlake_bench.daemons import PATIENT
from tokenlake_bench.load import Load, hit_rate, ideal_rate
from tokenlake_bench.payload import wrong_bytes
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_duration, format_share, output, table, write_json
from tokenlake_bench.sizing import bench_layout
from tokenlake_client import Deadlines, Pool
from tokenlake_testing.cluster import Cluster, Node
from tokenlake_testing.disk_keys import keys_on_disk

MEMORY, REGION = "4MiB", "1MiB"
"""Of each node: about 500 segments, fewer than those of its open conversations."""
SEGMENT_TOKENS: Final = 32
LAYOUT: Final = bench_layout(SEGMENT_TOKENS)
RATE: Final = 8.0
WARM: Final = 6 * CONVERSATIONS
"""Requests before the first restart, per node: the conversations have several turns by then, and memory is full."""
PATIENCE_S: Final = 10.0
"""Seconds without a further segment after which those that were not found are counted as lost."""
CALL_S: Final = 2.0
PAUSE_S: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class RestartArguments:
    """Arguments of the command. Raises ConfigurationError for a value out of range."""

    nodes: int = 3
    requests: int = 120
    seed: int = 0
    json_file: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 16:
            raise ConfigurationError("nodes", self.nodes, "1 to 16")
        if self.requests < 1:
            raise ConfigurationError("requests", self.requests, "at least 1")


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """One restart of one node, or of all nodes at once.

    `synced_segments`: those in the indexes of the nodes' disks when the daemons had ended; the bytes of a segment are
    synced before it enters the index. `recovered_share`: of these, the share that engines at the started nodes read
    again before anything was stored. `first_hit_s`: from the start of the processes to the first segment that an engine
    read which the node itself has, of the slowest node; None without any. The hit rates are hit tokens / prompt tokens
    of the requests before the restart and after it; `ideal_*` are those of a cache that forgets nothing. `down_s` and
    `ready_s`: seconds of the run at which the signal was sent, and at which all segments had been read. `wrong_bytes`:
    of all reads since the restart before this one.
    """

    signal: str
    nodes: list[str]
    synced_segments: int
    recovered_share: float
    first_hit_s: float | None
    hit_rate_before: float
    hit_rate_after: float
    ideal_before: float
    ideal_after: float
    wrong_bytes: int
    down_s: float
    ready_s: float


class RestartResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench restart`. `failures`: calls of engines that ended without an answer; those of a
    daemon that was ended are among them."""

    restarts: list[Restart]
    nodes: int
    requests: int
    seed: int
    failures: int
    wrong_bytes: int


def run_restart(arguments: RestartArguments, console: Console | None = None) -> RestartResult:
    """Run all restarts and print the table. Raises TokenLakeError: `Unreachable` where a daemon does not end or start,
    and after the table where bytes differ."""
    console = console or output()
    cluster = Cluster(arguments.nodes, MEMORY, REGION, disk_writes_per_day="0", **PATIENT)
    cluster.deadlines = Deadlines(call_s=CALL_S)
    cluster.give_disks()
    groups = ([[node] for node in cluster.nodes], [cluster.nodes])
    plan = [(signal, nodes) for chosen in groups for signal in ("SIGTERM", "SIGKILL") for nodes in chosen]
    source, restarts = Conversations(arguments.seed, arguments.nodes, LAYOUT), list[Restart]()
    sockets = [node.socket for node in cluster.nodes]
    with (
        LiveProgress("restarts", len(plan)) as progress,
        cluster,
        Load(sockets, LAYOUT, source, arguments.seed, RATE, cluster.deadlines) as load,
    ):
        progress.update(0, "the engines fill the memory")
        load.next(WARM * arguments.nodes)
        for done, (signal, nodes) in enumerate(plan, 1):
            restart = _restart(cluster, load, source, signal, nodes, arguments.requests)
            restarts.append(restart)
            recovered = f"recovered {format_share(restart.recovered_share)} of {restart.synced_segments:,}"
            progress.update(done, f"{signal} of {_which(restart)}: {recovered}")
    result = RestartResult(
        restarts=restarts,
        nodes=arguments.nodes,
        requests=arguments.requests,
        seed=arguments.seed,
        failures=load.failures,
        wrong_bytes=load.wrong_bytes,
    )
    console.print(_table(result))
    write_json(result, arguments.json_file)
    if result.wrong_bytes:
        raise Unreachable(f"{result.wrong_bytes} bytes differ")
    return result


def _restart(
    cluster: Cluster, load: Load, source: Conversations, signal: str, nodes: Sequence[Node], requests: int
) -> Restart:
    wrong = load.wrong_bytes
    before = load.next(requests)
    source.storing = False
    down_s = load.at_s
    for node in nodes:
        if signal == "SIGKILL":
            node.kill()
        else:
            node.terminate()
    for node in nodes:
        status = node.stop()
        if status and signal == "SIGTERM":
            raise Unreachable(f"{node.name} ended with status {status}: {node.log.read_text()[-2000:]}")
    synced = [keys_on_disk(Path(node.settings["disk"])) for node in nodes]
    began = time.monotonic()
    for node in nodes:
        node.start()
    with ThreadPoolExecutor(len(nodes)) as threads:
        found = list(threads.map(lambda node, keys: _read(cluster, source, node, keys, began), nodes, synced))
    load.wrong_bytes += sum(each.wrong_bytes for each in found)
    cluster.wait_ready()
    ready_s = load.at_s
    source.storing = True
    after = load.next(requests)
    firsts = [each.first_hit_s for each in found if each.first_hit_s is not None]
    segments = sum(map(len, synced))
    return Restart(
        signal=signal,
        nodes=[node.name for node in nodes],
        synced_segments=segments,
        recovered_share=sum(each.segments for each in found) / segments if segments else 1.0,
        first_hit_s=max(firsts) if len(firsts) == len(found) else None,
        hit_rate_before=hit_rate(before),
        hit_rate_after=hit_rate(after),
        ideal_before=ideal_rate(before),
        ideal_after=ideal_rate(after),
        wrong_bytes=load.wrong_bytes - wrong,
        down_s=down_s,
        ready_s=ready_s,
    )


@dataclass
class _Found:
    """The segments that were read at a node after its start, and when it had the first one itself."""

    segments: int = 0
    wrong_bytes: int = 0
    first_hit_s: float | None = None


def _read(cluster: Cluster, source: Conversations, node: Node, keys: Sequence[SegmentKey], began: float) -> _Found:
    """Read each of the segments at a node that starts, by itself, and compare its bytes. `began`: the time of the
    start."""
    found, left, until = _Found(), list(keys), time.monotonic() + PATIENCE_S
    with cluster.connect(cluster.nodes.index(node), LAYOUT) as pool:
        while left and time.monotonic() < until:
            rest = [key for key in left if not _read_one(pool, key, source.digests[key], found, began)]
            if len(rest) < len(left):
                until = time.monotonic() + PATIENCE_S
            left = rest
            time.sleep(PAUSE_S)
    return found


def _read_one(pool: Pool, key: SegmentKey, digest: bytes, found: _Found, began: float) -> bool:
    with suppress(DeadlinePassed), pool.match([key], deadline_s=CALL_S) as lease:
        at_this_node = found.first_hit_s is None and lease.nodes() == [pool.node]
        for array in lease.fetch(deadline_s=CALL_S):
            found.segments += 1
            found.wrong_bytes += wrong_bytes(array, digest)
            if at_this_node:
                found.first_hit_s = time.monotonic() - began
            return True
    return False


def _which(restart: Restart) -> str:
    return restart.nodes[0] if len(restart.nodes) == 1 else "all"


def _table(result: RestartResult) -> Table:
    ideal = [rate for each in result.restarts for rate in (each.ideal_before, each.ideal_after)]
    return table(
        f"{result.nodes} nodes, hits of {result.requests} requests before and after each restart",
        ("", "synced", "recovered", "first hit", "before", "after", "wrong"),
        [
            (
                f"{each.signal} {_which(each)}",
                f"{each.synced_segments:,}",
                format_share(each.recovered_share),
                "none" if each.first_hit_s is None else format_duration(each.first_hit_s),
                format_share(each.hit_rate_before),
                format_share(each.hit_rate_after),
                str(each.wrong_bytes),
            )
            for each in result.restarts
        ],
        f"a cache that forgets nothing: hits {format_share(min(ideal))} to {format_share(max(ideal))}",
    )
