"""Bytes that each daemon sends to other nodes, per window of trace time (a fixed number of seconds).

The daemons' counters are read once per window, when no segment is being written.
"""

from __future__ import annotations

import math
import time
from typing import Final

from tokenlake_bench.balance import WINDOW_S, SendLog
from tokenlake_testing.cluster import Cluster

SETTLE_S: Final = 10.0
PAUSE_S: Final = 0.002
SENT_BYTES: Final = "tokenlake_sent_bytes_total"
SENT_TO_READERS: Final = "tokenlake_sent_to_readers_segments_total"


class LoadMeter:
    """Logs the bytes that each node sends, from the daemons' counters. `sent`: all bytes to other nodes.
    `sent_to_readers`: those among them that were for an engine of the other node; the others were handed over to a new
    owner. The counters do not say which nodes had copies."""

    def __init__(self, cluster: Cluster, segment_bytes: int, window_s: float = WINDOW_S) -> None:
        self.sent = SendLog(len(cluster.nodes))
        self.sent_to_readers = SendLog(len(cluster.nodes))
        self._cluster = cluster
        self._segment_bytes = segment_bytes
        self._window_s = window_s
        self._window = -1
        self._known = [(0, 0)] * len(cluster.nodes)

    def at(self, at_s: float) -> None:
        """Set the trace time to which the bytes sent from now on are attributed. It must not decrease."""
        window = math.floor(at_s / self._window_s)
        if window != self._window:
            self.close_window()
            self._window = window

    def close_window(self) -> None:
        """Read the daemons' counters and log the bytes of the present time window. `at` calls this when the next window
        begins; the caller calls it after the last request."""
        if self._window < 0:
            return
        settle(self._cluster)
        at_s = self._window * self._window_s
        for number, node in enumerate(self._cluster.nodes):
            metrics = node.metrics()
            known = int(metrics[SENT_BYTES]), int(metrics[SENT_TO_READERS]) * self._segment_bytes
            for log, now, before in zip((self.sent, self.sent_to_readers), known, self._known[number], strict=True):
                log.add(at_s, number, now - before)
            self._known[number] = known


def settle(cluster: Cluster) -> bool:
    """Wait until no node of the cluster has a segment that is being written. Returns False when that takes longer than
    `SETTLE_S`."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        totals = cluster.totals()
        dirty = [value for name, value in totals.items() if name.startswith("tokenlake_segments{") and "dirty" in name]
        if not any(dirty):
            return True
        time.sleep(PAUSE_S)
    return False
