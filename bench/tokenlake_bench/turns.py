"""The times at which the requests of a workload arrive.

A request that follows another one arrives `pause_s` after the answer to that request (closed loop); any other request
arrives at its recorded time. A workload in which no request follows another one is an open loop.

::

    recorded:   request 0 |--- answer ---|.. pause ..| request 1 |-- answer --|
    replayed:   request 0 |------ slower answer ------|.. pause ..| request 1 |-- ...
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from tokenlake.errors import ConfigurationError
from tokenlake_testing.clock import Clock


class Turn(Protocol):
    """The part of a request that decides when it arrives: at its recorded time, or some time after the answer to
    another request."""

    @property
    def at_s(self) -> float:
        """Recorded time of arrival, in seconds of the workload."""
        ...

    @property
    def follows(self) -> int | None:
        """Number of the request whose answer this request waits for, a smaller one than its own; requests are numbered
        from 0 in the workload's order. None: the request arrives at its recorded time."""
        ...

    @property
    def pause_s(self) -> float:
        """Seconds between the answer to the request `follows` and this request, at least 0."""
        ...


R = TypeVar("R", bound=Turn)
Numbered = tuple[int, R]
"""A pair of (number of the request, request)."""


class Turns(Generic[R]):
    """Finds the requests of a workload that wait for a given answer, and those that wait for none. Each request is
    handed out once.

    A sequence is read at once, and only the requests that follow others are kept. Any other iterable is read as
    `starts` goes on; it must be an open loop, because a request that follows another one may arrive earlier than
    recorded.
    """

    def __init__(self, requests: Iterable[R]) -> None:
        """Raises ConfigurationError for a request that does not follow an earlier one."""
        self._requests = requests
        self._followers: dict[int, list[Numbered[R]]] = {}
        """By the number of the request whose answer is missing: the requests that wait for it."""
        if isinstance(requests, Sequence):
            for number, request in enumerate(requests):
                if request.follows is not None:
                    if not 0 <= request.follows < number:
                        raise ConfigurationError("follows", request.follows, f"a number from 0 to {number - 1}")
                    self._followers.setdefault(request.follows, []).append((number, request))

    def __len__(self) -> int:
        """Number of requests that wait for the answer to another request."""
        return sum(map(len, self._followers.values()))

    def starts(self) -> Iterator[Numbered[R]]:
        """The requests that follow no other request, in order. Raises ConfigurationError if the requests are read one
        at a time and one of them follows another."""
        for number, request in enumerate(self._requests):
            if request.follows is None:
                yield number, request
            elif not isinstance(self._requests, Sequence):
                raise ConfigurationError("follows", request.follows, "absent: the requests are read one at a time")

    def answered(self, number: int) -> list[Numbered[R]]:
        """Returns the requests of the workload that follow request `number`: they wait until the engine has answered
        it. Each is returned once: the list is empty from the second call with the same number on."""
        return self._followers.pop(number, [])


class ClockedTurns(Generic[R]):
    """Calls `arrive(number, request, at_s)` for each request when it is due, on a simulated clock.

    `at_s` is the request's arrival in seconds of the workload, which begin at the clock's time `begins_s`. A request is
    due once; its answer has to be reported with `answered` for those that follow it to be due.
    """

    def __init__(
        self, requests: Iterable[R], clock: Clock, arrive: Callable[[int, R, float], None], begins_s: float = 0.0
    ) -> None:
        self._turns = Turns(requests)
        self.closed = bool(self._turns)
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
        for number, request in self._turns.starts():
            due = self._begins_s + request.at_s
            self._clock.run_until(due)
            self.last_s = max(self.last_s, due)
            self._arrive(number, request, request.at_s)

    def answered(self, number: int) -> None:
        """Report that request `number` is answered now; the requests that wait for it arrive after their pauses."""
        for following, request in self._turns.answered(number):
            self._pausing += 1
            due = self._clock.now + request.pause_s
            self.last_s = max(self.last_s, due)
            self._clock.at(due, self._ends_pause, following, request)

    @property
    def over(self) -> bool:
        """Whether every request has arrived, as far as `start` has read the requests."""
        return not self._pausing and not self._turns

    def _ends_pause(self, number: int, request: R) -> None:
        self._pausing -= 1
        self._arrive(number, request, self._clock.now - self._begins_s)


class DueTurns(Generic[R]):
    """Requests for a replay without an engine: iterate for (time at which it is due, number, request), in order of
    time, and report each answer before the next step.

    An answer without an engine takes less time than the recorded one. A request is due at its recorded time, or a pause
    after the answer that it waits for, whichever is later; with answers that take no time, at its recorded time.
    """

    def __init__(self, requests: Sequence[R]) -> None:
        self._turns = Turns(requests)
        self._due = [(request.at_s, number, request) for number, request in self._turns.starts()]
        heapq.heapify(self._due)

    def __iter__(self) -> Iterator[tuple[float, int, R]]:
        while self._due:
            yield heapq.heappop(self._due)

    def answered(self, number: int, at_s: float) -> None:
        """Report that request `number` was answered at `at_s`, in seconds of the workload."""
        for following, request in self._turns.answered(number):
            heapq.heappush(self._due, (max(request.at_s, at_s + request.pause_s), following, request))
