"""Stores segments behind the engine's back: one thread, a bounded queue, no waiting in the request."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_client.engines.base import NOBODY, Asked, CachePool
from tokenlake_client.engines.transformers.counters import Counters
from tokenlake_client.engines.transformers.slots import LayerPair, write_segment

__all__ = ["StoreTask", "Writer", "task_of"]


@dataclass(frozen=True, slots=True)
class StoreTask:
    """Segments [first, first + len(keys)) of one prompt.

    Owns references to `layers`, whose tokens up to the last segment's end nobody writes any more. They begin with
    token `start` of the prompt, which is not after the first segment's.
    """

    pool: CachePool
    layout: Layout
    keys: Sequence[SegmentKey]
    first: int
    layers: Sequence[LayerPair]
    start: int
    computed: tuple[Any, ...]
    """Events of the accelerators that computed `layers`."""
    asked: Asked = NOBODY
    told: Sequence[SegmentKey] = ()
    """Segments of the request before these: once these are stored, the hints in `asked` reaches them as well."""


def task_of(
    pool: CachePool,
    layout: Layout,
    keys: Sequence[SegmentKey],
    first: int,
    layers: Sequence[LayerPair],
    start: int = 0,
    asked: Asked = NOBODY,
    told: Sequence[SegmentKey] = (),
) -> StoreTask:
    """A task for the thread that has just computed `layers`."""
    devices = {keys_.device for keys_, _ in layers if keys_.device.type == "cuda"}
    events = tuple(torch.cuda.current_stream(device).record_event() for device in devices)
    return StoreTask(pool, layout, keys, first, layers, start, events, asked, told)


class Writer:
    """Runs store tasks in the order they were submitted: a late word comes after the segments that it is about."""

    def __init__(
        self,
        counters: Counters,
        report: Callable[[str, BaseException], None],
        say: Callable[[str], None],
        *,
        tasks: int,
        patience: float,
    ) -> None:
        """`report` is told of failures, `say` of each code's first refusal: it gets a line for the log.

        `tasks`: most that wait; each keeps a cache alive. `patience`: seconds to wait for the pool's write
        budget without progress."""
        self._counters = counters
        self._report = report
        self._say = say
        self._refused: set[Code] = set()
        self._limit = tasks
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: deque[StoreTask] = deque()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, task: StoreTask) -> bool:
        """Queue `task`; False when the queue is full: its tokens are counted as not stored, and nobody waits for
        them."""
        with self._changed:
            accepted = not self._closed and len(self._waiting) < self._limit
            if accepted:
                self._waiting.append(task)
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="tokenlake-store", daemon=True)
                    self._thread.start()
        if not accepted:
            task.pool.claim(task.keys, 0.0)
            self._counters.add(tokens_not_stored=len(task.keys) * task.layout.segment_tokens)
        return accepted

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all submitted tasks are done; False when `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Finish what was submitted, for at most `timeout` seconds, and end the thread."""
        self.flush(timeout)
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                task = self._waiting.popleft()
                self._busy = True
            try:
                if task.keys:
                    self._store(task)
                if task.told and task.asked.hints is not None:
                    task.pool.hint(task.told, task.asked.hints)
            except Exception as error:
                self._report("storing segments", error)
            # The cache that the task owns must not live until the next one arrives.
            del task
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _store(self, task: StoreTask) -> None:
        for event in task.computed:
            event.synchronize()
        size = task.layout.segment_tokens

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            write_segment(slot, task.layout, task.layers, (task.first + index) * size - task.start)

        codes = b""
        try:
            name, hints, _ = task.asked
            codes = task.pool.store_all(task.keys, fill, task.first, self._patience, request=name, hints=hints)
        finally:
            done, refused = codes.count(Code.COMMITTED), [Code(code) for code in codes if Code(code).refused]
            self._counters.add(
                tokens_stored=done * size,
                tokens_not_stored=(len(task.keys) - done) * size,
                tokens_refused=len(refused) * size,
            )
            if done < len(task.keys):
                # Nobody need wait for them any longer; what is there already is not concerned.
                task.pool.claim(task.keys, 0.0)
        for code in refused:
            if code not in self._refused:
                self._refused.add(code)
                self._say(f"the pool refused to store segments: {code.name}; further ones are only counted")
