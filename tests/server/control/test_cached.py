"""Values of the control loop that several calls share."""

from __future__ import annotations

import asyncio

import pytest

from tokenlake_server.control import cached
from tokenlake_server.control.cached import Cached


async def test_calls_share_a_slow_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read takes longer than its value may be old."""
    monkeypatch.setattr(cached, "FRESH_S", -1.0)
    reads = 0

    async def scene() -> list[int]:
        value: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def read() -> int:
            nonlocal reads
            reads += 1
            return await value

        shared = Cached(read)
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
