"""Reads of the simulated arenas over time."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenlake.keys import KEY_BYTES
from tokenlake_bench.balance import WINDOW_S, ReadLog, Spread, spread

__all__ = ["Meter", "WindowLoad", "filled"]


@dataclass(frozen=True, slots=True)
class WindowLoad:
    """The segments read in one window."""

    from_s: float
    mean: float
    """Mean over the nodes."""
    max_over_mean: float
    cv: float


class Meter:
    """A read is counted at the node whose arena the bytes were in, whether an engine of that node read them or another
    node fetched them for one of its engines. Transfers that hand segments over are not reads. Times are those of
    the workload."""

    def __init__(self, nodes: int, segment_bytes: int, begins_s: float) -> None:
        """`begins_s`: time of the clock at which the workload's time is 0."""
        self._nodes = nodes
        self._segment_bytes = segment_bytes
        self._begins_s = begins_s
        self._at_s = array("d")
        self._node = array("q")
        self._reader = array("q")
        self._segment = array("q")

    def read(self, now: float, node: int, reader: int, keys: bytes) -> None:
        """Count segments read from the arena of `node` by an engine of node `reader`."""
        count = len(keys) // KEY_BYTES
        # Keys are uniform: their first 8 bytes identify a segment.
        self._segment.frombytes(np.frombuffer(keys, dtype="<i8")[:: KEY_BYTES // 8].tobytes())
        self._at_s.extend([now - self._begins_s] * count)
        self._node.extend([node] * count)
        self._reader.extend([reader] * count)

    def log(self, start_s: float, stop_s: float) -> ReadLog:
        """The reads between two times, by the node whose arena was read."""
        return self._log(start_s, stop_s, np.array(self._node), np.ones(len(self._node), dtype=np.bool_))

    def log_of_readers(self, start_s: float, stop_s: float) -> ReadLog:
        """The reads between two times, by the node whose engine read. This is as even as the requests are."""
        return self._log(start_s, stop_s, np.array(self._reader), np.ones(len(self._node), dtype=np.bool_))

    def log_of_sent(self, start_s: float, stop_s: float) -> ReadLog:
        """The reads that crossed the network between two times, by the node whose arena was read."""
        node = np.array(self._node)
        return self._log(start_s, stop_s, node, node != np.array(self._reader))

    def at_best(self, start_s: float, stop_s: float) -> Spread:
        """A lower bound of the spread for any placement of copies. Reads of an engine from its own node stay where they
        were; in each window all other reads are distributed to the least loaded nodes."""
        at_s, node, reader = np.array(self._at_s), np.array(self._node), np.array(self._reader)
        chosen = (at_s >= start_s) & (at_s < stop_s)
        window, own = np.floor(at_s[chosen] / WINDOW_S), (node == reader)[chosen]
        log = ReadLog(self._nodes)
        for at in np.unique(window):
            here = window == at
            read = np.bincount(node[chosen][here & own], minlength=self._nodes)
            for index, load in enumerate(filled(read, int((here & ~own).sum()))):
                log.add(float(at) * WINDOW_S, index, 0, round(float(load) * self._segment_bytes))
        return spread(log)

    def _log(self, start_s: float, stop_s: float, node: NDArray[np.int64], counted: NDArray[np.bool_]) -> ReadLog:
        at_s, segment = np.array(self._at_s), np.array(self._segment)
        chosen = (at_s >= start_s) & (at_s < stop_s) & counted
        log = ReadLog(self._nodes)
        for row in zip(at_s[chosen].tolist(), node[chosen].tolist(), segment[chosen].tolist(), strict=True):
            log.add(*row, self._segment_bytes)
        return log

    def windows(self, window_s: float = WINDOW_S) -> list[WindowLoad]:
        """The load of each window from time 0 on; the last window may be incomplete."""
        at_s, node = np.array(self._at_s), np.array(self._node)
        if not len(at_s):
            return []
        window = np.floor(at_s / window_s).astype(np.int64)
        count = int(window.max()) + 1
        table = np.bincount(window * self._nodes + node, minlength=count * self._nodes).reshape(count, self._nodes)
        means = table.mean(axis=1)
        whole = np.maximum(means, 1e-9)
        return [
            WindowLoad(
                at * window_s, float(means[at]), float(table[at].max() / whole[at]), float(table[at].std() / whole[at])
            )
            for at in range(count)
        ]


def filled(own: NDArray[np.int64], more: int) -> NDArray[np.float64]:
    """Distribute `more` over the lowest entries of `own` (water filling): the entries become max(own, level) for the
    one level at which their sum is that of `own` plus `more`."""
    ascending = np.sort(own).astype(np.float64)
    counts = np.arange(1, len(own) + 1)
    levels = (np.cumsum(ascending) + more) / counts
    # The level computed from the lowest k nodes is right when it does not exceed the next node's load.
    following = np.append(ascending[1:], np.inf)
    level: np.float64 = levels[np.argmax(levels <= following)]
    return np.maximum(own.astype(np.float64), level)
