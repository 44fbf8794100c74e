"""Load reports as they were some time ago: what a rule decides on a slow gossip must still be right."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec

__all__ = ["LateLoad"]

M = TypeVar("M", bound=msgspec.Struct)


class LateLoad:
    """Every frame that carries its sender's load carries the one of `delay_s` ago; the rest of it is in time."""

    def __init__(self, delay_s: float, nodes: int) -> None:
        self._delay_s = delay_s
        self._said: list[deque[tuple[float, float]]] = [deque() for _ in range(nodes)]
        """Per node, (time, load) of its reports: the newest that is late enough first."""

    def pass_on(self, now: float, sender: int, message: M) -> M:
        """The frame as it arrives."""
        load = getattr(message, "load", None)
        if load is None:
            return message
        said = self._said[sender]
        said.append((now, load))
        while len(said) > 1 and said[1][0] <= now - self._delay_s:
            said.popleft()
        at, known = said[0]
        return msgspec.structs.replace(message, load=known if at <= now - self._delay_s else 0.0)
