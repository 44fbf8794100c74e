"""A rank loads the segments of a lease."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenlake.identity import LeaseId
from tokenlake.wire import Code
from tokenlake_client.engines.vllm.load_worker import LEAST_LEFT_S, WINDOW, load_blocks
from tokenlake_client.engines.vllm.step_plan import LoadPlan


class Watched:
    """A pool with one lease, and a copy that fails at the second segment; both record their calls."""

    session = 1
    incarnation = 1
    hits = 2

    def __init__(self) -> None:
        self.story: list[str] = []

    def attach(self, *parts: LeaseId, request: str, deadline_s: float | None = None) -> Watched:
        return self

    def fetch(self, start: int, stop: int, *, at_most_s: float = 0.0) -> list[NDArray[np.uint8]]:
        return [np.zeros(1, np.uint8) for _ in range(start, stop)]

    def code(self, index: int) -> Code:
        return Code.LOCAL

    def release(self) -> None:
        self.story.append("released")

    def close(self) -> None: ...

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        if "begun" in self.story:
            raise RuntimeError("the device is gone")
        self.story.append("begun")

    def finish(self) -> None:
        self.story.append("finished")


def test_copies_finish_before_the_lease_is_released() -> None:
    """Without this order, a failed copy releases slots and blocks that the device still reads and writes."""
    watched = Watched()
    with pytest.raises(RuntimeError, match="the device is gone"):
        load_blocks(watched, LoadPlan("r", (1,), 1, 0, 32, (0, 1), local=True), watched, 16, 16)
    assert watched.story == ["begun", "finished", "released"]


def test_all_windows_of_a_load_share_one_limit() -> None:
    """A load without a limit passes none on."""

    class Slow(Watched):
        hits = 3 * WINDOW

        def __init__(self) -> None:
            super().__init__()
            self.limits: list[float] = []

        def fetch(self, start: int, stop: int, *, at_most_s: float = 0.0) -> list[NDArray[np.uint8]]:
            self.limits.append(at_most_s)
            time.sleep(0.01)
            return super().fetch(start, stop)

        def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None: ...

    for limit_s in (0.0, 0.015):
        slow = Slow()
        count = 3 * WINDOW
        plan = LoadPlan("r", (1,), 1, 0, 16 * count, tuple(range(count)), local=False, at_most_s=limit_s)
        load_blocks(slow, plan, slow, 16, 16)
        first, second, third = slow.limits
        if limit_s:
            assert limit_s >= first > second
            assert third == LEAST_LEFT_S, "the limit has passed"
        else:
            assert (first, second, third) == (0.0, 0.0, 0.0)
