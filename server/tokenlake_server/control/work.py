"""A thread for the calculations of the control plane: decoding large messages, prefix trees, plans, starts.

They take up to some 100 ms each. In the admin thread they would keep the client of etcd from renewing the lease of the
node, and operators from an answer.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Work:
    """Runs jobs in one thread, in turns of the keys under which they were given. The number of jobs is bounded by that
    of the calls of the control plane."""

    def __init__(self) -> None:
        """Raises RuntimeError when the thread cannot be started."""
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """By key; the turn of the first key is next."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="plans", daemon=True)
        self._thread.start()

    async def run(self, of: str, job: Callable[[], T]) -> T:
        """Run a job in the thread, and return its result. `of`: the key that has turns of its own, such as a tenant.
        Raises the errors of the job. A job whose caller left before its turn is not run."""
        future: Future[T] = Future()
        with self._changed:
            self._waiting.setdefault(of, deque()).append((future, job))
            self._changed.notify()
        try:
            return await asyncio.wrap_future(future)
        finally:
            # The traceback of an error names this frame, which would name the error: a cycle that keeps the message.
            del future

    def close(self) -> None:
        """End the thread after the job that it runs now."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    # -- in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                of = next(iter(self._waiting))
                waiting = self._waiting.pop(of)
                future, job = waiting.popleft()
                if waiting:
                    self._waiting[of] = waiting
            _carry_out(future, job)
            del future, job


def _carry_out(future: Future[Any], job: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    # A job makes many objects and no cycles. A collection that they cause would hold up the control loop.
    collecting = gc.isenabled()
    gc.disable()
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
        # As in `Work.run`.
        del future
    else:
        future.set_result(result)
    finally:
        if collecting:
            gc.enable()
