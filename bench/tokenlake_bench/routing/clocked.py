"""An engine instance on a simulated clock, which calls `advance` when an event of the instance is due."""

from __future__ import annotations

import math
from collections.abc import Callable

from tokenlake_bench.routing.instance import Instance, InstanceOptions, Job, Steps
from tokenlake_testing.clock import Clock


class ClockedInstance:
    """An `Instance` that a simulated clock drives. The callbacks but `finished` are those of `Instance`;
    `finished(job, now)` is called at the last token of a job."""

    def __init__(
        self,
        clock: Clock,
        engine: Steps,
        options: InstanceOptions,
        *,
        admits: Callable[[Job], bool] = lambda job: True,
        begin: Callable[[Job, float], None],
        first: Callable[[Job, float], None],
        finished: Callable[[Job, float], None],
        ran: Callable[[float, float], None],
    ) -> None:
        self._clock = clock
        self._instance = Instance(engine, options, admits=admits, begin=begin, first=first, ran=ran)
        self._finished = finished
        self._armed = math.inf
        """Time for which the clock has a valid call of `advance`. Other calls that were scheduled before have no
        effect."""

    def submit(self, job: Job) -> None:
        """Add a job now."""
        self._instance.submit(job, self._clock.now)
        self._arm()

    def resume(self) -> None:
        """Let a waiting job begin that `admits` refused before."""
        self._instance.resume(self._clock.now)
        self._arm()

    def _arm(self) -> None:
        due = self._instance.next_event()
        if due < self._armed:
            self._armed = due
            self._clock.at(due, self._wake, due)

    def _wake(self, due: float) -> None:
        if due != self._armed:
            return
        self._armed = math.inf
        for job in self._instance.advance(self._clock.now):
            self._finished(job, job.finished_s)
        self._arm()
