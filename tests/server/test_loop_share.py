"""The time of the control loop is shared by turns of the keys."""

from __future__ import annotations

import asyncio

from tokenlake_server.loop.loop_share import LoopShare


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
