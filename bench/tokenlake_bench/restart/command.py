"""The command `bench restart`: the restarts, and what the cluster has again after each."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from tokenlake.errors import ConfigurationError, DeadlinePassed, Unreachable
from tokenlake.identity import SegmentKey
from tokenlake_bench.live import PATIENT
from tokenlake_bench.payload import wrong_bytes
from tokenlake_bench.pictures import check_plot
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_share, write_json
from tokenlake_bench.restart.load import CONVERSATIONS, LAYOUT, Load
from tokenlake_bench.restart.picture import draw
from tokenlake_bench.restart.results import Restart, RestartResult, hit_rate, ideal_rate, table
from tokenlake_client import Deadlines, Pool
from tokenlake_server.disk.directory import survey
from tokenlake_server.disk.files import DirectoryFiles
from tokenlake_testing.cluster import Cluster, Node

MEMORY, REGION = "4MiB", "1MiB"
"""Of each node: about 500 segments."""
WARM: Final = 6 * CONVERSATIONS
"""Requests before the first restart, per node: the conversations have several turns by then, and memory is full."""
PATIENCE_S: Final = 10.0
"""Seconds without a further segment after which those that were not found are counted as lost."""
CALL_S: Final = 2.0
PAUSE_S: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class RestartArguments:
    """Arguments of the command `bench restart`. Raises ConfigurationError for a value out of range."""

    nodes: int
    requests: int
    seed: int
    json_file: Path | None
    plot_file: Path | None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 16:
            raise ConfigurationError("nodes", self.nodes, "1 to 16")
        if self.requests < 1:
            raise ConfigurationError("requests", self.requests, "at least 1")
        check_plot(self.plot_file)


def run_restart(arguments: RestartArguments, console: Console | None = None) -> RestartResult:
    """Run all restarts and print the table. Raises TokenLakeError: `Unreachable` where a daemon does not end or start,
    and after the table where bytes differ."""
    console = console or Console()
    load_average = os.getloadavg()[0]
    restarts: list[Restart] = []
    cluster = Cluster(arguments.nodes, MEMORY, REGION, disk_writes_per_day="0", **PATIENT)
    cluster.deadlines = Deadlines(call_s=CALL_S)
    cluster.give_disks()
    plan = [
        (signal, nodes)
        for chosen in ([[node] for node in cluster.nodes], [cluster.nodes])
        for signal in ("SIGTERM", "SIGKILL")
        for nodes in chosen
    ]
    with (
        LiveProgress(console, "restarts", len(plan)) as progress,
        cluster,
        Load(cluster, arguments.seed) as load,
    ):
        progress.update(0, "the engines fill the memory")
        load.next(WARM * arguments.nodes)
        for done, (signal, nodes) in enumerate(plan, 1):
            restart = _restart(cluster, load, signal, nodes, arguments.requests)
            restarts.append(restart)
            what = nodes[0].name if len(nodes) == 1 else "all nodes"
            progress.update(
                done,
                f"{signal} of {what}: recovered {format_share(restart.recovered_share)} of {restart.synced_segments:,}",
            )
    result = RestartResult(
        restarts=restarts,
        nodes=arguments.nodes,
        requests=arguments.requests,
        seed=arguments.seed,
        failures=load.failures,
        wrong_bytes=load.wrong_bytes,
        load_average=load_average,
    )
    console.print(table(result))
    if arguments.json_file is not None:
        write_json(result, arguments.json_file)
    if arguments.plot_file is not None:
        draw(result, load.answered, arguments.plot_file)
    if result.wrong_bytes:
        raise Unreachable(f"{result.wrong_bytes} bytes differ")
    return result


def _restart(cluster: Cluster, load: Load, signal: str, nodes: Sequence[Node], requests: int) -> Restart:
    wrong = load.wrong_bytes
    before = load.next(requests)
    load.storing = False
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
    synced = [_indexed(Path(node.settings["disk"])) for node in nodes]
    began = time.monotonic()
    for node in nodes:
        node.start()
    with ThreadPoolExecutor(len(nodes)) as threads:
        found = list(threads.map(lambda node, keys: _read(cluster, load, node, keys, began), nodes, synced))
    load.wrong_bytes += sum(each.wrong_bytes for each in found)
    cluster.wait_ready()
    ready_s = load.at_s
    load.storing = True
    after = load.next(requests)
    firsts = [each.first_hit_s for each in found]
    segments = sum(map(len, synced))
    return Restart(
        signal=signal,
        nodes=[node.name for node in nodes],
        synced_segments=segments,
        recovered_share=sum(each.segments for each in found) / segments if segments else 1.0,
        first_hit_s=None if None in firsts else max(first for first in firsts if first is not None),
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


def _read(cluster: Cluster, load: Load, node: Node, keys: Sequence[SegmentKey], began: float) -> _Found:
    """Read each of the segments at a node that starts, by itself, and compare its bytes. `began`: the time of the
    start."""
    found, left, until = _Found(), list(keys), time.monotonic() + PATIENCE_S
    with cluster.connect(cluster.nodes.index(node), LAYOUT) as pool:
        while left and time.monotonic() < until:
            rest = [key for key in left if not _read_one(pool, key, load.digests[key], found, began)]
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


def _indexed(directory: Path) -> list[SegmentKey]:
    """The segments in the index of a disk that no daemon uses."""
    files = DirectoryFiles(directory, lock=False)
    try:
        return [SegmentKey(record["key"].tobytes()) for slab in survey(files) for record in slab.stored]
    finally:
        files.close()
