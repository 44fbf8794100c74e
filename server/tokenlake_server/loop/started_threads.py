"""Thread pools whose threads run from the start."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from tokenlake.errors import LimitReached


def started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of `count` threads, which have all started: `submit` starts no thread later, which could fail after the
    work was queued, so that it would be carried out although `submit` raised. Raises `LimitReached` when not all
    threads can be started."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    # A pool starts a thread only for work that no idle thread takes.
    meeting = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(meeting.wait)
    except RuntimeError as error:
        meeting.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise LimitReached(f"the threads {name!r} cannot be started: {error}") from error
    meeting.wait()
    return pool
