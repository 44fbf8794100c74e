"""The daemons of benchmarks: their certificates, deadlines with which a busy machine changes no result, and the bytes
that they send."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_bench.balance import WINDOW_S, SendLog
from tokenlake_client import Pool
from tokenlake_server.ca import init_ca, issue
from tokenlake_testing.cluster import Cluster, Node

PATIENT: Final = {"match_deadline_ms": "1000", "suspect_ms": "5000"}
"""Settings with which delays of a busy machine do not change the hits."""
SETTLE_S: Final = 10.0
PAUSE_S: Final = 0.002
SENT_BYTES: Final = "tokenlake_sent_bytes_total"
SENT_TO_READERS: Final = "tokenlake_sent_to_readers_segments_total"
EVICTED: Final = "tokenlake_evicted_segments_total"
BATCH: Final = 1024
"""Number of keys per match when the copies of segments are counted."""


class Authority:
    """A new authority for the nodes of `cluster`, in a directory that must not have one."""

    def __init__(self, directory: Path, cluster: str) -> None:
        self._directory = directory
        self._file, _ = init_ca(directory, cluster)

    def certify(self, node: Node) -> None:
        """Give a node that was not started its certificate."""
        certificate, key = issue(self._directory, node.name)
        node.settings |= {"certificate": str(certificate), "key": str(key), "ca": str(self._file)}


class LoadMeter:
    """Logs the bytes that each node sends, per window of trace time, from the daemons' counters. `sent`: all bytes to
    other nodes. `sent_to_readers`: those among them that were for an engine of the other node; the others were handed
    over to a new owner. The counters do not say which nodes had copies."""

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


def copies_per_segment(pools: Sequence[Pool], keys: Iterable[SegmentKey], match_s: float = 1.0) -> float:
    """Mean number of copies of those of `keys` (distinct, in any order) that some node holds; 0 if there are none.

    `pools`: one client per node. Call it when no transfer between nodes is under way. The segments that it finds count
    as accessed. `match_s`: deadline of a match by the nodes' clocks.
    """
    distinct = list(keys)
    copies: Counter[SegmentKey] = Counter()
    for pool in pools:
        for start in range(0, len(distinct), BATCH):
            batch = distinct[start : start + BATCH]
            with pool.match(batch, deadline_s=match_s) as lease:
                copies.update(key for key, code in zip(batch, lease.codes, strict=True) if code == Code.LOCAL)
    return copies.total() / len(copies) if copies else 0.0
