"""A rank fills what it can, and names every block that it could not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenlake.errors import Unreachable
from tokenlake_client.engines.vllm.counters import Counters
from tokenlake_client.engines.vllm.plan import LoadPlan, SavePlan, StepPlan
from tokenlake_client.engines.vllm.ranks import RankShards
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.engines.vllm.worker import AbsentWorker, WorkerSide


class Blocks:
    """Stands for vLLM's blocks: what was written into which."""

    def __init__(self) -> None:
        self.filled: list[tuple[int, int]] = []

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        self.filled += [(block, int(slot[0])) for block in blocks]

    def finish(self) -> None: ...

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, last: float) -> float:
        return last - first


class Lease:
    def __init__(self, hits: int, incarnation: int, arrives: int) -> None:
        self.hits, self.incarnation, self._arrives = hits, incarnation, arrives
        self.released = False

    def fetch(self, start: int, stop: int) -> list[NDArray[np.uint8]]:
        return [np.full(1, index, np.uint8) for index in range(start, min(stop, self._arrives))]

    def release(self) -> None:
        self.released = True


def worker(lease: Lease | Exception, blocks: Blocks | None = None) -> tuple[WorkerSide, Blocks]:
    def attach(number: int, *, request: str) -> Lease:
        assert request == "r"
        if isinstance(lease, Exception):
            raise lease
        return lease

    members: Any = SimpleNamespace(get=lambda *args, **kwargs: SimpleNamespace(attach=attach), close=lambda: None)
    blocks = blocks or Blocks()
    shards = RankShards(0, 1, 1, True)
    settings = EngineSettings(segment_tokens=8)
    return WorkerSide(members, blocks, shards, settings, 4, Counters(), lambda what, error: None), blocks


def load(start: int = 0, stop: int = 20) -> StepPlan:
    blocks = tuple(range(50 + start // 4, 50 + stop // 4))
    return StepPlan(1, 7, 1, wait=True, loads=(LoadPlan("r", 9, 1, start, stop, blocks, here=True),))


def run(side: WorkerSide, plan: StepPlan) -> set[int]:
    side.begin(plan)
    side.load()
    side.save()
    assert side.finished() == (set(), set())
    return side.errors()


def test_blocks_are_filled_from_their_segments() -> None:
    side, blocks = worker(Lease(3, 1, 3))
    assert run(side, load(4, 20)) == set()
    assert blocks.filled == [(51, 0), (52, 1), (53, 1), (54, 2)]


@pytest.mark.parametrize(
    ("hits", "arrives", "errors"), [(3, 1, {52, 53, 54}), (2, 2, {54}), (0, 0, {50, 51, 52, 53, 54})]
)
def test_what_is_lost_on_the_way_is_named(hits: int, arrives: int, errors: set[int]) -> None:
    lease = Lease(hits, 1, arrives)
    side, _ = worker(lease)
    assert run(side, load()) == errors
    assert lease.released


def test_a_lease_of_a_daemon_that_restarted_is_not_read() -> None:
    """Its number may be another prompt's lease now."""
    side, blocks = worker(Lease(3, 2, 3))
    assert run(side, load()) == {50, 51, 52, 53, 54}
    assert blocks.filled == []


def test_an_error_is_an_error_of_the_blocks() -> None:
    side, _ = worker(Unreachable("gone"))
    assert run(side, load()) == {50, 51, 52, 53, 54}


def test_a_rank_that_cannot_serve_says_so_for_every_block() -> None:
    rank = AbsentWorker()
    plan = load()
    save = SavePlan(3, "r", 0, (b"k",), (1, 2))
    rank.begin(StepPlan(2, loads=plan.loads, saves=(save,), held=(("done", 3),)))
    rank.load()
    rank.save()
    assert rank.finished() == ({"done"}, {"r"})
    assert rank.errors() == {50, 51, 52, 53, 54}
    report = rank.report()
    assert (report.step, report.done, report.serves) == (2, 3, False)


class Ticking(Blocks):
    """Every look at the clock is a second later; so is every block that is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        super().from_slot(slot, blocks, skip)
        self.now += len(blocks)

    def mark(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize("wait", [True, False])
def test_a_step_is_timed_without_its_loads(wait: bool) -> None:
    side, _ = worker(Lease(3, 1, 3), Ticking())
    plan = replace(load(), wait=wait, idle=True)
    side.begin(plan)
    # vLLM computes behind this where the step waits for it, else before it.
    side.load()
    side.save()
    assert side.report().computed == {1: 1.0}
    side.begin(StepPlan(2))
    side.load()
    side.save()
    assert side.report().computed == {2: 1.0}


@pytest.mark.parametrize("arrives", [3, 2])
def test_a_load_is_timed_and_says_what_was_lost(arrives: int) -> None:
    side, _ = worker(Lease(3, 1, arrives))
    run(side, load())
    assert side.report().loaded["r"].lost == 3 - arrives
    assert side.report().loaded == {}
