"""Simulated time with random delays, and channels whose frames take them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, TypeVar

from tokenlake_testing.clock import Clock

T = TypeVar("T")

SLOW_SHARE = 0.03
"""Share of frames that take longer than a match may wait."""
STALL_SHARE = 0.3
"""Share of transfers that stand still once, some for longer than their deadline."""


class RandomClock(Clock):
    """A clock that draws the delays of frames and transfers from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.slow_share = SLOW_SHARE
        self.stall_share = STALL_SHARE

    def delay_s(self) -> float:
        """Draw the delay of one frame."""
        if self.random.random() < self.slow_share:
            return 0.030
        return self.random.uniform(0.0001, 0.002)


class Channel(Generic[T]):
    """One direction of a connection: frames arrive in order, each after a delay of its own."""

    def __init__(self, clock: RandomClock, deliver: Callable[[T], None]) -> None:
        self._clock = clock
        self._deliver = deliver
        self._last = 0.0
        self._life = 0

    def send(self, frame: T) -> None:
        """The frame arrives after all frames that were sent before it."""
        life = self._life
        self._last = max(self._last, self._clock.now + self._clock.delay_s())
        self._clock.at(self._last, lambda: self._deliver(frame) if life == self._life else None)

    def cut(self) -> None:
        """Lose the frames that have not arrived."""
        self._life += 1
        self._last = 0.0
