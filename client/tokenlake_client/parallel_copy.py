"""Copies of many bytes in two threads: the caller's and one of the pool's."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

MIN_PARALLEL_BYTES = 4 << 20
"""Copies of fewer bytes use the caller's thread alone: it is done before a second thread has woken up."""


class ParallelCopy:
    """Copies in two threads: the caller's, and one that belongs to this object. A pool has one such object, and its
    callers share the thread, which starts with the first large copy and ends with this object."""

    def __init__(self, processors: int | None = None) -> None:
        """`processors`: how many processors this process may use (default: the number in its CPU affinity). With one
        processor, all copies use the caller's thread alone."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenlake-copy")
        self._single = (processors or len(os.sched_getaffinity(0))) < 2

    def each(self, work: Callable[[T], None], items: Iterable[T], nbytes: int) -> None:
        """Call `work(item)` for each item, in any order. `nbytes`: the size of all items together; from
        `MIN_PARALLEL_BYTES` on both threads take items. Raises the errors of `work`. When this returns or raises, no
        thread works on an item any more."""
        left = deque(items)

        def run() -> None:
            # Each thread takes the next item that is left, so that a thread that starts late, or never, delays nothing.
            while True:
                try:
                    item = left.popleft()
                except IndexError:
                    return
                work(item)

        if self._single or nbytes < MIN_PARALLEL_BYTES or len(left) < 2:
            run()
            return
        try:
            other = self._executor.submit(run)
        except RuntimeError:
            # The second thread cannot be started, or the interpreter exits: the caller copies alone.
            run()
            return
        try:
            run()
        finally:
            left.clear()
            if not other.cancel():
                wait([other])
        if not other.cancelled():
            other.result()
