"""A value of the control loop that is asked for often, and may be a little old."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

FRESH_S = 0.1
"""Seconds for which a value answers further calls: a snapshot of the daemon takes the control loop 0.3 ms."""
T = TypeVar("T")


class Cached(Generic[T]):
    """Reads a value at most once per `fresh_s`. Calls share a read that is under way, however long it takes. Used in
    the admin thread."""

    def __init__(self, read: Callable[[], Awaitable[T]], fresh_s: float = FRESH_S) -> None:
        self._read = read
        self._fresh_s = fresh_s
        self._task: asyncio.Future[T] | None = None
        self._began = 0.0

    async def get(self) -> T:
        """The value, which was read at most `fresh_s` ago, or is being read. Raises the errors of `read`."""
        now = time.monotonic()
        if self._task is None or (self._task.done() and (now - self._began > self._fresh_s or _failed(self._task))):
            self._began = now
            self._task = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._task)


def _failed(task: asyncio.Future[T]) -> bool:
    return task.cancelled() or task.exception() is not None
