"""What the simulated arenas were read for, and the extra copies that were made of hot segments."""

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
    """Segments read in one window."""

    from_s: float
    mean: float
    """Per node."""
    max_over_mean: float
    cv: float


class Meter:
    """A read is counted where the bytes lay: by the engine of that node, or sent to be read elsewhere. What another
    node pulls to keep it (a push, a replica) is no read. Times are of the workload."""

    def __init__(self, nodes: int, segment_bytes: int, begins_s: float) -> None:
        """`begins_s`: of the clock, when the workload's time is 0."""
        self._nodes = nodes
        self._segment_bytes = segment_bytes
        self._begins_s = begins_s
        self._at_s = array("d")
        self._node = array("q")
        self._reader = array("q")
        self._segment = array("q")
        self.replicas_made = array("d")
        """When each began."""

    def read(self, now: float, node: int, reader: int, keys: bytes) -> None:
        """From the arena of `node`, by the engine of `reader`."""
        count = len(keys) // KEY_BYTES
        # A key is uniform: 8 bytes of it tell segments apart.
        self._segment.frombytes(np.frombuffer(keys, dtype="<i8")[:: KEY_BYTES // 8].tobytes())
        self._at_s.extend([now - self._begins_s] * count)
        self._node.extend([node] * count)
        self._reader.extend([reader] * count)

    def replicated(self, now: float, segments: int) -> None:
        """So many extra copies of hot segments begin to travel."""
        self.replicas_made.extend([now - self._begins_s] * segments)

    def log(self, start_s: float, stop_s: float) -> ReadLog:
        """The reads of this time, by the node they were from."""
        return self._log(start_s, stop_s, np.array(self._node), np.ones(len(self._node), dtype=np.bool_))

    def log_of_readers(self, start_s: float, stop_s: float) -> ReadLog:
        """The same, by the node whose engine read: as even as the requests are."""
        return self._log(start_s, stop_s, np.array(self._reader), np.ones(len(self._node), dtype=np.bool_))

    def log_of_sent(self, start_s: float, stop_s: float) -> ReadLog:
        """The reads by engines of other nodes alone, by the node they were from."""
        node = np.array(self._node)
        return self._log(start_s, stop_s, node, node != np.array(self._reader))

    def at_best(self, start_s: float, stop_s: float) -> Spread:
        """The spread, were what travelled in each window read from the nodes with least to do, and what engines read at
        their own nodes read there all the same: no choice of copies gets below this."""
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
        """Each window from time 0 on, the last one as far as it went."""
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
    """`own` with `more` poured in where it is lowest: max(own, level), the sum of which is that of both."""
    ascending = np.sort(own).astype(np.float64)
    counts = np.arange(1, len(own) + 1)
    levels = (np.cumsum(ascending) + more) / counts
    # The level of the first k nodes is right when it does not reach the next one.
    following = np.append(ascending[1:], np.inf)
    level: np.float64 = levels[np.argmax(levels <= following)]
    return np.maximum(own.astype(np.float64), level)
