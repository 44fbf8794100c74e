"""Stores segments in a background thread, so that requests do not wait for the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.engines.common.reports import Counters
from tokenlake_client.engines.common.request import UNNAMED, RequestInfo
from tokenlake_client.engines.transformers.counters import Counts
from tokenlake_client.engines.transformers.segment_copy import SegmentCopy
from tokenlake_client.pool import Pool


@dataclass(frozen=True, slots=True)
class StoreTask:
    """The task to store segments [first, first + len(keys)) of one prompt.

    The first token of `cache` is token `start` of the prompt, at or before the beginning of the first segment. The
    task keeps the cache alive; its tokens up to the end of the last segment must not be written any more.
    """

    pool: Pool
    layout: Layout
    keys: Sequence[SegmentKey]
    first: int
    cache: SegmentCopy
    start: int
    computed: Callable[[], None]
    """To be called before `cache` is read: its copies then wait until its tokens are computed."""
    info: RequestInfo = UNNAMED
    hinted: Sequence[SegmentKey] = ()
    """Earlier segments of the request, for which the hints of `info` are sent after the segments of `keys` were
    stored."""


def task_of(
    pool: Pool,
    layout: Layout,
    keys: Sequence[SegmentKey],
    first: int,
    cache: SegmentCopy,
    start: int = 0,
    info: RequestInfo = UNNAMED,
    hinted: Sequence[SegmentKey] = (),
) -> StoreTask:
    """Make a task. To be called in the thread that has just queued the computation of `cache`, whose end the task waits
    for."""
    return StoreTask(pool, layout, keys, first, cache, start, cache.computed(), info, hinted)


class Writer:
    """Executes store tasks in the order of their submission, so that hints follow the segments they belong to."""

    def __init__(
        self,
        counters: Counters[Counts],
        report: Callable[[str, BaseException], None],
        warn: Callable[[str], None],
        *,
        tasks: int,
        patience: float,
    ) -> None:
        """`report` is called with each failure, `warn` with a line for the log at the first refusal with each code.

        `tasks`: the largest number of tasks that wait; each keeps a cache alive. `patience`: how many seconds to retry
        without progress while the pool's write budget is full."""
        self._counters = counters
        self._report = report
        self._warn = warn
        self._patience = patience
        self._queue: BackgroundQueue[StoreTask] = BackgroundQueue(self._execute, "tokenlake-store", tasks)
        self._refused: set[Code] = set()

    def submit(self, task: StoreTask) -> bool:
        """Queue `task` for the background writer. False: the queue is full; the tokens are counted as not stored, and
        the in-flight markers of their segments are removed."""
        accepted = self._queue.submit(task)
        if not accepted:
            task.pool.engine.mark_in_flight(task.keys, 0.0)
            self._counters.add(tokens_not_stored=len(task.keys) * task.layout.segment_tokens)
        return accepted

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the segments of all submitted tasks are stored; False when `timeout` seconds were not enough."""
        return self._queue.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Finish the submitted tasks, for at most `timeout` seconds, and end the thread."""
        self._queue.close(timeout)

    def _execute(self, task: StoreTask) -> None:
        try:
            if task.keys:
                self._store(task)
            if task.hinted and task.info.hints is not None:
                task.pool.hint(task.hinted, task.info.hints)
        except Exception as error:
            self._report("storing segments", error)

    def _store(self, task: StoreTask) -> None:
        task.computed()
        size = task.layout.segment_tokens

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            task.cache.write(slot, (task.first + index) * size - task.start)

        codes = b""
        try:
            name, hints = task.info.name, task.info.hints
            codes = task.pool.store_all(task.keys, fill, task.first, self._patience, request=name, hints=hints)
        finally:
            done, refused = codes.count(Code.COMMITTED), [Code(code) for code in codes if Code(code).refused]
            self._counters.add(
                tokens_stored=done * size,
                tokens_not_stored=(len(task.keys) - done) * size,
                tokens_refused=len(refused) * size,
            )
            if done < len(task.keys):
                # Remove the in-flight markers of the segments that were not stored. Segments in the pool have none.
                task.pool.engine.mark_in_flight(task.keys, 0.0)
        for code in refused:
            if code not in self._refused:
                self._refused.add(code)
                self._warn(f"the pool refused to store segments: {code.name}; further ones are only counted")
