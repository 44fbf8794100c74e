"""`tokenlake bench restart --kept-memory`: a large node, and nodes under load, whose daemons end and come back while a
keeper holds their memory."""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from tokenlake.config.values import parse_size
from tokenlake.errors import ConfigurationError, TokenLakeError, Unreachable
from tokenlake.identity import SegmentKey
from tokenlake_bench.conversations import Conversations
from tokenlake_bench.daemons import PATIENT
from tokenlake_bench.load import Answer, Load, hit_rate, ideal_rate
from tokenlake_bench.payload import PayloadIdentity, fill, wrong_bytes
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_duration, format_share, output, table, write_json
from tokenlake_bench.restart import LAYOUT as SMALL
from tokenlake_bench.restart import RATE, WARM
from tokenlake_bench.sizing import layout_of
from tokenlake_client import Deadlines, Lease, Pool
from tokenlake_testing.cluster import Cluster, Node

SEGMENT_TOKENS: Final = 256
LARGE: Final = layout_of("tokenlake-bench", SEGMENT_TOKENS, 64, layers=16)
"""Segments of 1 MiB."""
KEEP_S: Final = "600"
PROMPT: Final = 64
"""Segments of a prompt of the large node."""
HELD: Final = 4
"""Prompts that an engine has leased and mapped over all restarts."""
SIGNALS: Final = ("SIGTERM", "SIGKILL")
DEADLINES: Final = Deadlines(call_s=2.0, match_s=2.0)
PAUSE_S: Final = 0.005
LIMIT_S: Final = 120.0
READY: Final = re.compile(r"is ready after ([0-9.]+) s")
MEMORY, REGION = "16MiB", "1MiB"
"""Of each of the three nodes, whose open conversations fit: what is not found again was lost."""


@dataclass(frozen=True, kw_only=True)
class KeptRestartArguments:
    """Arguments of the command. Raises ConfigurationError for a value out of range."""

    nodes: int = 3
    requests: int = 120
    seed: int = 0
    memory: str = "8GiB"
    json_file: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 16:
            raise ConfigurationError("nodes", self.nodes, "1 to 16")
        if self.requests < 1:
            raise ConfigurationError("requests", self.requests, "at least 1")
        if self.nbytes < 256 << 20:
            raise ConfigurationError("memory", self.memory, "at least 256MiB")

    @property
    def nbytes(self) -> int:
        """The memory of the large node."""
        return parse_size(self.memory)


class LargeRestart(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the large node. Times are from the start of the process; `end_s`: from the signal to its end.

    `own_s`: the daemon is ready, by its log, which does not count the start of the interpreter. `serves_s`: an engine
    can connect. `hit_s`: it reads a segment that was there before. `back_s`: an engine that was
    connected before, and holds leases, is connected again. `all_s`: all segments are served, and all memory is ready.
    `shmem_*`: shared memory of the machine, less that before the first start. `daemon_bytes`, `keeper_bytes`: resident
    memory that these processes do not share.
    """

    signal: str
    segments: int
    found: int
    wrong_bytes: int
    end_s: float
    own_s: float
    serves_s: float
    hit_s: float | None
    back_s: float | None
    all_s: float
    shmem_before: int
    shmem_down: int
    shmem_peak: int
    shmem_after: int
    daemon_bytes: int
    keeper_bytes: int


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """One restart of one of the nodes under load. Hit rates are hit tokens / prompt tokens; `during`: of the requests
    that were answered from the signal until the node was ready; `ideal_*`: those of a cache that forgets nothing."""

    signal: str
    node: str
    before: float
    during: float
    after: float
    ideal_before: float
    ideal_during: float
    ideal_after: float
    down_s: float
    failures: int


class KeptRestartResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench restart --kept-memory`. `failures`: calls of engines that ended without an answer,
    because the daemon ended."""

    memory: int
    large: list[LargeRestart]
    upgrades: list[Upgrade]
    failures: int
    wrong_bytes: int
    seed: int


def run_kept_restart(arguments: KeptRestartArguments, console: Console | None = None) -> KeptRestartResult:
    """Run both parts and print the tables. Raises TokenLakeError: `Unreachable` where a daemon does not end or start,
    and after the tables where bytes differ."""
    console = console or output()
    large = _large(arguments)
    upgrades, failures, wrong = _upgrades(arguments)
    result = KeptRestartResult(
        memory=arguments.nbytes,
        large=large,
        upgrades=upgrades,
        failures=failures,
        wrong_bytes=wrong + sum(each.wrong_bytes for each in large),
        seed=arguments.seed,
    )
    console.print(_large_table(result))
    console.print(_upgrade_table(result))
    write_json(result, arguments.json_file)
    if result.wrong_bytes:
        raise Unreachable(f"{result.wrong_bytes} bytes differ")
    return result


# -- a large node


@dataclass
class _Stored:
    """The segments of the large node, by prompt."""

    keys: list[list[SegmentKey]] = field(default_factory=list)
    digests: dict[SegmentKey, bytes] = field(default_factory=dict)


def _large(arguments: KeptRestartArguments) -> list[LargeRestart]:
    cluster = Cluster(1, arguments.memory, f"{max(64 << 20, arguments.nbytes // 64)}", keep_s=KEEP_S, **PATIENT)
    cluster.deadlines = DEADLINES
    node, base = cluster.nodes[0], _shmem()
    found: list[LargeRestart] = []
    with LiveProgress("a large node", 4) as progress:
        node.start()
        first = _Start(cluster, node, None, base)
        try:
            with cluster.connect(0, LARGE) as pool:
                found.append(first.measured("first start", None, 0.0, base, base))
                progress.update(1, "an engine fills the memory")
                stored = _store(pool, arguments)
                leases = [pool.match(stored.keys[at], deadline_s=2.0) for at in range(HELD)]
                arrays = [lease.fetch() for lease in leases]
                for done, signal in enumerate(SIGNALS, 2):
                    found.append(_restart(cluster, node, pool, stored, signal, base))
                    held = zip(leases, arrays, strict=True)
                    wrong = sum(_wrong_of(lease, views, stored) for lease, views in held)
                    found[-1] = msgspec.structs.replace(found[-1], wrong_bytes=found[-1].wrong_bytes + wrong)
                    progress.update(done, f"{signal}: {found[-1].found:,} of {found[-1].segments:,} found")
                del arrays
        finally:
            cluster.close()
    return found


def _wrong_of(lease: Lease, arrays: list[np.ndarray], stored: _Stored) -> int:
    pairs = zip(lease.keys, arrays, strict=True)
    return sum(wrong_bytes(array, stored.digests[key]) for key, array in pairs)


def _store(pool: Pool, arguments: KeptRestartArguments) -> _Stored:
    """Store prompts until 95 % of the memory holds segments."""
    stored = _Stored()
    identity = PayloadIdentity(arguments.seed, "default", LARGE.fingerprint())
    draw = np.random.default_rng(arguments.seed)
    for _ in range(int(0.95 * arguments.nbytes) // (LARGE.segment_bytes * PROMPT)):
        tokens = draw.integers(0, 1 << 17, PROMPT * SEGMENT_TOKENS, dtype=np.uint32)
        keys = pool.prefix(tokens).keys
        digests = identity.digests(tokens, SEGMENT_TOKENS)
        pool.store_all(keys, lambda index, slot, digests=digests: fill(slot, digests[index]), patience=5.0)  # type: ignore[misc]
        stored.keys.append(list(keys))
        stored.digests.update(zip(keys, digests, strict=True))
    return stored


def _restart(cluster: Cluster, node: Node, pool: Pool, stored: _Stored, signal: str, base: int) -> LargeRestart:
    before = _shmem()
    here = 0
    for keys in stored.keys:
        with pool.match(keys, deadline_s=2.0) as lease:
            here += lease.hits
    began = time.monotonic()
    if signal == "SIGKILL":
        node.kill()
    elif node.stop(LIMIT_S):
        raise Unreachable(f"{node.name} ended: {node.log.read_text()[-2000:]}")
    end_s, down = time.monotonic() - began, _shmem()
    started = _Start(cluster, node, pool, base, stored.keys[-1][:1])
    result = started.measured(signal, pool, end_s, before, down)
    found = wrong = 0
    for keys in stored.keys:
        with pool.match(keys, deadline_s=2.0) as lease:
            arrays = lease.fetch()
            found += len(arrays)
            wrong += sum(
                wrong_bytes(array, stored.digests[key]) for key, array in zip(lease.keys, arrays, strict=False)
            )
            del arrays
    return msgspec.structs.replace(result, segments=here, found=found, wrong_bytes=wrong)


class _Start:
    """Measures the start of the large node, which begins with this object."""

    def __init__(
        self, cluster: Cluster, node: Node, pool: Pool | None, base: int, key: list[SegmentKey] | None = None
    ) -> None:
        self._node, self._base = node, base
        self._peak = 0
        self._ended = threading.Event()
        self._back_s: float | None = None
        self._pool = pool
        self._began = time.monotonic()
        if not node.running:
            node.start()
        threads = [threading.Thread(target=self._watch_memory)]
        if pool is not None:
            threads.append(threading.Thread(target=self._watch_engine))
        for thread in threads:
            thread.start()
        try:
            self.serves_s, self.hit_s = self._first(cluster, key)
            self._ready()
            self.all_s = time.monotonic() - self._began
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def _first(self, cluster: Cluster, key: list[SegmentKey] | None) -> tuple[float, float | None]:
        while True:
            with suppress(TokenLakeError):
                pool = Pool.connect(self._node.socket, LARGE, deadlines=cluster.deadlines)
                break
            if not self._node.running or time.monotonic() > self._began + LIMIT_S:
                raise Unreachable(f"{self._node.name} does not serve: {self._node.log.read_text()[-2000:]}")
            time.sleep(PAUSE_S)
        with pool:
            serves_s = time.monotonic() - self._began
            while key is not None and time.monotonic() < self._began + LIMIT_S:
                with pool.match(key, deadline_s=2.0) as lease:
                    if lease.fetch():
                        return serves_s, time.monotonic() - self._began
        return serves_s, None

    def _ready(self) -> None:
        while time.monotonic() < self._began + LIMIT_S:
            with suppress(OSError):
                metrics = self._node.metrics()
                waits = ("tokenlake_unprepared_bytes", "tokenlake_unchecked_segments")
                if not any(metrics.get(name) for name in waits):
                    return
            time.sleep(PAUSE_S)
        raise Unreachable(f"{self._node.name} is not ready: {self._node.log.read_text()[-2000:]}")

    def _watch_memory(self) -> None:
        while not self._ended.wait(0.01):
            self._peak = max(self._peak, _shmem())

    def _watch_engine(self) -> None:
        assert self._pool is not None
        while not self._ended.wait(PAUSE_S) or self._back_s is None:
            if self._back_s is None and self._pool.connected:
                self._back_s = time.monotonic() - self._began
            if time.monotonic() > self._began + LIMIT_S:
                return

    def measured(self, signal: str, pool: Pool | None, end_s: float, before: int, down: int) -> LargeRestart:
        """What was measured, without segments."""
        assert self._node.process is not None
        return LargeRestart(
            signal=signal,
            segments=0,
            found=0,
            wrong_bytes=0,
            end_s=end_s,
            own_s=float((READY.findall(self._node.log.read_text()) or ["0"])[-1]),
            serves_s=self.serves_s,
            hit_s=self.hit_s,
            back_s=self._back_s,
            all_s=self.all_s,
            shmem_before=before - self._base,
            shmem_down=down - self._base,
            shmem_peak=max(self._peak, down) - self._base,
            shmem_after=_shmem() - self._base,
            daemon_bytes=_private(self._node.process.pid),
            keeper_bytes=_private(_keeper(self._node)),
        )


def _shmem() -> int:
    """Bytes of shared memory of this machine, that of memfds among it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


def _private(pid: int) -> int:
    """Bytes of memory that a process shares with no other one."""
    if not pid:
        return 0
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Dirty:", "Swap:")))


def _keeper(node: Node) -> int:
    """The process that keeps the memory of a node; 0 for none."""
    path = str(node.socket).removesuffix(".sock") + ".keeper"
    for directory in Path("/proc").iterdir():
        with suppress(OSError):
            words = (directory / "cmdline").read_bytes().split(b"\0")
            if path.encode() in words and b"--listening" in words:
                return int(directory.name)
    return 0


# -- nodes under load


def _upgrades(arguments: KeptRestartArguments) -> tuple[list[Upgrade], int, int]:
    cluster = Cluster(arguments.nodes, MEMORY, REGION, keep_s=KEEP_S, **PATIENT)
    cluster.deadlines = Deadlines(call_s=2.0)
    source, found = Conversations(arguments.seed, arguments.nodes, SMALL), list[Upgrade]()
    plan = [(signal, node) for signal in SIGNALS for node in cluster.nodes]
    sockets = [node.socket for node in cluster.nodes]
    with (
        LiveProgress("upgrades", len(plan)) as progress,
        cluster,
        Load(sockets, SMALL, source, arguments.seed, RATE, cluster.deadlines) as load,
    ):
        progress.update(0, "the engines fill the memory")
        load.next(WARM * arguments.nodes)
        for done, (signal, node) in enumerate(plan, 1):
            found.append(_upgrade(cluster, load, node, signal, arguments.requests))
            progress.update(done, f"{signal} of {node.name}: hits {format_share(found[-1].after)}")
        return found, load.failures, load.wrong_bytes


def _upgrade(cluster: Cluster, load: Load, node: Node, signal: str, requests: int) -> Upgrade:
    before = load.next(requests)
    first, failures, began = len(load.answers), load.failures, load.at_s
    if signal == "SIGKILL":
        node.kill()
    elif node.stop():
        raise Unreachable(f"{node.name} ended: {node.log.read_text()[-2000:]}")
    node.start()
    cluster.wait_ready()
    down_s = load.at_s - began
    during: list[Answer] = load.answers[first:]
    after = load.next(requests)
    return Upgrade(
        signal=signal,
        node=node.name,
        before=hit_rate(before),
        during=hit_rate(during),
        after=hit_rate(after),
        ideal_before=ideal_rate(before),
        ideal_during=ideal_rate(during),
        ideal_after=ideal_rate(after),
        down_s=down_s,
        failures=load.failures - failures,
    )


def _large_table(result: KeptRestartResult) -> Table:
    def seconds(value: float | None) -> str:
        return "" if value is None else format_duration(value)

    return table(
        f"a node of {result.memory >> 30} GiB; shared memory in GiB: before, without a daemon, at most, after",
        (
            "",
            "end",
            "ready, by its log",
            "serves",
            "first hit",
            "engine back",
            "all",
            "found",
            "shared memory",
            "daemon",
            "keeper",
        ),
        [
            (
                each.signal,
                seconds(each.end_s),
                seconds(each.own_s),
                seconds(each.serves_s),
                seconds(each.hit_s),
                seconds(each.back_s),
                seconds(each.all_s),
                f"{each.found:,} of {each.segments:,}" if each.segments else "",
                " ".join(
                    f"{nbytes / (1 << 30):.2f}"
                    for nbytes in (each.shmem_before, each.shmem_down, each.shmem_peak, each.shmem_after)
                ),
                f"{each.daemon_bytes >> 20} MiB",
                f"{each.keeper_bytes >> 20} MiB",
            )
            for each in result.large
        ],
        f"wrong bytes: {result.wrong_bytes}",
    )


def _upgrade_table(result: KeptRestartResult) -> Table:
    return table(
        "nodes under load: hits before, while the node restarted, and after; in brackets a cache that forgets nothing",
        ("", "before", "during", "after", "down", "failed calls"),
        [
            (
                f"{each.signal} {each.node}",
                f"{format_share(each.before)} ({format_share(each.ideal_before)})",
                f"{format_share(each.during)} ({format_share(each.ideal_during)})",
                f"{format_share(each.after)} ({format_share(each.ideal_after)})",
                format_duration(each.down_s),
                str(each.failures),
            )
            for each in result.upgrades
        ],
        f"failed calls: {result.failures}",
    )
