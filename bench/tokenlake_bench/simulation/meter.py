"""Bytes that simulated nodes send to each other, each with the nodes that could have sent it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.identity import SegmentKey, TenantId
from tokenlake.store import SegmentStore, State
from tokenlake_bench.balance import SendLog

__all__ = ["Meter"]


class Meter:
    """Logs each segment that a node sends. Times are those of the workload."""

    def __init__(self, stores: Sequence[SegmentStore], segment_bytes: int, begins_s: float) -> None:
        """`stores` by node; only read. `begins_s`: time of the clock at which the workload's time is 0."""
        self.log = SendLog(len(stores))
        self._stores = stores
        self._segment_bytes = segment_bytes
        self._begins_s = begins_s

    def read(self, now: float, node: int, reader: int, tenant: str, keys: Sequence[bytes]) -> None:
        """`node` sends these segments to an engine of node `reader`. The holders of each are the other nodes that have
        a READY copy now."""
        others = [(index, store.index(TenantId(tenant))) for index, store in enumerate(self._stores) if index != reader]
        ready = State.READY
        for key in map(SegmentKey, keys):
            holders = [
                index
                for index, segments in others
                if (segment := segments.get(key)) is not None and segment.state is ready
            ]
            self.log.add(now - self._begins_s, node, self._segment_bytes, tuple(holders))

    def handed_over(self, now: float, node: int, segments: int) -> None:
        """`node` sends as many segments to another node that becomes their owner."""
        self.log.add(now - self._begins_s, node, segments * self._segment_bytes)
