"""Simulated time, and channels whose frames take some."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Channel", "Clock"]

T = TypeVar("T")

SLOW_SHARE = 0.03
"""Of the frames that take longer than a match may wait."""
STALL_SHARE = 0.3
"""Of the transfers that stand still once, some for longer than their deadline."""


class Clock:
    """What happens when; things due at the same time happen in the order in which they were asked for."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.slow_share = SLOW_SHARE
        self.stall_share = STALL_SHARE
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, time: float, callback: Callable[[], None]) -> None:
        """Call `callback` at `time`, or next when that is past."""
        self._asked += 1
        heapq.heappush(self._heap, (max(time, self.now), self._asked, callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` in `delay_s` from now."""
        self.at(self.now + delay_s, callback)

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, callback = heapq.heappop(self._heap)
            callback()
        self.now = until

    def delay_s(self) -> float:
        """Of one frame."""
        if self.random.random() < self.slow_share:
            return 0.030
        return self.random.uniform(0.0001, 0.002)


class Channel(Generic[T]):
    """One direction of a connection: frames arrive in order, each after a delay of its own."""

    def __init__(self, clock: Clock, deliver: Callable[[T], None]) -> None:
        self._clock = clock
        self._deliver = deliver
        self._last = 0.0
        self._life = 0

    def send(self, frame: T) -> None:
        """It arrives after all that was sent before."""
        life = self._life
        self._last = max(self._last, self._clock.now + self._clock.delay_s())
        self._clock.at(self._last, lambda: self._deliver(frame) if life == self._life else None)

    def cut(self) -> None:
        """What is under way is lost."""
        self._life += 1
        self._last = 0.0
