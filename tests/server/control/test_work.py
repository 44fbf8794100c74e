"""Calculations and shared values of the control plane, and the status with which a call ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tokenlake.errors import Unreachable
from tokenlake_server.control.cached import Cached
from tokenlake_server.control.service import abort_with
from tokenlake_server.control.work import Work


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.close()


async def test_jobs_run_in_turns_of_the_tenants(work: Work) -> None:
    gate, order = threading.Event(), list[str]()

    def job(name: str) -> None:
        gate.wait()
        order.append(name)

    tasks = [asyncio.ensure_future(work.run("red", lambda: job("red")))]
    tasks += [asyncio.ensure_future(work.run("red", lambda: job("red"))) for _ in range(20)]
    tasks += [asyncio.ensure_future(work.run("blue", lambda: job("blue"))) for _ in range(2)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert order.index("blue") <= 2
    assert order[:6].count("blue") == 2
    assert order.count("red") == 21


async def test_a_job_whose_caller_left_does_not_run(work: Work) -> None:
    gate, ran = threading.Event(), list[int]()
    first = asyncio.ensure_future(work.run("red", gate.wait))
    second = asyncio.ensure_future(work.run("red", lambda: ran.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    # The cancellation has reached the job once the task has ended.
    await asyncio.wait([second])
    gate.set()
    await first
    await work.run("red", lambda: None)
    assert ran == []


async def test_an_error_keeps_nothing_and_collects_nothing(work: Work) -> None:
    """A message of 2 MiB would stay until the next full collection."""

    class Body:
        pass

    kept: list[weakref.ref[Body]] = []

    def fails() -> None:
        body = Body()
        kept.append(weakref.ref(body))
        assert not gc.isenabled()
        raise KeyError(1)

    async def scene() -> None:
        try:
            await work.run("red", fails)
        except KeyError:
            return
        raise AssertionError("the error was lost")

    await asyncio.create_task(scene())
    gc.disable()
    try:
        await asyncio.create_task(scene())
        assert kept[1]() is None
    finally:
        gc.enable()


async def test_calls_share_a_slow_read() -> None:
    """The read takes longer than its value may be old."""
    reads = 0

    async def scene() -> list[int]:
        value: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def read() -> int:
            nonlocal reads
            reads += 1
            return await value

        shared = Cached(read, fresh_s=-1.0)
        calls = []
        for _ in range(5):
            calls.append(asyncio.ensure_future(shared.get()))
            await asyncio.sleep(0)
        value.set_result(7)
        found = await asyncio.gather(*calls)
        await shared.get()
        return found

    assert await scene() == [7] * 5
    assert reads == 2, "one for the five calls, and one for the call after them"


async def test_a_read_that_failed_is_tried_again() -> None:
    answers = [OSError("no"), None]

    async def read() -> int:
        error = answers.pop(0)
        if error is not None:
            raise error
        return 7

    shared = Cached(read)
    with pytest.raises(OSError, match="no"):
        await shared.get()
    assert await shared.get() == 7


class Call:
    """Stands for the context of a call, and keeps its end."""

    def __init__(self) -> None:
        self.ended: tuple[str, str] = "", ""

    async def abort(self, code: Any, text: str) -> None:
        self.ended = code.name, text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError(), ("DEADLINE_EXCEEDED", "the daemon did not answer in time")),
        (Unreachable(""), ("UNAVAILABLE", "Unreachable")),
        (ValueError(""), ("INVALID_ARGUMENT", "ValueError")),
        (ValueError("a reason"), ("INVALID_ARGUMENT", "a reason")),
        (KeyError("secret"), ("INTERNAL", "the daemon failed on this call; its log has the error")),
    ],
)
async def test_the_end_of_a_call(error: Exception, expected: tuple[str, str]) -> None:
    call: Any = Call()
    await abort_with(call, error, "Explain")
    assert call.ended == expected
