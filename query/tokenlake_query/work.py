"""The thread that computes: attention of many requests and engines over cached segments, a batch per layer.

::

    A attends to  s0 s1 s2 s3            s0 s1  queries of A and B together
    B attends to  s0 s1 t2        ->     s2 s3  queries of A                  then merged per task
                                         t2     queries of B

A batch is whatever has come while the one before was computed. Tasks of it that attend to the same segment are computed
together, so that the segment is read once for all of them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tokenlake.attention import AttentionShape, Partial, Stored, merge
from tokenlake.layout import Layout
from tokenlake_query.kernels import Kernel, kernel_for
from tokenlake_query.segments import Segments

__all__ = ["Attention", "Task", "Worker"]

log = logging.getLogger(__name__)

MAX_KERNELS = 16
"""Kept, those used last: each has threads and a scratch buffer, and engines choose heads and scales."""


class Attention(NamedTuple):
    """What is computed: tasks of equal ones, layer too, are computed together."""

    layout: Layout
    shape: AttentionShape


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Queries of one layer over segments."""

    attention: Attention
    layer: int
    segments: Segments
    queries: Stored
    """`[tokens, heads, key dim]` in the layout's dtype; as it is until `done`."""
    wanted: Callable[[], bool]
    """Asked before it is computed."""
    done: Callable[[Partial | None], None]
    """`out` `[tokens, heads, value dim]`, `lse` `[tokens, heads]`; None when it could not be computed or was not wanted
    any more. Called once, in the computing thread."""


class Worker:
    """`submit` from any thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Sequence[Task]] = queue.SimpleQueue()
        self._kernels: dict[Attention, Kernel] = {}
        """The one used last comes last."""

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def submit(self, tasks: Sequence[Task]) -> None:
        """Compute these, together."""
        self._queue.put(tasks)

    def _run(self) -> None:
        while True:
            self._compute_all()

    def _compute_all(self) -> None:
        """Wait for tasks, and compute what is there. Nothing of it is kept: a thread that waits leases no segment."""
        tasks = list(self._queue.get())
        while not self._queue.empty():
            tasks += self._queue.get()
        batches: dict[tuple[Attention, int], list[Task]] = {}
        for task in tasks:
            batches.setdefault((task.attention, task.layer), []).append(task)
        for batch in batches.values():
            self._compute(batch)

    def _compute(self, batch: Sequence[Task]) -> None:
        wanted = [task for task in batch if task.wanted()]
        partials: dict[Task, Partial] = {}
        try:
            if wanted:
                kernel = self._kernel(wanted[0].attention)
                partials.update(zip(wanted, attend_together(kernel, wanted), strict=True))
        except Exception:
            # One task that cannot be computed ends nobody else's work.
            log.exception("attention over layer %d failed", wanted[0].layer)
        for task in batch:
            try:
                task.done(partials.get(task))
            except Exception:
                log.exception("a result over layer %d could not be taken", task.layer)

    def _kernel(self, attention: Attention) -> Kernel:
        kernel = self._kernels.pop(attention, None)
        if kernel is None:
            kernel = kernel_for(attention.layout, attention.shape)
            if len(self._kernels) >= MAX_KERNELS:
                del self._kernels[next(iter(self._kernels))]
        self._kernels[attention] = kernel
        return kernel


def attend_together(kernel: Kernel, batch: Sequence[Task]) -> list[Partial]:
    """One result per task; all of one attention and layer."""
    if len(batch) == 1:
        return [_attend(kernel, batch[0].layer, batch[0].segments, [batch[0].queries])[0]]
    results: list[list[Partial]] = [[] for _ in batch]
    for members, segments in _shared_runs(batch):
        queries = [batch[member].queries for member in members]
        for member, partial in zip(members, _attend(kernel, batch[0].layer, segments, queries), strict=True):
            results[member].append(partial)
    return [parts[0] if len(parts) == 1 else merge(parts) for parts in results]


def _shared_runs(batch: Sequence[Task]) -> list[tuple[tuple[int, ...], Segments]]:
    """The segments of all tasks, each once, in groups of those that the same tasks attend to."""
    readers: dict[int, list[int]] = {}
    slots = {}
    for number, task in enumerate(batch):
        for address, slot in zip(task.segments.addresses, task.segments.slots, strict=True):
            readers.setdefault(address, []).append(number)
            slots[address] = slot
    runs: dict[tuple[int, ...], list[int]] = {}
    for address, members in readers.items():
        runs.setdefault(tuple(members), []).append(address)
    return [(members, Segments([slots[address] for address in run])) for members, run in runs.items()]


def _attend(kernel: Kernel, layer: int, segments: Segments, queries: Sequence[Stored]) -> list[Partial]:
    joined = queries[0] if len(queries) == 1 else np.concatenate(queries)
    partial = kernel.attend(joined, segments.slots, layer)
    if len(queries) == 1:
        return [partial]
    ends = np.cumsum([len(part) for part in queries])[:-1]
    return [
        Partial(out, lse) for out, lse in zip(np.split(partial.out, ends), np.split(partial.lse, ends), strict=True)
    ]
