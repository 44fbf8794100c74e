"""A rank fills the blocks that it can, and reports all others as errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenlake.errors import Unreachable
from tokenlake.wire import Code
from tokenlake_client.engines.vllm import save_worker as save_module
from tokenlake_client.engines.vllm import worker as worker_module
from tokenlake_client.engines.vllm.adapters import AdapterUse, LoadedAdapters
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.load_cost import MAX_STEPS
from tokenlake_client.engines.vllm.ranks import RankShards
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.engines.vllm.step_plan import LoadPlan, SavePlan, StepPlan
from tokenlake_client.engines.vllm.worker import StepTimer, UnservedWorker, WorkerSide


class Blocks:
    """Stands for vLLM's blocks: records (block, segment) of each write."""

    def __init__(self) -> None:
        self.filled: list[tuple[int, int]] = []

    def from_slot(self, slot: NDArray[np.uint8], blocks: Sequence[int], skip: int) -> None:
        self.filled += [(block, int(slot[0])) for block in blocks]

    def finish(self) -> None: ...

    def computed(self) -> Callable[[], None]:
        return self.finish

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, last: float) -> float:
        return last - first


class Lease:
    def __init__(self, hits: int, incarnation: int, arrives: int) -> None:
        self.hits, self.incarnation, self._arrives = hits, incarnation, arrives
        self.released = False

    def fetch(self, start: int, stop: int, *, at_most_s: float = 0.0) -> list[NDArray[np.uint8]]:
        return [np.full(1, index, np.uint8) for index in range(start, min(stop, self._arrives))]

    def code(self, index: int) -> Code:
        return Code.LOST

    def release(self) -> None:
        self.released = True


def worker(
    lease: Lease | Exception,
    blocks: Blocks | None = None,
    adapters: LoadedAdapters | None = None,
    stored: list[bytes] | None = None,
    warn: Callable[[str], None] = print,
) -> tuple[WorkerSide, Blocks]:
    """`stored`: the stored keys are added to this list."""

    def attach(number: int, *, request: str, deadline_s: float | None) -> Lease:
        assert request == "r"
        if isinstance(lease, Exception):
            raise lease
        return lease

    def store_all(keys: Sequence[bytes], *_: Any, **__: Any) -> bytes:
        assert stored is not None
        stored.extend(keys)
        return bytes([Code.COMMITTED] * len(keys))

    pool = SimpleNamespace(attach=attach, store_all=store_all)
    members: Any = SimpleNamespace(get=lambda *args, **kwargs: pool, close=lambda: None)
    blocks = blocks or Blocks()
    shards = RankShards(0, 1, 1, True)
    settings = EngineSettings(segment_tokens=8)
    counters = EngineCounters()
    side = WorkerSide(members, blocks, shards, settings, 4, counters, lambda what, error: None, warn, adapters)
    return side, blocks


def load(start: int = 0, stop: int = 20) -> StepPlan:
    blocks = tuple(range(50 + start // 4, 50 + stop // 4))
    return StepPlan(1, 7, 1, wait=True, loads=(LoadPlan("r", (9,), 1, start, stop, blocks, local=True),))


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
    ("hits", "arrives", "errors", "reason"),
    [
        (3, 1, {52, 53, 54}, "segment 1 was not delivered (LOST)"),
        (2, 2, {54}, "the lease of its segments from 2 on has ended"),
        (0, 0, {50, 51, 52, 53, 54}, "the lease of its segments from 0 on has ended"),
    ],
)
def test_blocks_of_lost_segments_are_errors(hits: int, arrives: int, errors: set[int], reason: str) -> None:
    lease, warned = Lease(hits, 1, arrives), list[str]()
    side, _ = worker(lease, warn=warned.append)
    assert run(side, load()) == errors
    assert warned == [f"vLLM computes tokens of request 'r' that it was to load: {reason}"]
    assert lease.released


def test_a_lease_of_an_earlier_incarnation_is_not_read() -> None:
    """The number of the lease may belong to a lease of another prompt in the next incarnation."""
    warned: list[str] = []
    side, blocks = worker(Lease(3, 2, 3), warn=warned.append)
    assert run(side, load()) == {50, 51, 52, 53, 54}
    assert blocks.filled == []
    assert "the daemon has restarted" in warned[0]


def test_an_error_of_the_pool_fails_the_blocks() -> None:
    side, _ = worker(Unreachable("gone"))
    assert run(side, load()) == {50, 51, 52, 53, 54}


def test_a_full_queue_waits_as_long_as_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the blocks of a finished request until its job and those before it have ended."""
    now, begun, patiences = 0.0, threading.Event(), []
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr(worker_module, "time", clock)
    monkeypatch.setattr(save_module, "time", clock)

    def refused(keys: Sequence[bytes], fill: Any, first: int, patience: float, **_: Any) -> bytes:
        nonlocal now
        patiences.append(patience)
        now += patience
        return bytes([Code.WRITE_BUDGET] * len(keys))

    def pool(*_: Any) -> Any:
        assert begun.wait(10)
        return SimpleNamespace(store_all=refused)

    members: Any = SimpleNamespace(get=pool, close=lambda: None)
    settings, counters = EngineSettings(segment_tokens=8), EngineCounters()
    shards = RankShards(0, 1, 1, True)
    side = WorkerSide(members, Blocks(), shards, settings, 4, counters, lambda what, error: None, print)
    saves = tuple(SavePlan(job, "r", 0, (b"k",), (2 * job, 2 * job + 1)) for job in range(1, settings.write_queue))
    side.begin(StepPlan(1, saves=saves, held=(("r", saves[-1].job),)))
    side.save()
    assert side.finished() == (set(), set())
    begun.set()
    assert side.flush(10)
    assert side.finished() == ({"r"}, set())
    assert (len(patiences), sum(patiences)) == (len(saves), settings.write_patience_s)
    side.close()


def test_an_unserved_rank_fails_every_block() -> None:
    rank = UnservedWorker()
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
    """The clock advances by a second with each timestamp and each filled block."""

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
    # vLLM computes after this call if the step waits for loads, otherwise before it.
    side.load()
    side.save()
    assert side.report().computed == {1: 1.0}
    side.begin(StepPlan(2))
    side.load()
    side.save()
    assert side.report().computed == {2: 1.0}


class SlowLease(Lease):
    def fetch(self, start: int, stop: int, *, at_most_s: float = 0.0) -> list[NDArray[np.uint8]]:
        time.sleep(0.05)
        return super().fetch(start, stop, at_most_s=at_most_s)


def test_an_idle_step_waits_for_the_end_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "IDLE_S", 30.0)
    side, _ = worker(SlowLease(3, 1, 3))
    plan = load()
    side.begin(replace(plan, wait=False, idle=True, loads=tuple(replace(each, local=False) for each in plan.loads)))
    side.load()
    assert side.finished()[1] == {"r"}


@pytest.mark.parametrize("arrives", [3, 2])
def test_a_load_reports_its_time_and_losses(arrives: int) -> None:
    side, _ = worker(Lease(3, 1, arrives))
    run(side, load())
    assert side.report().loaded["r"].lost == 3 - arrives
    assert side.report().loaded == {}


class Device:
    """Timestamps are numbers; the device has reached the timestamp `reached`."""

    def __init__(self) -> None:
        self.marks = 0
        self.reached = 1 << 30

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def between(self, first: int, last: int) -> float | None:
        return None if last > self.reached else float(last - first)


def test_a_step_is_timed_from_last_start_to_first_stop() -> None:
    device = Device()
    watch = StepTimer(device)
    watch.start()
    device.mark()
    watch.start()
    watch.stop(1)
    watch.stop(1)
    assert watch.take() == {1: 1.0}
    assert watch.take() == {}


def test_a_time_is_known_once_the_device_reached_it() -> None:
    device = Device()
    device.reached = 2
    watch = StepTimer(device)
    for step in range(1, 4):
        watch.start()
        watch.stop(step)
    assert watch.take() == {1: 1.0}
    device.reached = 6
    assert watch.take() == {2: 1.0, 3: 1.0}
    device.reached = 0
    for step in range(100):
        watch.start()
        watch.stop(step)
    device.reached = 1 << 30
    assert len(watch.take()) == MAX_STEPS


class _NeverJoined:
    """A session that cannot be joined: it waits for as long as it may, and records that time."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def get(self, session: int, incarnation: int, wait_s: float = 0.05) -> None:
        self.waits.append(wait_s)

    def close(self) -> None: ...


@pytest.mark.parametrize(("at_most_s", "wait_s"), [(0.05, 0.05), (9.0, 0.25), (0.0, 0.25)])
def test_a_load_joins_the_session_within_its_limit(at_most_s: float, wait_s: float) -> None:
    session: Any = _NeverJoined()
    warned: list[str] = []
    side = WorkerSide(
        session,
        Blocks(),
        RankShards(0, 1, 1, True),
        EngineSettings(segment_tokens=8, call_ms=250.0),
        4,
        EngineCounters(),
        lambda what, error: None,
        warned.append,
    )
    (one,) = load().loads
    side.begin(StepPlan(1, 7, 1, loads=(replace(one, at_most_s=at_most_s, local=False),)))
    side.load()
    deadline = time.monotonic() + 10
    while side.finished() == (set(), set()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert session.waits == [wait_s]
    assert "this rank has not joined the scheduler's session" in warned[0]
    assert side.errors() == {50, 51, 52, 53, 54}


@pytest.mark.parametrize(("call_ms", "wait_s"), [(250.0, 5.0), (20_000.0, 20.0)])
def test_a_store_joins_within_the_deadline_of_connections(call_ms: float, wait_s: float) -> None:
    session: Any = _NeverJoined()
    settings, counters = EngineSettings(segment_tokens=8, call_ms=call_ms), EngineCounters()
    side = WorkerSide(
        session, Blocks(), RankShards(0, 1, 1, True), settings, 4, counters, lambda what, error: None, print
    )
    side.begin(StepPlan(1, 7, 1, saves=(SavePlan(1, "r", 0, (b"k",), (2, 3)),)))
    side.save()
    assert side.flush(10.0)
    assert session.waits == [wait_s]
    assert counters.read().tokens_not_stored == 8


def test_a_device_that_cannot_mark_a_step_keeps_no_blocks() -> None:
    """vLLM keeps the blocks of a finished request until its save job is reported as done."""

    class Failing(Blocks):
        def computed(self) -> Callable[[], None]:
            raise RuntimeError("no events")

    stored: list[bytes] = []
    side, _ = worker(Lease(0, 1, 0), Failing(), stored=stored)
    side.begin(StepPlan(1, 7, 1, saves=(SavePlan(1, "r", 0, (b"k",), (1, 2)),), held=(("r", 1),)))
    side.save()
    assert side.flush(20)
    assert side.finished() == ({"r"}, set())
    assert stored == []


def test_a_rank_executes_plans_of_loaded_adapters() -> None:
    """Plans state the files that were digested for the keys; vLLM may have loaded older ones."""
    use = AdapterUse(5, "new")
    save = SavePlan(1, "r", 0, (b"k",), (1, 2), adapter=use)
    plan = load()
    plan = replace(plan, loads=tuple(replace(one, adapter=use) for one in plan.loads), saves=(save,))
    outcomes: list[tuple[str, set[int], list[bytes]]] = [("old", {50, 51, 52, 53, 54}, []), ("new", set(), [b"k"])]
    for files, errors, keys in outcomes:
        adapters = LoadedAdapters(lambda line: None)
        adapters.loaded(5, files)
        stored: list[bytes] = []
        side, _ = worker(Lease(3, 1, 3), adapters=adapters, stored=stored)
        assert run(side, plan) == errors
        assert side.flush(20)
        assert side.report().done == 1
        assert stored == keys
