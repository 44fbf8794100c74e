"""Reads of each node's arena, window by window of trace time.

A local read is counted by the client that made it. A read for another node is counted by the daemon that sent the
bytes; transfers of primary copies and replicas are not reads. The daemons' counters are read once per window, when no
transfer between nodes is under way.
"""

from __future__ import annotations

import math
import time
from typing import Final

from tokenlake_bench.balance import WINDOW_S, ReadLog
from tokenlake_testing.cluster import Cluster

__all__ = ["LoadMeter", "settle"]

SETTLE_S: Final = 10.0
PAUSE_S: Final = 0.002


class LoadMeter:
    """Counts the reads. `served`: reads per node whose arena was read, without regard to segments. `read`: the same
    reads per segment, as if node 0 had served all."""

    def __init__(self, cluster: Cluster, segment_bytes: int, window_s: float = WINDOW_S) -> None:
        self.served = ReadLog(len(cluster.nodes))
        self.read = ReadLog(len(cluster.nodes))
        self._cluster = cluster
        self._segment_bytes = segment_bytes
        self._window_s = window_s
        self._window = -1
        self._local = [0] * len(cluster.nodes)
        self._sent = [0] * len(cluster.nodes)

    def at(self, at_s: float) -> None:
        """Set the trace time of the next reads, which must not decrease."""
        window = math.floor(at_s / self._window_s)
        if window != self._window:
            self.close_window()
            self._window = window

    def add(self, at_s: float, node: int, segments: list[int], remote: int) -> None:
        """A request at `node` read `segments`, of which `remote` came from other nodes."""
        self._local[node] += len(segments) - remote
        for segment in segments:
            self.read.add(at_s, 0, segment, self._segment_bytes)

    def close_window(self) -> None:
        """Read the daemons' counters and end the window. Called when the next window begins, and by the caller after
        the last read."""
        if self._window < 0:
            return
        settle(self._cluster)
        at_s = self._window * self._window_s
        for number, node in enumerate(self._cluster.nodes):
            metrics = node.metrics()
            sent = int(metrics["tokenlake_sent_to_readers_segments_total"])
            count = self._local[number] + sent - self._sent[number]
            self.served.add(at_s, number, 0, count * self._segment_bytes)
            self._sent[number] = sent
        self._local = [0] * len(self._local)


def settle(cluster: Cluster) -> bool:
    """Wait until no segment is being written or sent to its owner. Returns False when that takes longer than
    `SETTLE_S`."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        totals = cluster.totals()
        dirty = [value for name, value in totals.items() if name.startswith("tokenlake_segments{") and "dirty" in name]
        if not any(dirty):
            return True
        time.sleep(PAUSE_S)
    return False
