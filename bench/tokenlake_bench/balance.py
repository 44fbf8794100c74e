"""Load of nodes and of engine instances per window of time, and the floor that the copies of the read segments allow.

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

from tokenlake.errors import ConfigurationError

WINDOW_S: Final = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Sends:
    """The sent segments as columns of equal length; each segment that a node sent to another one has one row."""

    at_s: NDArray[np.float64]
    node: NDArray[np.int64]
    nbytes: NDArray[np.int64]


class SendLog:
    """A log of segments sent from node to node, in any order of time; each takes 32 bytes of memory. `nodes` is the
    number of nodes, which are numbered from 0."""

    def __init__(self, nodes: int) -> None:
        if nodes < 1:
            raise ConfigurationError("nodes", nodes, "at least 1")
        self.nodes = nodes
        self._at_s = array("d")
        self._node = array("q")
        self._nbytes = array("q")
        self._choice = array("q")
        """Per logged segment, the position in `_choices` of the set of nodes that held a copy."""
        self._choices: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._node)

    def add(self, at_s: float, node: int, nbytes: int, holders: tuple[int, ...] = ()) -> None:
        """Add `nbytes` that `node` sent at `at_s` seconds of trace time.

        `holders`: for a read by an engine, all nodes that had a copy and so could have sent it, `node` included and the
        reader's node not. Empty for bytes that no other node could send, as those of a hand-over, and where the nodes
        with copies are not known.
        """
        if not 0 <= node < self.nodes:
            raise IndexError(f"node {node} of {self.nodes}")
        number = self._numbers.setdefault(holders, len(self._choices))
        if number == len(self._choices):
            self._choices.append(holders)
        self._at_s.append(at_s)
        self._node.append(node)
        self._nbytes.append(nbytes)
        self._choice.append(number)

    def sends(self) -> Sends:
        """Columns of all logged segments, copied, in the order in which they were added."""
        return Sends(np.array(self._at_s), np.array(self._node), np.array(self._nbytes))

    def totals(self) -> list[int]:
        """Total bytes that each node sent, by node."""
        sends = self.sends()
        return [int(sends.nbytes[sends.node == node].sum()) for node in range(self.nodes)]

    def reads(self) -> SendLog:
        """The logged segments for which the nodes with copies are known: those that nodes sent to engines at other
        nodes."""
        known = np.array([bool(holders) for holders in self._choices], dtype=np.bool_)
        return self._chosen(known[np.array(self._choice)] if len(self) else np.zeros(0, np.bool_))

    def table(self, window_s: float = WINDOW_S) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bytes sent per time window and node: (start of each window in seconds, table of bytes). Windows in which no
        node sent anything are left out."""
        sends = self.sends()
        starts, window = _windows(sends.at_s, window_s)
        cells = np.bincount(window * self.nodes + sends.node, weights=sends.nbytes, minlength=len(starts) * self.nodes)
        return starts, cells.astype(np.float64).reshape(len(starts), self.nodes)

    def _chosen(self, chosen: NDArray[np.bool_]) -> SendLog:
        log = SendLog(self.nodes)
        for name in ("_at_s", "_node", "_nbytes", "_choice"):
            getattr(log, name).frombytes(np.array(getattr(self, name))[chosen].tobytes())
        log._choices, log._numbers = list(self._choices), dict(self._numbers)
        return log

    def at_floor(self, window_s: float = WINDOW_S) -> SendLog:
        """The same sends with each read sent by the least loaded of its holders.

        Within a window, sends that one node alone could make stay there. Then each read, those with the fewest holders
        first and otherwise in order, goes to the holder that has sent the fewest bytes of the window so far. This
        greedy assignment is not always the most even one, so that a placement may come out a little below it.
        """
        sends, log = self.sends(), SendLog(self.nodes)
        _, window = _windows(sends.at_s, window_s)
        choice = np.array(self._choice, dtype=np.int64)
        sizes = np.array([len(holders) for holders in self._choices], dtype=np.int64)
        order = np.lexsort((sizes[choice], window)) if len(self) else window
        current, sent = -1, [0] * self.nodes
        for row in order.tolist():
            if window[row] != current:
                current, sent = window[row], [0] * self.nodes
            holders = self._choices[self._choice[row]]
            node = min(holders, key=sent.__getitem__) if holders else self._node[row]
            sent[node] += self._nbytes[row]
            log.add(self._at_s[row], node, self._nbytes[row], holders)
        return log


class BusyLog:
    """A log of the seconds in which engine instances compute, by window of time. `instances` is their number; they are
    numbered from 0."""

    def __init__(self, instances: int, window_s: float = WINDOW_S) -> None:
        _check_window(window_s)
        self.instances = instances
        self.total_s = 0.0
        """Seconds of computing, summed over all instances."""
        self._window_s = window_s
        self._cells: dict[int, list[float]] = {}

    def add(self, instance: int, from_s: float, to_s: float) -> None:
        """Add the time span of one step (forward pass) of an instance; the steps of one instance must not overlap."""
        self.total_s += to_s - from_s
        length = self._window_s
        for window in range(math.floor(from_s / length), math.floor(to_s / length) + 1):
            part_s = min(to_s, (window + 1) * length) - max(from_s, window * length)
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


def load(log: SendLog, window_s: float = WINDOW_S) -> Spread:
    """Measure of how unevenly the bytes of the logged segments are spread over the nodes that sent them."""
    return spread(log.table(window_s)[1])


def max_over_mean_from(log: SendLog, at_s: float, windows: int, window_s: float = WINDOW_S) -> list[float]:
    """Bytes that the most loaded node sent, divided by the mean over the nodes, for each of `windows` time windows; the
    first begins at `at_s`, a multiple of `window_s`. Fewer values where the log ends earlier; windows without sent
    bytes are left out."""
    starts, table = log.table(window_s)
    chosen = table[(starts >= at_s) & (starts < at_s + windows * window_s)]
    return [float(row.max() / row.mean()) for row in chosen if row.any()]


def _windows(at_s: NDArray[np.float64], window_s: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(start in seconds of each time window that has an event, per event the position of its window in these
    starts)."""
    _check_window(window_s)
    numbers, window = np.unique(np.floor(at_s / window_s), return_inverse=True)
    return numbers * window_s, window.astype(np.int64)


def _check_window(window_s: float) -> None:
    if not 0 < window_s < math.inf:
        raise ConfigurationError("window_s", window_s, "a finite number of seconds above 0")
