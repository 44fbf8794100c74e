"""A queue of tasks and the thread that executes them in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundQueue(Generic[T]):
    """Executes tasks in the order of their submission, in one daemon thread that starts with the first task.
    Thread-safe."""

    def __init__(self, execute: Callable[[T], None], thread: str, limit: int | None = None) -> None:
        """`execute` must not raise. `thread`: the name of the thread. `limit`: the largest number of tasks that wait;
        None: no limit."""
        self._execute = execute
        self._name = thread
        self._limit = limit
        self._changed = threading.Condition()
        self._waiting: deque[T] = deque()
        self._current: T | None = None
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, task: T) -> bool:
        """Queue `task` for the background thread. False: the queue is full or closed, or no thread can be started; the
        task is not executed."""
        with self._changed:
            if self._closed or (self._limit is not None and len(self._waiting) >= self._limit):
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread = thread
            self._waiting.append(task)
            self._changed.notify_all()
            return True

    def withdraw(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove the waiting tasks for which `unwanted` is true, and return them. A task under way is not touched."""
        with self._changed:
            removed = [task for task in self._waiting if unwanted(task)]
            self._waiting = deque(task for task in self._waiting if not unwanted(task))
            self._changed.notify_all()
            return removed

    def oldest(self) -> T | None:
        """The task that the background thread is executing, else the first one that waits; None when there is
        neither."""
        with self._changed:
            if self._busy:
                return self._current
            return self._waiting[0] if self._waiting else None

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until no task waits or is being executed; False when `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def close(self, timeout: float | None = None, *, drain: bool = True) -> None:
        """End the background thread. `drain`: the thread executes the waiting tasks first, for at most `timeout`
        seconds; else they are discarded."""
        if drain:
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
                self._current, self._busy = self._waiting.popleft(), True
            self._execute(self._current)
            with self._changed:
                # Drop the reference to the executed task, which may own a cache: it must not live until the next task
                # arrives.
                self._current, self._busy = None, False
                self._changed.notify_all()
