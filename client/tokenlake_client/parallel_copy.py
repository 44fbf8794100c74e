"""Copies of many bytes in two threads: the caller's and one of the pool's."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["MIN_PARALLEL_BYTES", "ParallelCopy"]

T = TypeVar("T")

MIN_PARALLEL_BYTES = 4 << 20
"""Fewer bytes are copied before a second thread has woken up."""


class ParallelCopy:
    """One per pool. Several callers share its one thread, which starts with the first large copy and ends with this
    object."""

    def __init__(self, processors: int | None = None) -> None:
        """`processors`: how many this process may use (default: its CPU affinity). With one, the caller copies
        alone."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenlake-copy")
        self._single = (processors or len(os.sched_getaffinity(0))) < 2

    def each(self, work: Callable[[T], None], items: Iterable[T], nbytes: int) -> None:
        """Call `work(item)` for each item, in any order. Both threads take items when all items together have at least
        `MIN_PARALLEL_BYTES`, given as `nbytes`. No thread works on an item any more when this returns, or raises the
        error of `work`."""
        left = deque(items)

        def run() -> None:
            # Each thread takes the next item, so that a thread that starts late, or never, delays nothing.
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
            # No thread can be started, or the interpreter is about to end.
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
