"""Work that is submitted to a pool whose threads have started runs exactly once, or the pool is not made."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.robustness.live import LIMIT_S
from tokenlake.errors import LimitReached
from tokenlake_server.loop.started_threads import started_threads

POOL = "pool of this test"


def failing_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let further threads of `POOL` fail to start after `count` have started."""
    start: Any = threading.Thread.start
    left = count

    def starting(self: threading.Thread) -> None:
        nonlocal left
        if self.name.startswith(POOL):
            left -= 1
            if left < 0:
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", starting)


def test_no_thread_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_after(monkeypatch, 3)
    meeting = threading.Barrier(3)
    with started_threads(3, POOL) as pool:
        for _ in range(4):
            done = [pool.submit(meeting.wait) for _ in range(3)]
            assert sorted(each.result(LIMIT_S) for each in done) == [0, 1, 2]


def test_a_pool_without_all_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_after(monkeypatch, 2)
    with pytest.raises(LimitReached, match="'pool of this test' cannot be started: can't start new thread"):
        started_threads(3, POOL)
    monkeypatch.undo()
    for thread in threading.enumerate():
        if thread.name.startswith(POOL):
            thread.join(LIMIT_S)
            assert not thread.is_alive()
