"""Runs a workload on a simulated pool and measures hits, load and messages."""

from __future__ import annotations

import gc
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from tokenlake.core.cold import WRITTEN_BYTES as COLD_WRITTEN
from tokenlake.core.report.account import SUPPLIED, Source
from tokenlake.identity import SegmentKey
from tokenlake.memory import State
from tokenlake.memory.store import EVICTED as MEMORY_EVICTED
from tokenlake.metrics import Counters
from tokenlake.wire import Code
from tokenlake_bench.balance import Spread, spread
from tokenlake_bench.routing.outcome import ColdUse, DiskUse
from tokenlake_bench.simulation.arrivals import Arrival
from tokenlake_bench.simulation.cluster import SETTLE_S, EngineMaker, Route, SimulatedCluster
from tokenlake_bench.simulation.cold import ColdContent
from tokenlake_bench.simulation.engine import RequestOutcome, SimulatedEngine
from tokenlake_bench.simulation.options import SimulationOptions


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the finished requests of a simulated run. `remote_share`: share of the hits that came from other
    nodes; the others are reads from the engine's own node, which are no load. `load` is defined in `balance`.
    `bytes_moved`: of segments sent between nodes; `duplication`: copies per distinct segment at the end; messages are
    frames between nodes."""

    requests: int
    token_hit_rate: float
    remote_share: float
    load: Spread
    duplication: float
    bytes_moved: int
    messages_per_request: float
    processor_s: float


class Simulation:
    """One run of a workload on a simulated pool. `cluster` may be inspected afterwards."""

    def __init__(
        self, options: SimulationOptions, engine: EngineMaker = SimulatedEngine, cold: ColdContent | None = None
    ) -> None:
        """`cold`: as of `SimulatedCluster`."""
        self.options = options
        self.done = 0
        """Number of requests finished so far."""
        self.stored: Counter[Code] = Counter()
        self.cluster = SimulatedCluster(options, self._finished, engine, cold=cold)
        self._tokens = self._hits = self._remote = 0
        self._read_s = array("d")
        self._processor_s = 0.0

    def run(
        self,
        arrivals: Sequence[Arrival],
        progress: Callable[[int], None] = lambda done: None,
        route: Route | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        """Serve all requests on the simulated clock, as `SimulatedCluster.run` does. `progress` is called once per
        window of time with the number of finished requests."""

        def sample() -> None:
            progress(self.done)

        began = time.process_time()
        try:
            with _rare_collections():
                self.cluster.run(arrivals, sample, route, settle_s)
        finally:
            self._processor_s += time.process_time() - began

    def figures(self) -> Figures:
        """Figures of all requests that finished so far; the load is by all bytes sent."""
        cluster, done = self.cluster, max(1, self.done)
        return Figures(
            requests=self.done,
            token_hit_rate=self._hits * self.options.segment_tokens / max(1, self._tokens),
            remote_share=self.remote_share(),
            load=spread(cluster.sent.table()),
            duplication=_copies_per_segment(cluster),
            bytes_moved=cluster.network.nbytes,
            messages_per_request=cluster.network.messages.total() / done,
            processor_s=self._processor_s,
        )

    def remote_share(self) -> float:
        """Share of the hits that came from other nodes. A segment on disk or in the cold tier is fetched like one of
        another node, from the node itself."""
        own = (
            sum(_from(node.core.counters, Source.DISK, Source.COLD) for node in self.cluster.nodes)
            / self.options.segment_tokens
        )
        return max(0.0, self._remote - own) / max(1, self._hits)

    def read_s(self, quantile: float) -> float:
        """A quantile of the seconds from the match to the last byte of the prefix, over the requests that read
        something."""
        return float(np.quantile(np.array(self._read_s), quantile)) if self._read_s else 0.0

    def disk_use(self, seconds: float) -> DiskUse | None:
        """Use of the disks in a run of so many seconds; None without disks."""
        disks = [node.disk for node in self.cluster.nodes if node.disk is not None]
        if not disks:
            return None
        counters = [node.core.counters for node in self.cluster.nodes]
        written = sum(disk.written_bytes for disk in disks)
        evicted = sum(each[MEMORY_EVICTED] for each in counters) * self.options.layout.segment_bytes
        per_day = written * 86_400 / max(seconds, 1e-9)
        return DiskUse(
            tokens=sum(_from(each, Source.DISK) for each in counters),
            written_bytes=written,
            written_bytes_per_day=per_day,
            writes_per_day=per_day / sum(disk.capacity for disk in disks),
            written_share=written / max(1, evicted),
        )

    def cold_use(self, seconds: float) -> ColdUse | None:
        """Use of the cold tier in a run of so many seconds; None without one."""
        counters = [node.core.counters for node in self.cluster.nodes if node.cold is not None]
        if not counters:
            return None
        written = sum(sum(each.by_labels(COLD_WRITTEN).values()) for each in counters)
        evicted = sum(each[MEMORY_EVICTED] for each in counters) * self.options.layout.segment_bytes
        return ColdUse(
            tokens=sum(_from(each, Source.COLD) for each in counters),
            written_bytes=written,
            written_bytes_per_day=written * 86_400 / max(seconds, 1e-9),
            written_share=written / max(1, evicted),
        )

    def _finished(self, served: RequestOutcome) -> None:
        self.done += 1
        self._tokens += served.arrival.tokens
        self._hits += served.hits
        self._remote += served.remote
        self.stored += served.stored
        if served.hits:
            self._read_s.append(served.read_s)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Context in which Python collects garbage rarely. A simulated cluster consists of a few million long-lived
    objects; scanning them as often as Python does by default takes as long as the run itself."""
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def _copies_per_segment(cluster: SimulatedCluster) -> float:
    copies: Counter[SegmentKey] = Counter()
    for node in cluster.nodes:
        copies.update(segment.key for segment in node.store.segments() if segment.state is State.READY)
    return copies.total() / len(copies) if copies else 0.0


def _from(counters: Counters, *sources: Source) -> int:
    """The tokens that a node's engines read from these sources."""
    return sum(tokens for (_, source), tokens in counters.by_labels(SUPPLIED).items() if source in sources)
