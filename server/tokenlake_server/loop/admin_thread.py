"""A thread with an event loop of its own, in which gRPC runs, so that no code of gRPC runs on the control loop.

gRPC's asyncio supports one loop per process, so all its clients and servers share this one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tokenlake_server.loop.started_threads import started_threads

WORK_THREADS = 2
"""Number of the threads for calls that block: measurements of the paths to other nodes, host names."""

T = TypeVar("T")


class AdminThread:
    """Runs coroutines on its loop until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._workers = started_threads(WORK_THREADS, "admin-work")
        self._loop.set_default_executor(self._workers)
        self._thread = threading.Thread(target=self._loop.run_forever, name="admin", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin `work` on the loop of the thread. Cancelling the future that is returned cancels the work. May be
        called from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_soon(self, function: Any, *arguments: object) -> None:
        """Call a function on the loop. May be called from any thread."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel the work that is left, and end the thread. Blocks until it has ended."""

        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.submit(cancel()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._loop.close()
