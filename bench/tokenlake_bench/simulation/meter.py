"""Reads of the simulated arenas over time."""

from __future__ import annotations

from array import array

import numpy as np

from tokenlake.keys import KEY_BYTES
from tokenlake_bench.balance import ReadLog

__all__ = ["Meter"]


class Meter:
    """A read is counted at the node whose arena the bytes were in, whether an engine of that node read them or another
    node fetched them for one of its engines. Transfers that hand segments over are not reads. Times are those of the
    workload."""

    def __init__(self, nodes: int, segment_bytes: int, begins_s: float) -> None:
        """`begins_s`: time of the clock at which the workload's time is 0."""
        self._nodes = nodes
        self._segment_bytes = segment_bytes
        self._begins_s = begins_s
        self._at_s = array("d")
        self._node = array("q")
        self._segment = array("q")

    def read(self, now: float, node: int, keys: bytes) -> None:
        """Count segments read from the arena of `node`."""
        count = len(keys) // KEY_BYTES
        # Keys are uniform: their first 8 bytes identify a segment.
        self._segment.frombytes(np.frombuffer(keys, dtype="<i8")[:: KEY_BYTES // 8].tobytes())
        self._at_s.extend([now - self._begins_s] * count)
        self._node.extend([node] * count)

    def log(self, start_s: float, stop_s: float) -> ReadLog:
        """The reads between two times, by the node whose arena was read."""
        at_s, node, segment = np.array(self._at_s), np.array(self._node), np.array(self._segment)
        chosen = (at_s >= start_s) & (at_s < stop_s)
        log = ReadLog(self._nodes)
        for row in zip(at_s[chosen].tolist(), node[chosen].tolist(), segment[chosen].tolist(), strict=True):
            log.add(*row, self._segment_bytes)
        return log
