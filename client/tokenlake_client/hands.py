"""Two hands for work on many bytes: the caller's thread and one more."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["SHARE_BYTES", "Hands"]

T = TypeVar("T")

SHARE_BYTES = 4 << 20
"""Less is done before another thread has woken up."""


class Hands:
    """One per pool; several callers at a time share the second hand. Its thread starts with the first large work and
    ends with this object."""

    def __init__(self) -> None:
        self._second = ThreadPoolExecutor(1, thread_name_prefix="tokenlake-hand")
        self._alone = len(os.sched_getaffinity(0)) < 2

    def each(self, work: Callable[[T], None], items: Iterable[T], nbytes: int) -> None:
        """`work(item)` for each, in any order, by both hands when all items together are `nbytes` of at least
        `SHARE_BYTES`. Nobody works on an item any more when it returns or raises what `work` raised."""
        left = deque(items)

        def run() -> None:
            # Each takes the next one, so that a hand that comes late, or never, makes nobody wait for its half.
            while True:
                try:
                    item = left.popleft()
                except IndexError:
                    return
                work(item)

        if self._alone or nbytes < SHARE_BYTES or len(left) < 2:
            run()
            return
        try:
            other = self._second.submit(run)
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
