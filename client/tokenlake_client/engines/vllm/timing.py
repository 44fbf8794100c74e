"""How long a rank's steps take, and which of them tell the time of a prefill. Imports no engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenlake.planner import PrefillFit
from tokenlake_client.engines.vllm.entry import Scheduled

__all__ = ["Marks", "Prefills", "StepWatch"]

PENDING = 16
"""Steps whose time is not known yet: older ones are forgotten."""


class Marks(Protocol):
    """Moments on the device that computes."""

    def mark(self) -> Any:
        """Now, behind what was begun so far."""
        ...

    def between(self, first: Any, last: Any) -> float | None:
        """Seconds; None while the second is still to come."""
        ...


class StepWatch:
    """For the thread that runs a rank's steps. Waits for nothing: on a GPU a time is known some steps later."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._first: Any = None
        self._ended: deque[tuple[int, Any, Any]] = deque(maxlen=PENDING)

    def start(self) -> None:
        """The step begins to compute; what came before does not count."""
        self._first = self._marks.mark()

    def stop(self, step: int) -> None:
        """It has computed. Only the first call after `start` counts."""
        if self._first is not None:
            self._ended.append((step, self._first, self._marks.mark()))
            self._first = None

    def take(self) -> dict[int, float]:
        """Seconds by step, of those that are known since the last call."""
        known: dict[int, float] = {}
        while self._ended:
            step, first, last = self._ended[0]
            seconds = self._marks.between(first, last)
            if seconds is None:
                break
            known[step] = seconds
            self._ended.popleft()
        return known


class Prefills:
    """Which steps are samples of the prefill's time: those at least half of whose tokens are of prompts. The others
    that are in such a step, a token of each request that decodes, are prefills of one token to it: all terms of the
    fit are sums over the requests of a step."""

    def __init__(self, fit: PrefillFit, clock: Callable[[], float]) -> None:
        self._fit = fit
        self._clock = clock
        self._steps: dict[int, list[tuple[int, int]]] = {}

    def begins(self, step: int, parts: Sequence[Scheduled]) -> None:
        """What `step` computes."""
        prompts = sum(part.new for part in parts if part.new > 1)
        if prompts and 2 * prompts >= sum(part.new for part in parts):
            self._steps[step] = [(part.new, part.computed) for part in parts]
            if len(self._steps) > PENDING:
                del self._steps[next(iter(self._steps))]

    def took(self, step: int, seconds: float) -> None:
        """`step` computed for so long. Only what is said of it first counts."""
        parts = self._steps.pop(step, None)
        if parts is not None:
            self._fit.add_step(parts, seconds, self._clock())
