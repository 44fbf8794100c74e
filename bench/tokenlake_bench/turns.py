"""The times at which the requests of a workload arrive at simulated engines.

A request that follows another one arrives `pause_s` after the answer to that request (closed loop); any other request
arrives at its recorded time. A workload in which no request follows another one is an open loop.

::

    recorded:   request 0 |--- answer ---|.. pause ..| request 1 |-- answer --|
    simulated:  request 0 |------ slower answer ------|.. pause ..| request 1 |-- ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from tokenlake.errors import ConfigurationError
from tokenlake_testing.clock import Clock


class Turn(Protocol):
    """The part of a request that decides when it arrives. `at_s`: its recorded time, in seconds of the workload.
    `follows`: number of the request whose answer it waits for, smaller than its own; requests are numbered from 0 in
    the workload's order; None: it arrives at its recorded time. `pause_s`: seconds between that answer and this
    request, at least 0."""

    @property
    def at_s(self) -> float: ...

    @property
    def follows(self) -> int | None: ...

    @property
    def pause_s(self) -> float: ...


R = TypeVar("R", bound=Turn)


class ClockedTurns(Generic[R]):
    """Calls `arrive(number, request, at_s)` once for each request when it is due, on a simulated clock.

    `at_s` is the request's arrival in seconds of the workload, which begin at the clock's time `begins_s`. Each answer
    has to be reported with `answered` for the requests that follow it to be due.
    """

    def __init__(
        self, requests: Sequence[R], clock: Clock, arrive: Callable[[int, R, float], None], begins_s: float = 0.0
    ) -> None:
        """Raises ConfigurationError for a request that does not follow an earlier one."""
        self._requests = requests
        self._followers: dict[int, list[tuple[int, R]]] = {}
        """By the number of the request whose answer is missing: the requests that wait for it, with their numbers."""
        for number, request in enumerate(requests):
            if request.follows is not None:
                if not 0 <= request.follows < number:
                    raise ConfigurationError("follows", request.follows, f"a number from 0 to {number - 1}")
                self._followers.setdefault(request.follows, []).append((number, request))
        self.closed = bool(self._followers)
        """Whether any request waits for the answer to another one (closed loop)."""
        self._clock = clock
        self._arrive = arrive
        self._begins_s = begins_s
        self._pausing = 0
        self.last_s = 0.0
        """Time on the simulated clock of the latest arrival that is known so far, which may be ahead."""

    def start(self) -> None:
        """Advance the clock to the last request that follows no other. Callbacks of the clock run meanwhile, and the
        requests that follow others arrive among them."""
        for number, request in enumerate(self._requests):
            if request.follows is None:
                due = self._begins_s + request.at_s
                self._clock.run_until(due)
                self.last_s = max(self.last_s, due)
                self._arrive(number, request, request.at_s)

    def answered(self, number: int) -> None:
        """Report that request `number` is answered now; the requests that wait for it arrive after their pauses."""
        for following, request in self._followers.pop(number, ()):
            self._pausing += 1
            due = self._clock.now + request.pause_s
            self.last_s = max(self.last_s, due)
            self._clock.at(due, self._ends_pause, following, request)

    @property
    def over(self) -> bool:
        """Whether every request has arrived, as far as `start` has read the requests."""
        return not self._pausing and not self._followers

    def _ends_pause(self, number: int, request: R) -> None:
        self._pausing -= 1
        self._arrive(number, request, self._clock.now - self._begins_s)
