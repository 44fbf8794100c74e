"""The thread that computes attention of many requests and engines over cached segments, a batch per layer.

::

    A attends to  s0 s1 s2 s3            s0 s1  queries of A and B together
    B attends to  s0 s1 t2        ->     s2 s3  queries of A                  then merged per task
                                         t2     queries of B

A batch is every task that was submitted while the batch before it was computed. Tasks that attend to the same segment
are computed together, so that the segment is read once for all of them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tokenlake.attention import AttentionShape, Partial, Stored, merge
from tokenlake.layout import Layout
from tokenlake_query.kernels import Kernel, kernel_for
from tokenlake_query.segments import Segments

__all__ = ["Attention", "ComputeThread", "Task"]

log = logging.getLogger(__name__)

MAX_KERNELS = 16
"""Maximum number of kernels that are kept for later batches; the least recently used one is dropped. Bounded because
each kernel has threads and a scratch buffer, and engines may ask for any number of heads and any scale."""


class Attention(NamedTuple):
    """Layout of the segments and shape of the attention that a task computes. Tasks of one layer whose `Attention` is
    equal are computed together."""

    layout: Layout
    shape: AttentionShape


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A piece of work for the computing thread: attention of some queries of one layer over some segments."""

    attention: Attention
    layer: int
    segments: Segments
    queries: Stored
    """The queries of the task, `[tokens, heads, key dim]` in the layout's dtype; borrowed until `done` is called."""
    wanted: Callable[[], bool]
    """Function that the computing thread calls before it computes the task; where it returns False, the task is
    skipped."""
    done: Callable[[Partial | None], None]
    """Function that the computing thread calls once with the task's attention: `out` `[tokens, heads, value dim]` and
    `lse` `[tokens, heads]`; with None when the task failed or was not wanted any more."""
    spent: Callable[[int], None] = lambda ns: None
    """Function that the computing thread calls before `done` for a task that was computed, with its share of the
    nanoseconds that its batch took."""


class ComputeThread:
    """The thread that computes attention, in batches of tasks. `submit` is thread-safe."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Sequence[Task]] = queue.SimpleQueue()
        self._kernels: dict[Attention, Kernel] = {}
        """Kernels that were made for earlier batches, in order of use, the most recently used last."""

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue tasks for one batch of the computing thread."""
        self._queue.put(tasks)

    def _run(self) -> None:
        while True:
            self._compute_all()

    def _compute_all(self) -> None:
        """Wait for tasks and compute all that are queued. This is a function of its own so that its local variables are
        gone when the thread waits again: a reference to a task keeps the segments of the task leased."""
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
                began = time.perf_counter_ns()
                partials.update(zip(wanted, attend_together(kernel, wanted), strict=True))
                _share(time.perf_counter_ns() - began, wanted)
        except Exception:
            # A task that fails must not end this thread, which computes for other engines too.
            log.exception("attention over layer %d failed", wanted[0].layer)
        for task in batch:
            try:
                task.done(partials.get(task))
            except Exception:
                log.exception("a result of layer %d could not be delivered", task.layer)

    def _kernel(self, attention: Attention) -> Kernel:
        kernel = self._kernels.pop(attention, None)
        if kernel is None:
            kernel = kernel_for(attention.layout, attention.shape)
            if len(self._kernels) >= MAX_KERNELS:
                del self._kernels[next(iter(self._kernels))]
        self._kernels[attention] = kernel
        return kernel


def _share(ns: int, batch: Sequence[Task]) -> None:
    """Divide the `ns` nanoseconds that a batch took among its tasks, in proportion to the number of their queries times
    that of their segments."""
    products = [len(task.queries) * len(task.segments) for task in batch]
    whole = max(1, sum(products))
    for task, product in zip(batch, products, strict=True):
        task.spent(ns * product // whole)


def attend_together(kernel: Kernel, batch: Sequence[Task]) -> list[Partial]:
    """The result of each task of `batch`, in order. All tasks have the same layer and the same `Attention`."""
    if len(batch) == 1:
        return [_attend(kernel, batch[0].layer, batch[0].segments, [batch[0].queries])[0]]
    results: list[list[Partial]] = [[] for _ in batch]
    for members, segments in _shared_segments(batch):
        queries = [batch[member].queries for member in members]
        for member, partial in zip(members, _attend(kernel, batch[0].layer, segments, queries), strict=True):
            results[member].append(partial)
    return [parts[0] if len(parts) == 1 else merge(parts) for parts in results]


def _shared_segments(batch: Sequence[Task]) -> list[tuple[tuple[int, ...], Segments]]:
    """The segments of all tasks of `batch`, each segment once, grouped by the tasks that attend to it (indices into
    `batch`)."""
    readers: dict[int, list[int]] = {}
    slots = {}
    for number, task in enumerate(batch):
        for address, slot in zip(task.segments.addresses, task.segments.slots, strict=True):
            readers.setdefault(address, []).append(number)
            slots[address] = slot
    groups: dict[tuple[int, ...], list[int]] = {}
    for address, members in readers.items():
        groups.setdefault(tuple(members), []).append(address)
    return [(members, Segments([slots[address] for address in group])) for members, group in groups.items()]


def _attend(kernel: Kernel, layer: int, segments: Segments, queries: Sequence[Stored]) -> list[Partial]:
    """Attention of each of `queries` over all `segments`."""
    joined = queries[0] if len(queries) == 1 else np.concatenate(queries)
    partial = kernel.attend(joined, segments.slots, layer)
    if len(queries) == 1:
        return [partial]
    ends = np.cumsum([len(part) for part in queries])[:-1]
    return [
        Partial(out, lse) for out, lse in zip(np.split(partial.out, ends), np.split(partial.lse, ends), strict=True)
    ]
