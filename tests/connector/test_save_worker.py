"""A rank stores segments in order, behind a bounded queue, and gives blocks back when asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.connector.fakes import FakePool
from tokenlake.wire import Code
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.save_worker import SaveWriter
from tokenlake_client.engines.vllm.step_plan import SavePlan


class Recorder:
    """Records the copies; a copy waits while the gate is closed."""

    def __init__(self) -> None:
        self.copied: list[tuple[int, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.copying = threading.Event()

    def to_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        self.copying.set()
        assert self.gate.wait(10)
        self.copied.append(tuple(blocks))


def store(pool: Any, plan: SavePlan, fill: Callable[[int, NDArray[np.uint8]], None], since: float) -> bytes:
    for index in range(len(plan.keys)):
        fill(index, np.zeros(1, np.uint8))
    return bytes([Code.COMMITTED]) * len(plan.keys)


def writer(recorder: Recorder, queue: int = 8, errors: list[str] | None = None) -> tuple[SaveWriter, EngineCounters]:
    counters = EngineCounters()
    report = (lambda what, error: None) if errors is None else (lambda what, error: errors.append(str(error)))
    return SaveWriter(recorder, store, counters, report, tokens=4, queue=queue), counters


def plan(job: int, segments: int = 2) -> SavePlan:
    return SavePlan(job, "r", 0, (b"k",) * segments, tuple(range(10 * job, 10 * job + segments)))


def submit(saves: SaveWriter, *plans: SavePlan) -> None:
    for one in plans:
        saves.submit(one, object, lambda: None)


def test_jobs_are_executed_in_order_and_counted() -> None:
    recorder = Recorder()
    saves, counters = writer(recorder)
    submit(saves, plan(1), plan(2))
    assert saves.flush(10)
    assert (saves.done, recorder.copied) == (2, [(10,), (11,), (20,), (21,)])
    assert counters.read().tokens_stored == 16
    saves.close(10)


def test_blocks_taken_back_are_not_read() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    saves, counters = writer(recorder)
    submit(saves, plan(1), plan(2), plan(3))
    assert recorder.copying.wait(10)
    assert saves.done == 0
    taker = threading.Thread(target=saves.take_back, args=([1, 2],))
    taker.start()
    # `take_back` returns only after the segment that is being copied.
    taker.join(0.05)
    assert taker.is_alive()
    recorder.gate.set()
    taker.join(10)
    seen = list(recorder.copied)
    assert saves.flush(10)
    assert seen[:1] == [(10,)]
    assert recorder.copied == [(10,), (30,), (31,)]
    assert (saves.done, counters.read().tokens_not_stored) == (3, 16)
    saves.close(10)


def test_jobs_beyond_the_queue_are_counted_as_lost() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    saves, counters = writer(recorder, queue=1)
    submit(saves, plan(1))
    assert recorder.copying.wait(10)
    submit(saves, plan(2), plan(3))
    assert counters.read().tokens_not_stored == 8
    recorder.gate.set()
    assert saves.flush(10)
    assert saves.done == 3
    saves.close(10)


def test_an_error_ends_only_its_job() -> None:
    recorder, errors = Recorder(), list[str]()
    saves, counters = writer(recorder, errors=errors)

    def broken() -> object:
        raise RuntimeError("no pool")

    saves.submit(plan(1), broken, lambda: None)
    submit(saves, plan(2))
    assert saves.flush(10)
    assert (errors, saves.done, counters.read().tokens_stored) == (["no pool"], 2, 8)
    saves.close(10)


def test_skipped_jobs_are_done() -> None:
    saves, _ = writer(Recorder())
    saves.skip(5)
    assert saves.done == 5


@pytest.mark.parametrize("marked", [True, False])
def test_refused_segments_lose_their_markers(marked: bool) -> None:
    pool, counters = FakePool(), EngineCounters()
    codes = bytes([Code.COMMITTED, Code.WRITE_BUDGET, Code.EXISTS])
    saves = SaveWriter(
        Recorder(), lambda pool, plan, fill, since: codes, counters, lambda what, error: None, tokens=4, queue=8
    )
    save = SavePlan(1, "r", 0, (b"a", b"b", b"c"), (1, 2, 3), marked=marked)
    saves.submit(save, lambda: pool, lambda: None)
    assert saves.flush(10)
    assert pool.marked == ([((b"b",), 0.0)] if marked else [])
    assert (counters.read().tokens_stored, counters.read().tokens_not_stored) == (4, 8)


@pytest.mark.parametrize(("reason", "lost"), [("queue", 3), ("taken", 1), ("waiting", 2), ("error", 2)])
def test_jobs_that_are_given_up_lose_their_markers(reason: str, lost: int) -> None:
    """Other engines would wait for segments that are never stored."""
    pool, recorder = FakePool(), Recorder()

    def store_or_raise(
        pool: Any, plan: SavePlan, fill: Callable[[int, NDArray[np.uint8]], None], since: float
    ) -> bytes:
        if (reason, plan.job) == ("error", lost):
            raise RuntimeError("no slots")
        return store(pool, plan, fill, since)

    saves = SaveWriter(recorder, store_or_raise, EngineCounters(), lambda what, error: None, tokens=4, queue=1)
    recorder.gate.clear()
    for job in (1, 2, 3) if reason == "queue" else (1, 2):
        save = SavePlan(job, "r", 0, (bytes([job]), bytes([job, 1])), (job, 10 * job), marked=True)
        saves.submit(save, lambda: pool, lambda: None)
        assert recorder.copying.wait(10)
    opens = threading.Timer(0.05, recorder.gate.set)
    opens.start()
    if reason in ("taken", "waiting"):
        saves.take_back([lost])
    opens.join()
    assert saves.flush(10)
    assert pool.marked == [((bytes([lost]), bytes([lost, 1])), 0.0)]
    saves.close(10)
