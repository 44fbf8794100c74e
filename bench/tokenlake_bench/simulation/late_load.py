"""Delays the loads that nodes report, to check that the rules decide well on old reports."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec

__all__ = ["LateLoad"]

M = TypeVar("M", bound=msgspec.Struct)


class LateLoad:
    """Replaces the load in each frame by the load that its sender reported `delay_s` ago; other fields stay."""

    def __init__(self, delay_s: float, nodes: int) -> None:
        self._delay_s = delay_s
        self._reports: list[deque[tuple[float, float]]] = [deque() for _ in range(nodes)]
        """Per node, (time, load) of its reports; the first is the newest that is old enough."""

    def pass_on(self, now: float, sender: int, message: M) -> M:
        """The frame as its receiver gets it."""
        load = getattr(message, "load", None)
        if load is None:
            return message
        reports = self._reports[sender]
        reports.append((now, load))
        while len(reports) > 1 and reports[1][0] <= now - self._delay_s:
            reports.popleft()
        at, known = reports[0]
        return msgspec.structs.replace(message, load=known if at <= now - self._delay_s else 0.0)
