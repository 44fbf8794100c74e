"""The part of `bench disk` with a daemon: matches that hit memory while the disk is saturated, beside the same matches
at a daemon without a disk while other processes use as much processor time."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from tokenlake.errors import Unreachable
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_bench.transfer.windows import keys_of
from tokenlake_client import Pool
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster, Node

LAYOUT: Final = Layout(
    model_id="bench-disk",
    weights_digest="00",
    dtype="float16",
    layers=8,
    kv_heads=8,
    key_dim=128,
    value_dim=128,
    position="none",
    segment_tokens=32,
)
"""Segments of 1 MiB."""
MEMORY, REGION = "256MiB", "64MiB"
HOT, COLD = 32, 32
"""Segments of the prompt that is matched, and of each of the others."""
PROMPTS = 24
"""Prompts that memory does not hold."""
ACCESSES = 2
READERS = 2
PAUSE_S = 0.002
TICKS = 100
"""Ticks of /proc per second."""


class MatchesResult(msgspec.Struct, kw_only=True):
    """Times in seconds; medians of the rounds."""

    keys: int = HOT
    p50_s: float
    p99_s: float
    p99_without_disk_s: float
    ratio: float
    """Median of the rounds' ratios of both p99."""
    read_bytes_per_s: float
    """Segments that engines read, from disk for the most part."""
    cpu_share: float
    """Processors that the daemon and the readers used."""
    disk_reads_per_s: float


def measure_matches(directory: Path, seconds: float, rounds: int) -> MatchesResult:
    """Measure in turns. Raises `TokenLakeError`."""
    p50s, p99s, plain, ratios, rates, shares, segments = [], [], [], [], [], [], []
    with (
        Cluster(1, MEMORY, REGION, disk=str(directory), disk_writes_per_day="0", disk_save_s="0") as disk,
        Cluster(1, MEMORY, REGION) as memory,
        disk.connect(0, LAYOUT) as on_disk,
        memory.connect(0, LAYOUT) as in_memory,
    ):
        disk.nodes[0].wait_disk()
        for number in range(1, PROMPTS + 1):
            _store(on_disk, number, COLD)
            for _ in range(ACCESSES):
                # Segments that were never accessed are not written to disk.
                on_disk.match(keys_of("disk", number, COLD), deadline_s=5.0).release()
        for pool in (on_disk, in_memory):
            _store(pool, 0, HOT)
        for _ in range(rounds):
            with _children("read", disk.nodes[0]) as readers:
                before, began = disk.nodes[0].metrics(), time.monotonic()
                used = _cpu(disk.nodes[0], readers)
                times = _matches(on_disk, seconds)
                took = time.monotonic() - began
                share = (_cpu(disk.nodes[0], readers) - used) / took
                after = disk.nodes[0].metrics()
                segments.append(_sum(after, before, "tokenlake_disk_read_segments_total") / took)
                rates.append(_sum(after, before, "tokenlake_disk_read_bytes_total") / took)
            with _children("burn", memory.nodes[0], share / READERS):
                without = _matches(in_memory, seconds)
            p50s.append(statistics.median(times))
            p99s.append(float(np.quantile(times, 0.99)))
            plain.append(float(np.quantile(without, 0.99)))
            ratios.append(p99s[-1] / plain[-1])
            shares.append(share)
    if not any(segments):
        raise Unreachable("nothing was read from disk")
    return MatchesResult(
        p50_s=statistics.median(p50s),
        p99_s=statistics.median(p99s),
        p99_without_disk_s=statistics.median(plain),
        ratio=statistics.median(ratios),
        read_bytes_per_s=statistics.median(rates),
        cpu_share=statistics.median(shares),
        disk_reads_per_s=statistics.median(segments),
    )


def _sum(after: dict[str, float], before: dict[str, float], name: str) -> float:
    return sum(value - before.get(key, 0.0) for key, value in after.items() if key.split("{")[0] == name)


def _store(pool: Pool, number: int, count: int) -> None:
    content = np.full(LAYOUT.segment_bytes, number % 251, np.uint8)

    def fill(index: int, array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
        array[:] = content[: len(array)]

    pool.store_all(keys_of("disk", number, count), fill, patience=10.0)


def _matches(pool: Pool, seconds: float) -> list[float]:
    """Seconds of matches of the hot prompt, all of which is found in memory."""
    keys, times = keys_of("disk", 0, HOT), []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        with pool.match(keys, deadline_s=5.0) as lease:
            times.append(time.perf_counter() - began)
            local = sum(code == Code.LOCAL for code in lease.codes)
        if local < HOT:
            times.pop()
            _store(pool, 0, HOT)
        time.sleep(PAUSE_S)
    return times


@contextlib.contextmanager
def _children(task: str, node: Node, share: float = 0.0) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "tokenlake_bench.disk_matches", task, str(node.socket), str(share)]
    children = [start_child([*command, str(number)], stdout=subprocess.PIPE, text=True) for number in range(READERS)]
    try:
        for child in children:
            assert child.stdout is not None
            if not child.stdout.readline():
                raise Unreachable("a child process ended")
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def _cpu(node: Node, children: list[subprocess.Popen[str]]) -> float:
    """Seconds of processor time of the daemon and the children."""
    assert node.process is not None
    total = 0
    for pid in (node.process.pid, *(child.pid for child in children)):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def _read(socket: str, seed: int) -> None:
    """Read prompts that memory does not hold, for ever."""
    with Pool.connect(socket, LAYOUT) as pool:
        print("ready", flush=True)
        number = seed * PROMPTS // READERS
        while True:
            number = number % PROMPTS + 1
            with pool.match(keys_of("disk", number, COLD), deadline_s=5.0) as lease, contextlib.suppress(Exception):
                lease.fetch(deadline_s=5.0)


def _burn(share: float) -> None:
    """Use a share of a processor, for ever."""
    print("ready", flush=True)
    while True:
        began = time.process_time()
        while time.process_time() - began < share * 0.005:
            pass
        time.sleep((1 - share) * 0.005)


if __name__ == "__main__":
    if sys.argv[1] == "read":
        _read(sys.argv[2], int(sys.argv[4]))
    else:
        _burn(min(1.0, float(sys.argv[3])))
