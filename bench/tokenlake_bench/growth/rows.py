"""The measurements of `bench growth`: which calls each of them makes at which daemon, and their timing."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Final

import numpy as np
from rich.console import Console

from tokenlake.identity import SegmentKey
from tokenlake_bench.growth.client import Matching
from tokenlake_bench.growth.daemons import GrowthDaemon, store
from tokenlake_bench.growth.results import Row
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.transfer.windows import keys_of
from tokenlake_bench.transfer.worker import Worker

KEYS: Final = (1, 128, 1024)
MIDDLE: Final = 128
"""Number of keys per call where the number of clients or of stored segments is varied."""
HELD: Final = 10_000
"""Number of segments in the daemon where the keys per call or the number of clients are varied."""
KEYS_PER_TURN: Final = 4096
"""Number of keys, over all calls, that each measurement matches or stores per repetition."""
FEWEST_CALLS: Final = 4
MOST_CALLS: Final = 200
CLIENT_CALLS: Final = 256
"""Number of calls per repetition, over all clients, where the number of clients is varied."""
WARM_TURNS: Final = 1
UNDISTURBED: Final = 0.1
"""Quantile of measured times that is taken as the time on a machine without other programs."""


@dataclass
class Taken:
    """Measured times of one kind of call over all counted repetitions: seconds of each call; per repetition, wall time
    per key and processor time of the daemon per key."""

    calls: list[float] = field(default_factory=list)
    per_key: list[float] = field(default_factory=list)
    daemon_per_key: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of call to measure. `run` makes the calls of one repetition, of `keys` keys each, and returns the
    seconds of each call; `together`: several client processes call at the same time."""

    series: str
    name: str
    keys: int
    daemon: GrowthDaemon
    run: Callable[[], list[float]]
    together: bool = False


def matches(
    daemons: Mapping[int, GrowthDaemon], segments: Sequence[int], clients: Sequence[int], stack: ExitStack
) -> Iterator[Kind]:
    """The kinds of matches to measure; all keys belong to segments that the daemon holds. They vary the keys per call,
    the number of client processes that call at the same time, and the number of segments in the daemon. The client
    processes are started during the iteration and end when `stack` is closed."""

    def matching(daemon: GrowthDaemon, keys: int) -> Callable[[], list[float]]:
        client = Matching(daemon.pool, daemon.segments, seed=1)
        return lambda: client.run(keys, _calls(keys))

    middle = daemons[HELD]
    for keys in KEYS:
        yield Kind("match, keys per call", f"match_{keys}", keys, middle, matching(middle, keys))
    threads = ThreadPoolExecutor(max(clients))
    stack.callback(threads.shutdown)
    workers: list[Worker] = []
    for count in clients:
        while len(workers) < count:
            worker = Worker("tokenlake_bench.growth.client", str(middle.socket), str(HELD), str(len(workers)))
            workers.append(stack.enter_context(closing(worker)))
        run = partial(_together, threads, tuple(workers))
        yield Kind("match, client processes", f"match_{MIDDLE}_by_{count}", MIDDLE, middle, run, together=True)
    for number in segments:
        daemon = daemons[number]
        yield Kind("match, segments held", f"match_{MIDDLE}_of_{number}", MIDDLE, daemon, matching(daemon, MIDDLE))


def stores(daemons: Mapping[int, GrowthDaemon], segments: Sequence[int]) -> Iterator[Kind]:
    """The kinds of stores to measure. They vary the keys per call and the number of segments in the daemon. Each call
    stores new segments and displaces as many others, because the daemons are full."""
    fresh = itertools.count()

    def storing(daemon: GrowthDaemon, keys: int) -> Callable[[], list[float]]:
        return lambda: [_store(daemon, keys_of("fresh", next(fresh), keys)) for _ in range(_calls(keys))]

    middle = daemons[HELD]
    for keys in KEYS:
        yield Kind("store, keys per call", f"store_{keys}", keys, middle, storing(middle, keys))
    for number in segments:
        yield Kind(
            "store, segments held",
            f"store_{MIDDLE}_into_{number}",
            MIDDLE,
            daemons[number],
            storing(daemons[number], MIDDLE),
        )


def _calls(keys: int) -> int:
    return max(FEWEST_CALLS, min(MOST_CALLS, KEYS_PER_TURN // keys))


def _store(daemon: GrowthDaemon, keys: Sequence[SegmentKey]) -> float:
    began = time.perf_counter()
    store(daemon.pool, keys)
    return time.perf_counter() - began


def _together(threads: ThreadPoolExecutor, workers: Sequence[Worker]) -> list[float]:
    """Make `CLIENT_CALLS` matches at one daemon, divided among the client processes, but at least a few per client, all
    clients at the same time. Returns the seconds of each call."""
    calls = max(FEWEST_CALLS, CLIENT_CALLS // len(workers))
    parts = threads.map(lambda worker: worker.call("run", keys=MIDDLE, calls=calls), workers)
    return [took for part in parts for took in part]


def measure(kinds: Sequence[Kind], rounds: int, title: str, console: Console) -> list[Row]:
    """Measure all kinds of calls alternately, `rounds` times, so that other work on the machine affects all of them
    alike. Returns a row of the JSON for each kind."""
    taken: dict[str, Taken] = defaultdict(Taken)
    with LiveProgress(console, title, rounds + WARM_TURNS) as progress:
        for turn in range(rounds + WARM_TURNS):
            for kind in kinds:
                used, began = kind.daemon.processor_s(), time.perf_counter()
                calls = kind.run()
                passed, used = time.perf_counter() - began, kind.daemon.processor_s() - used
                if turn >= WARM_TURNS:
                    taken[kind.name].calls += calls
                    taken[kind.name].per_key.append(passed / kind.keys / len(calls))
                    taken[kind.name].daemon_per_key.append(used / kind.keys / len(calls))
            progress.update(turn + 1, "")
    cheapest: dict[str, tuple[float, float]] = {}
    return [row_of(kind, taken[kind.name], cheapest) for kind in kinds]


def row_of(kind: Kind, taken: Taken, cheapest: dict[str, tuple[float, float]]) -> Row:
    """The row of the JSON for a kind of call with the times `taken`. `cheapest`: per series, the least costs of a key
    (wall time, processor time of the daemon) in the rows so far; the costs of this row are added to it."""
    p50, p99 = np.quantile(taken.calls, (0.5, 0.99)).tolist()
    costs = taken.per_key if kind.together else [took / kind.keys for took in taken.calls]
    per_key, daemon_per_key = float(np.quantile(costs, UNDISTURBED)), median(taken.daemon_per_key)
    base, daemon_base = cheapest.get(kind.series, (per_key, daemon_per_key))
    cheapest[kind.series] = min(base, per_key), min(daemon_base, daemon_per_key)
    return Row(
        series=kind.series,
        name=kind.name,
        p50_us=p50 * 1e6,
        p99_us=p99 * 1e6,
        us_per_key=per_key * 1e6,
        daemon_us_per_key=daemon_per_key * 1e6,
        ratio=per_key / base,
        daemon_ratio=daemon_per_key / daemon_base,
    )
