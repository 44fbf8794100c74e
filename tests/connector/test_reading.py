from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenlake.identity import LeaseId
from tokenlake_client.engines.vllm.plan import LoadPlan
from tokenlake_client.engines.vllm.reading import load_blocks


class Watched:
    """A pool with one lease, and a copier that fails at the second segment; both note what happens."""

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

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        if "begun" in self.story:
            raise RuntimeError("the device is gone")
        self.story.append("begun")

    def finish(self) -> None:
        self.story.append("finished")


def test_a_copy_that_was_begun_ends_before_its_slot_is_given_back() -> None:
    """Where a later copy failed, its slot and its blocks went to others while the device still read and wrote them."""
    watched = Watched()
    with pytest.raises(RuntimeError, match="the device is gone"):
        load_blocks(watched, LoadPlan("r", 1, 1, 0, 32, (0, 1), here=True), watched, 16, 16)
    assert watched.story == ["begun", "finished", "released"]
