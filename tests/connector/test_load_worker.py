"""A rank loads the segments of a lease."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenlake.identity import LeaseId
from tokenlake_client.engines.vllm.load_worker import load_blocks
from tokenlake_client.engines.vllm.step_plan import LoadPlan


class Watched:
    """A pool with one lease, and a copy that fails at the second segment; both record their calls."""

    session = 1
    incarnation = 1
    hits = 2

    def __init__(self) -> None:
        self.story: list[str] = []

    def attach(self, lease: LeaseId, *, request: str) -> Watched:
        return self

    def fetch(self, start: int, stop: int) -> list[NDArray[np.uint8]]:
        return [np.zeros(1, np.uint8) for _ in range(start, stop)]

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
        load_blocks(watched, LoadPlan("r", 1, 1, 0, 32, (0, 1), local=True), watched, 16, 16)
    assert watched.story == ["begun", "finished", "released"]
