"""Spread of the reads over the pool's nodes, and the floor that placement by hashing can reach.

The load of a node is the bytes of segments read from its arena, local reads included, per window of trace time. The
spread over nodes is computed in each window (coefficient of variation with the population deviation; largest over mean)
and averaged over windows, each weighted by its bytes, so that windows with few reads count less than busy ones. A node
without reads counts as 0.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import ConfigurationError
from tokenlake_bench.mixing import GOLDEN, WORD, key_of, mix64

__all__ = [
    "WINDOW_S",
    "ReadLog",
    "Spread",
    "floor",
    "floor_from",
    "load_of_nodes",
    "max_over_mean_from",
    "spread",
]

WINDOW_S: Final = 10.0

_PLACEMENTS: Final = 16


class ReadLog:
    """Reads of segments, in any order, 32 bytes each. `nodes` is the number of nodes; they count from 0.

    A segment is identified by any number, for instance its id in `baselines.Accesses`.
    """

    def __init__(self, nodes: int) -> None:
        if nodes < 1:
            raise ConfigurationError("nodes", nodes, "at least 1")
        self.nodes = nodes
        self._at_s = array("d")
        self._node = array("q")
        self._segment = array("q")
        self._size = array("q")

    def __len__(self) -> int:
        return len(self._node)

    def add(self, at_s: float, node: int, segment: int, nbytes: int) -> None:
        """Add one read of `nbytes` from the arena of `node` at `at_s` seconds of trace time."""
        if not 0 <= node < self.nodes:
            raise IndexError(f"node {node} of {self.nodes}")
        self._at_s.append(at_s)
        self._node.append(node)
        self._segment.append(segment)
        self._size.append(nbytes)

    def arrays(self) -> _ReadColumns:
        """The reads added so far, copied into arrays."""
        at_s, node, segment, size = (np.array(column) for column in (self._at_s, self._node, self._segment, self._size))
        return _ReadColumns(self.nodes, at_s, node, segment, size)


@dataclass(frozen=True, slots=True, eq=False)
class _ReadColumns:
    """Columns of equal length, one row per read."""

    nodes: int
    at_s: NDArray[np.float64]
    node: NDArray[np.int64]
    segment: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def windows(self, window_s: float) -> tuple[NDArray[np.int64], int]:
        """(window of each read, number of windows); windows without reads are left out."""
        if not 0 < window_s < math.inf:
            raise ConfigurationError("window_s", window_s, "a finite number of seconds above 0")
        numbers, window = np.unique(np.floor(self.at_s / window_s), return_inverse=True)
        return window.astype(np.int64), len(numbers)


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of the reads over nodes: coefficient of variation, and largest over mean. 0 and 1 when all nodes are read
    equally, and where nothing was read."""

    cv: float
    max_over_mean: float


def load_of_nodes(log: ReadLog) -> list[int]:
    """Bytes read from each node's arena over the whole log."""
    reads = log.arrays()
    return [int(reads.nbytes[reads.node == node].sum()) for node in range(log.nodes)]


def spread(log: ReadLog, window_s: float = WINDOW_S) -> Spread:
    """The spread of the reads over the nodes that served them."""
    reads = log.arrays()
    window, windows = reads.windows(window_s)
    return _spread(_table(window, windows, reads.node, reads.nbytes, reads.nodes))


def floor(log: ReadLog, seed: int, window_s: float = WINDOW_S) -> Spread:
    """The spread of the same reads with the ceil(n ln n) hottest segments spread evenly over all n nodes and the others
    hashed.

    Hottest is by bytes over the whole log; ties go to the smaller number. The result is the mean of 16 placements drawn
    by `seed`.
    """
    spreads = [_spread(table) for table in _fair_tables(log, seed, window_s)]
    return Spread(
        cv=sum(each.cv for each in spreads) / _PLACEMENTS,
        max_over_mean=sum(each.max_over_mean for each in spreads) / _PLACEMENTS,
    )


def max_over_mean_from(log: ReadLog, at_s: float, windows: int, window_s: float = WINDOW_S) -> list[float]:
    """Largest over mean in each of `windows` windows, the first of which begins at `at_s` (a multiple of `window_s`);
    fewer where the log ends earlier. Windows without reads are left out."""
    reads = log.arrays()
    window, count = reads.windows(window_s)
    return _rows(_table(window, count, reads.node, reads.nbytes, reads.nodes), reads, at_s, windows, window_s)


def floor_from(log: ReadLog, seed: int, at_s: float, windows: int, window_s: float = WINDOW_S) -> list[float]:
    """As `max_over_mean_from`, but with the segments placed on the nodes as in `floor`."""
    reads = log.arrays()
    each = [_rows(table, reads, at_s, windows, window_s) for table in _fair_tables(log, seed, window_s)]
    return [sum(column) / _PLACEMENTS for column in zip(*each, strict=True)]


def _rows(table: NDArray[np.float64], reads: _ReadColumns, at_s: float, windows: int, window_s: float) -> list[float]:
    starts = np.unique(np.floor(reads.at_s / window_s)) * window_s
    chosen = table[(starts >= at_s) & (starts < at_s + windows * window_s)]
    return [float(row.max() / row.mean()) for row in chosen]


def _fair_tables(log: ReadLog, seed: int, window_s: float) -> Iterator[NDArray[np.float64]]:
    """Bytes per (window, node) under each of the placements of `floor`."""
    reads = log.arrays()
    nodes = reads.nodes
    window, windows = reads.windows(window_s)
    segments, segment = np.unique(reads.segment, return_inverse=True)
    heat = np.bincount(segment, weights=reads.nbytes, minlength=len(segments))
    hottest = np.argsort(-heat, kind="stable")[: math.ceil(nodes * math.log(nodes))]
    is_hot = np.zeros(len(segments), dtype=np.bool_)
    is_hot[hottest] = True
    hot = is_hot[segment]
    fair = np.bincount(window[hot], weights=reads.nbytes[hot], minlength=windows)[:, None] / nodes
    window, segment, nbytes = window[~hot], segment[~hot], reads.nbytes[~hot]
    for number in range(_PLACEMENTS):
        node = _hashed_nodes(segments, key_of(seed & WORD, number), nodes)
        yield fair + _table(window, windows, node[segment], nbytes, nodes)


def _hashed_nodes(segments: NDArray[np.int64], key: int, nodes: int) -> NDArray[np.int64]:
    keys = segments.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(key)
    return (mix64(keys) % np.uint64(nodes)).astype(np.int64)


def _table(
    window: NDArray[np.int64],
    windows: int,
    node: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    nodes: int,
) -> NDArray[np.float64]:
    """Bytes per (window, node)."""
    cells = np.bincount(window * nodes + node, weights=nbytes, minlength=windows * nodes)
    return cells.astype(np.float64).reshape(windows, nodes)


def _spread(table: NDArray[np.float64]) -> Spread:
    total = float(table.sum())
    if total == 0:
        return Spread(cv=0.0, max_over_mean=1.0)
    # The coefficient of variation of a window, weighted by the window's bytes, is (deviation / mean) x (mean x nodes),
    # which is deviation x nodes.
    nodes = table.shape[1]
    return Spread(
        cv=float(table.std(axis=1).sum()) * nodes / total,
        max_over_mean=float(table.max(axis=1).sum()) * nodes / total,
    )
