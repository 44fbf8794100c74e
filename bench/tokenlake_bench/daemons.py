"""The daemons of benchmarks: settings with which a busy machine changes no result, and the end of their writes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from tokenlake_testing.cluster import Cluster

PATIENT: Final = {"match_deadline_ms": "1000", "suspect_ms": "5000"}
"""Settings with which delays of a busy machine do not change the hits."""
SETTLE_S: Final = 10.0
PAUSE_S: Final = 0.002
EVICTED: Final = "tokenlake_evicted_segments_total"


def sent_bytes(metrics: Mapping[str, float]) -> int:
    """Bytes of segments that the daemons with these metrics have sent to other nodes."""
    return int(sum(value for name, value in metrics.items() if name.startswith("tokenlake_sent_bytes_total")))


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
