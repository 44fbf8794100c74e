"""The way from the admin thread to the control loop and back: functions that run there, and questions to the rules.

Together they take at most `SHARE_S` of a pass of the loop, in turns of the tenants, as the connections of engines do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.core.instructions import Answer, EvictionDone, Located, PrefetchDone, UnpinDone
from tokenlake.errors import Refused, TokenLakeError, Unreachable
from tokenlake.wire import engine
from tokenlake_server.loop.driver import Driver
from tokenlake_server.loop.loop_share import LoopShare

SHARE_S = 0.0003
"""Seconds of one pass of the control loop that the calls of the control plane take together; the last of them may
exceed it."""
T = TypeVar("T")


class Bridge:
    """Runs functions and events on the control loop for coroutines of the admin thread."""

    def __init__(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
        """`loop`: the control loop."""
        self._driver = driver
        self._loop = loop
        self._share = LoopShare(loop, SHARE_S)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Callable[[Any], None]] = {}
        """By number of a question to the rules: the function that takes the answer. Used on the control loop only."""
        driver.carry_out(Located, lambda answer: self._answered(answer.request, answer))
        driver.carry_out(EvictionDone, lambda answer: self._answered(answer.request, answer))
        driver.carry_out(PrefetchDone, lambda answer: self._answered(answer.request, answer))
        driver.carry_out(UnpinDone, lambda answer: self._answered(answer.request, answer))

    async def call(self, function: Callable[[], T], of: str = "") -> T:
        """Call a short function on the control loop and return its result. `of`: the tenant in whose turn it is called;
        empty: the daemon itself and admins. Raises the errors of the function."""

        def run(done: Callable[[Any], None]) -> None:
            done(function())

        result: T = await self._wait(run, of)
        return result

    async def ask(self, make: Callable[[int], Event], of: str = "") -> Any:
        """Give the rules the event `make(number)`, in a turn of the tenant `of`, and wait for the instruction that
        answers it. Raises `TokenLakeError` if the rules refuse it."""

        number = next(self._numbers)

        def run(done: Callable[[Any], None]) -> None:
            self._waiting[number] = done
            try:
                self._driver.handle(make(number))
            except BaseException:
                self._waiting.pop(number, None)
                raise

        try:
            return await self._wait(run, of)
        except asyncio.CancelledError:
            # The call ended before the answer. In the other cases the answer, or the refusal, has removed the entry.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._waiting.pop, number, None)
            raise

    async def explain(self, tenant: str, request: str) -> engine.Explained:
        """Ask the rules for the use of the pool by a request of the tenant (`tokenlake explain`)."""
        explain = engine.Explain(1, request)
        answer: engine.Explained = await self.ask(
            lambda number: events.ExplainRequested(-number, tenant, explain), tenant
        )
        return answer

    async def coroutine(self, make: Callable[[], Any]) -> Any:
        """Run a coroutine on the control loop and return its result. Raises the errors of the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), self._loop))

    async def _wait(self, run: Callable[[Callable[[Any], None]], None], of: str) -> Any:
        here = asyncio.get_running_loop()
        future: asyncio.Future[Any] = here.create_future()

        def settle(result: Any) -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        def done(result: Any) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(settle, result)

        def on_loop() -> None:
            if future.cancelled():
                return
            try:
                run(done)
            except Exception as error:
                done(error)

        try:
            self._loop.call_soon_threadsafe(self._share.run, on_loop, of)
        except RuntimeError:
            raise Unreachable("the daemon is stopping") from None
        return await future

    # -- on the control loop

    def answered(self, answer: Answer) -> None:
        """Take an answer of the rules to one of the questions of `explain`."""
        self._answered(-answer.connection, answer.message)

    def _answered(self, number: int, answer: object) -> None:
        done = self._waiting.pop(number, None)
        if done is not None:
            done(answer)

    def refuse(self, event: Event, error: Exception) -> None:
        """The rules did not take an event of `ask`."""
        number = -event.connection if isinstance(event, events.ExplainRequested) else getattr(event, "request", 0)
        self._answered(number, error if isinstance(error, TokenLakeError) else Refused(str(error)))
