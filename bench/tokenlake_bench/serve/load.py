"""Sends the requests of a plan: at their arrival times (open), or so many at a time (closed)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp

from tokenlake_bench.serve.api import Answer, Form, send, spread
from tokenlake_bench.serve.plan import Plan, Planned

LEAD_S: Final = 0.25
"""Seconds before its arrival at which a request is prepared: a long prompt takes milliseconds to write."""


class Load:
    """One run of a plan. A request that follows another one is sent once that one was answered, or has failed::

        open:    arrivals in order of time --> prepared --> sent at its time --answered--> its followers, each likewise
        closed:  queue of requests that follow none --> so many under way --answered--> its followers at the front

    `answers` has those of all requests that were sent and have ended, in the order of their ends.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        servers: Sequence[str],
        form: Form,
        plan: Plan,
        *,
        route: str,
        wait_s: float,
        told: Callable[[Answer], None],
    ) -> None:
        """`servers`: base addresses. `told`: called with each answer."""
        self.answers: list[Answer] = []
        self.began_s = 0.0
        self._client = client
        self._servers = servers
        self._form = form
        self._plan = plan
        self._route = route
        self._wait_s = wait_s
        self._told = told
        self._followers: dict[int, list[Planned]] = {}
        for each in plan.requests:
            if each.follows is not None:
                self._followers.setdefault(each.follows, []).append(each)
        self._first = [each for each in plan.requests if each.follows is None]

    async def open(self) -> None:
        """Send each request at its time; returns when all have ended."""
        self.began_s = time.perf_counter() + LEAD_S
        async with asyncio.TaskGroup() as tasks:
            for each in self._first:
                await _until(self.began_s + each.at_s - LEAD_S)
                tasks.create_task(self._at(each, self.began_s + each.at_s, tasks))

    async def closed(self, concurrency: int) -> None:
        """Keep `concurrency` requests under way; returns when all have ended."""
        self.began_s = time.perf_counter()
        ready = deque(self._first)
        under_way = 0
        changed = asyncio.Event()

        async def one(planned: Planned) -> None:
            nonlocal under_way
            await self._send(planned, time.perf_counter(), self._body(planned))
            ready.extendleft(reversed(self._followers.get(planned.number, ())))
            under_way -= 1
            changed.set()

        async with asyncio.TaskGroup() as tasks:
            while ready or under_way:
                while ready and under_way < concurrency:
                    under_way += 1
                    tasks.create_task(one(ready.popleft()))
                changed.clear()
                await changed.wait()

    async def _at(self, planned: Planned, due_s: float, tasks: asyncio.TaskGroup) -> None:
        await _until(due_s - LEAD_S)
        body = self._body(planned)
        await _until(due_s)
        answer = await self._send(planned, due_s, body)
        for each in self._followers.get(planned.number, ()):
            if each.pause_s is not None:
                due_s = answer.end_s + each.pause_s
            else:
                due_s = max(answer.end_s, self.began_s + each.at_s)
            tasks.create_task(self._at(each, due_s, tasks))

    def _body(self, planned: Planned) -> bytes:
        return self._form.body(self._plan.tokens(planned.number), planned.output_tokens)

    async def _send(self, planned: Planned, due_s: float, body: bytes) -> Answer:
        server = spread(planned.number, planned.conversation, self._servers, self._route)
        answer = Answer(planned.number, server, due_s, prompt_tokens=planned.prompt_tokens)
        await send(self._client, self._servers[server], self._form, body, answer, self._wait_s)
        self.answers.append(answer)
        self._told(answer)
        return answer


async def _until(due_s: float) -> None:
    """Wait until a time of `time.perf_counter`."""
    wait_s = due_s - time.perf_counter()
    if wait_s > 0:
        await asyncio.sleep(wait_s)
