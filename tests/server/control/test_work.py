"""Calculations of the control plane: one thread, by turns of the tenants."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

pytest.importorskip("grpc")

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
