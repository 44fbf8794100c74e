"""Load of nodes and of engine instances per window of time.

The load of a node is the bytes of segments that it sends to other nodes. An engine that reads a segment in the arena of
its own node costs no other node anything: such reads are no load. The spread over the nodes is computed in each window
(coefficient of variation with the population deviation; largest over mean) and averaged over the windows, each weighted
by its sum, so that windows with little load count less than busy ones. A node that sends nothing counts as 0.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WINDOW_S: Final = 10.0


class SendLog:
    """A log of bytes sent from node to node, in any order of time. `nodes` is the number of nodes, which are numbered
    from 0."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._at_s = array("d")
        self._node = array("q")
        self._nbytes = array("q")

    def add(self, at_s: float, node: int, nbytes: int) -> None:
        """Add `nbytes` that `node` sent at `at_s` seconds of trace time."""
        if not 0 <= node < self.nodes:
            raise IndexError(f"node {node} of {self.nodes}")
        self._at_s.append(at_s)
        self._node.append(node)
        self._nbytes.append(nbytes)

    def totals(self) -> list[int]:
        """Total bytes that each node sent, by node."""
        node, nbytes = np.array(self._node, np.int64), np.array(self._nbytes, np.int64)
        return [int(nbytes[node == each].sum()) for each in range(self.nodes)]

    def busiest(self, from_s: float) -> tuple[float, int] | None:
        """The largest load of a node in the window that begins at `from_s`: divided by the mean over the nodes, and in
        bytes; None where no node sent anything."""
        node, at_s = np.array(self._node, np.int64), np.array(self._at_s)
        within = (at_s >= from_s) & (at_s < from_s + WINDOW_S)
        loads = np.bincount(node[within], np.array(self._nbytes)[within], self.nodes)
        return (float(loads.max() / loads.mean()), int(loads.max())) if loads.any() else None

    def table(self) -> NDArray[np.float64]:
        """Bytes sent per time window and node. Windows in which no node sent anything are left out."""
        numbers, window = np.unique(np.floor(np.array(self._at_s) / WINDOW_S), return_inverse=True)
        places = window.astype(np.int64) * self.nodes + np.array(self._node, np.int64)
        cells = np.bincount(places, weights=np.array(self._nbytes), minlength=len(numbers) * self.nodes)
        return cells.astype(np.float64).reshape(len(numbers), self.nodes)


class BusyLog:
    """A log of the seconds in which engine instances compute, by window of time. `instances` is their number; they are
    numbered from 0."""

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.total_s = 0.0
        """Seconds of computing, summed over all instances."""
        self._cells: dict[int, list[float]] = {}

    def add(self, instance: int, from_s: float, to_s: float) -> None:
        """Add the time span of one step (forward pass) of an instance; the steps of one instance must not overlap."""
        self.total_s += to_s - from_s
        for window in range(math.floor(from_s / WINDOW_S), math.floor(to_s / WINDOW_S) + 1):
            part_s = min(to_s, (window + 1) * WINDOW_S) - max(from_s, window * WINDOW_S)
            if part_s > 0:
                self._cells.setdefault(window, [0.0] * self.instances)[instance] += part_s

    def table(self) -> NDArray[np.float64]:
        """Seconds of computing per time window and instance. Windows in which no instance computes are left out."""
        return np.array([self._cells[window] for window in sorted(self._cells)]).reshape(-1, self.instances)


@dataclass(frozen=True, slots=True)
class Spread:
    """Measure of how unevenly the load is spread over nodes: the coefficient of variation, and the largest load divided
    by the mean. 0 and 1 when all nodes have equal load; None where no node has any."""

    cv: float | None
    max_over_mean: float | None


def spread(table: NDArray[np.float64]) -> Spread:
    """The spread over the nodes or instances of a table that has one row per time window and one column per node or
    instance."""
    total = float(table.sum())
    if total == 0:
        return Spread(cv=None, max_over_mean=None)
    # The weighted mean over the windows needs no division per window: coefficient of variation times weight is
    # (deviation / mean) x (mean x nodes) = deviation x nodes.
    nodes = table.shape[1]
    return Spread(
        cv=float(table.std(axis=1).sum()) * nodes / total,
        max_over_mean=float(table.max(axis=1).sum()) * nodes / total,
    )
