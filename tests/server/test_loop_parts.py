"""Parts of the control loop: turns of the keys, conditions that last, pools of threads that run at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.robustness.live import LIMIT_S
from tokenlake.errors import LimitReached
from tokenlake_server.loop.loop_share import LoopShare
from tokenlake_server.loop.repeated_warning import MOST_REPEAT_S, REPEAT_S, RepeatedWarning
from tokenlake_server.loop.started_threads import started_threads


async def test_a_key_with_many_calls_leaves_turns_to_others() -> None:
    """One tenant's scheduler asked 48 questions at a time, and all were answered in one pass of the loop."""

    loop = asyncio.get_running_loop()
    share = LoopShare(loop, 1.0)
    ran, passes = list[str](), list[int]()

    def call(name: str) -> None:
        ran.append(name)
        # The call used up the share of its pass.
        share.spent(1.0)

    for _ in range(48):
        share.run(lambda: call("red"), "red")
    for _ in range(3):
        share.run(lambda: call("blue"), "blue")
    assert ran == ["red"], "the others wait for later passes"
    while len(ran) < 51:
        before = len(ran)
        await asyncio.sleep(0)
        passes.append(len(ran) - before)
    assert max(passes) == 1
    assert [at for at, name in enumerate(ran) if name == "blue"] == [2, 4, 6]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    share.run(lambda: call("late"), "late")
    assert ran[-1] == "late", "at once where nothing waits"


async def test_an_error_of_a_call_is_counted_and_ends_no_other() -> None:
    share, ran = LoopShare(asyncio.get_running_loop(), 1e-9), list[int]()

    def fails() -> None:
        raise KeyError(1)

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: ran.append(0))
    share.later(lambda: ran.append(1), "red")
    share.run(fails, "red")
    share.run(lambda: ran.append(2), "red")
    for _ in range(10):
        await asyncio.sleep(0)
    assert ran == [1, 0, 2]


def times(warning: RepeatedWarning, kind: object, until: int, start: int = 0) -> list[int]:
    return [now for now in range(start, until) if warning.should_log(kind, now)]


def test_how_often_a_condition_is_logged() -> None:
    """A condition is logged after a time and then less and less often."""
    logged = times(RepeatedWarning(10), "down", 5000)
    assert logged[:4] == [10, 10 + REPEAT_S, 10 + 3 * REPEAT_S, 10 + 7 * REPEAT_S]
    assert logged[-1] - logged[-2] == MOST_REPEAT_S


def test_a_condition_that_ends_in_time_is_not_logged() -> None:
    warning = RepeatedWarning(10)
    assert not times(warning, "down", 10)
    assert not warning.logged
    assert not warning.should_log(None, 10)
    assert times(warning, "down", 30, 11) == [21]


def test_another_condition_begins_anew() -> None:
    warning = RepeatedWarning()
    assert times(warning, "down", 5) == [0]
    assert times(warning, "refused", 10, 5) == [5]
    assert warning.logged
    assert warning.lasted(9) == 4


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
