"""A rank fills the blocks that it can, and reports all others as errors; it stores segments in order, behind a bounded
queue, and gives blocks back when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engines.chunk_pool import layout_of
from tokenlake.errors import Unreachable
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code, engine
from tokenlake_client.engines.vllm import load_worker as load_module
from tokenlake_client.engines.vllm import save_worker as save_module
from tokenlake_client.engines.vllm.adapters import LoadedAdapters
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.known import worker as worker_module
from tokenlake_client.engines.vllm.known.load_cost import MAX_STEPS
from tokenlake_client.engines.vllm.known.ranks import RankShards
from tokenlake_client.engines.vllm.known.step_plan import LoadPlan, SavePlan, StepPlan
from tokenlake_client.engines.vllm.known.worker import StepTimer, UnservedWorker, WorkerSide
from tokenlake_client.engines.vllm.load_worker import LEAST_LEFT_S, load_parts
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_client.engines.vllm.session import RankSession
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.lease import Lease
from tokenlake_client.testing import MemoryDaemon, MemoryPool

TIMEOUT_S = 10.0
LAYOUT = layout_of()
SETTINGS = EngineSettings(segment_tokens=8)
ALL = {50, 51, 52, 53, 54}


class Blocks:
    """Stands for vLLM's blocks, of which two hold a segment. Records what is read and filled; a read waits while the
    gate is closed. The clock advances by a second with each timestamp and each filled block."""

    def __init__(self) -> None:
        self.filled: list[tuple[int, int]] = []
        self.copied: list[int] = []
        self.gate, self.copying = threading.Event(), threading.Event()
        self.gate.set()
        self.now = 0.0

    def from_slot(self, slot: NDArray[np.uint8], part: Part) -> int:
        self.filled += [(block, int(slot[0])) for block in part.blocks]
        self.now += len(part.blocks)
        return len(part.blocks)

    def to_slot(self, slot: NDArray[np.uint8], part: Part) -> int:
        self.copying.set()
        assert self.gate.wait(TIMEOUT_S)
        self.copied.append(part.blocks[0])
        return 0

    def finish(self) -> None: ...

    def computed(self) -> Callable[[], None]:
        return self.finish

    def mark(self) -> float:
        self.now += 1
        return self.now

    def between(self, first: float, last: float) -> float:
        return last - first


class Rank:
    """A rank, its blocks, and a pool with the three segments of request "r", which the scheduler's side has leased."""

    def __init__(
        self,
        settings: EngineSettings = SETTINGS,
        adapters: LoadedAdapters | None = None,
        session: Any = None,
        *,
        verify: bool = False,
    ) -> None:
        self.daemon = MemoryDaemon()
        self.pool = MemoryPool(LAYOUT, self.daemon)
        self.keys = keys("r0", "r1", "r2")
        self.pool.store_all(self.keys, lambda index, slot: slot.fill(index))
        self.lease = self.pool.match(self.keys)
        self.blocks, self.counters = Blocks(), EngineCounters()
        self.warned: list[str] = []
        self.reported: list[str] = []
        self.marked: list[engine.MarkInFlight] = []
        self.daemon.intercept = self._record
        self.side = WorkerSide(
            session or RankSession(lambda number: self.join(verify=verify), self.report),
            self.blocks,
            RankShards(0, 1, 1, True),
            settings,
            4,
            self.counters,
            self.report,
            self.warned.append,
            adapters,
        )

    def join(self, *, verify: bool = False) -> MemoryPool:
        return MemoryPool(LAYOUT, self.daemon, session=self.pool.engine.session, verify=verify)

    def report(self, operation: str, error: BaseException) -> None:
        self.reported.append(f"{operation}: {error}")

    def _record(self, message: engine.EngineRequest) -> None:
        if isinstance(message, engine.MarkInFlight):
            self.marked.append(message)

    def load(self, start: int = 0, stop: int = 20) -> StepPlan:
        blocks = tuple(range(50 + start // 4, 50 + stop // 4))
        plan = LoadPlan("r", tuple(map(int, self.lease.ids)), self.lease.incarnation, start, stop, blocks, local=True)
        return self.step(idle=True, loads=(plan,))

    def step(self, step: int = 1, **fields: Any) -> StepPlan:
        return StepPlan(step, int(self.pool.engine.session), self.pool.engine.incarnation, **fields)

    def run(self, plan: StepPlan) -> set[int]:
        self.side.begin(plan)
        self.side.load()
        self.side.save()
        return self.side.errors()

    def has(self, *names: str) -> int:
        """The number of these segments, from the first on, that the pool has."""
        with self.pool.match(keys(*names)) as lease:
            return lease.hits


def keys(*names: str) -> list[SegmentKey]:
    return [SegmentKey(name.encode().ljust(32, b"\0")) for name in names]


def save(job: int, *names: str, **fields: Any) -> SavePlan:
    blocks = tuple(range(10 * job, 10 * job + 2 * len(names)))
    return SavePlan(job, "r", 0, tuple(map(bytes, keys(*names))), blocks, **fields)


# -- loads


def test_blocks_of_corrupt_and_ended_segments_are_errors() -> None:
    rank = Rank(verify=True)
    region, slot, _ = rank.lease.places[1].tolist()
    rank.pool.link.regions.get(region, write=True).slots[slot] = 9
    assert rank.run(rank.load()) == {52, 53, 54}
    assert rank.side.report().loaded["r"].lost == 2
    plan = rank.load()
    rank.lease.release()
    assert rank.run(plan) == ALL
    begin = "vLLM computes tokens of request 'r' that it was to load: "
    reasons = ["segment 1 has a wrong checksum", "the lease of its segments from 0 on has ended"]
    assert rank.warned == [begin + reason for reason in reasons]


def test_a_lease_of_an_earlier_incarnation_is_not_read() -> None:
    """The number of the lease may belong to a lease of another prompt in the next incarnation."""
    rank, warned = Rank(), []
    for incarnation in (2, 1):
        (one,) = rank.load().loads
        plan = rank.step(idle=True, loads=(replace(one, incarnation=incarnation),))
        warned.append((rank.run(plan), rank.blocks.filled == []))
    assert warned == [(ALL, True), (set(), False)]
    pool = rank.join()
    lost = load_parts(pool, rank.lease.ids, 7, "r", [Part(0, 0, 0, (1,))], rank.blocks)
    assert (lost.blocks, "the daemon has restarted" in lost.unfilled) == (0, True)


def test_copies_finish_before_the_lease_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this order, a failed copy releases slots and blocks that the device still reads and writes."""
    rank, story = Rank(), list[str]()

    def fail(slot: object, part: object) -> int:
        if story:
            raise RuntimeError("the device is gone")
        story.append("begun")
        return 0

    copy = SimpleNamespace(from_slot=fail, finish=lambda: story.append("finished"))
    right = Lease.release

    def release(lease: Lease, *args: Any) -> None:
        story.append("released")
        right(lease, *args)

    monkeypatch.setattr(Lease, "release", release)
    with pytest.raises(RuntimeError, match="the device is gone"):
        load_parts(rank.join(), rank.lease.ids, 1, "r", [Part(0, 0, 0, (0,)), Part(1, 0, 0, (1,))], copy)
    assert story == ["begun", "finished", "released"]


def test_all_windows_of_a_load_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load without a limit passes none on."""
    monkeypatch.setattr(load_module, "WINDOW", 1)
    rank, limits = Rank(), list[float]()
    right = Lease.fetch

    def fetch(lease: Lease, start: int, stop: int, at_most_s: float) -> Any:
        limits.append(at_most_s)
        time.sleep(0.01)
        return right(lease, start, stop)

    monkeypatch.setattr(Lease, "fetch", fetch)
    parts, pool = [Part(at, 0, 0, (at,)) for at in range(3)], rank.join()
    load_parts(pool, rank.lease.ids, 1, "r", parts, rank.blocks)
    assert limits == [0.0, 0.0, 0.0]
    load_parts(pool, rank.lease.ids, 1, "r", parts, rank.blocks, at_most_s=0.015)
    first, second, third = limits[3:]
    assert 0.015 >= first > second
    assert third == LEAST_LEFT_S, "the limit has passed"


def test_a_step_is_timed_without_its_loads() -> None:
    rank = Rank()
    rank.run(rank.load())
    assert rank.side.report().computed == {1: 1.0}
    rank.run(rank.step(2))
    assert rank.side.report().computed == {2: 1.0}


def test_an_idle_step_waits_for_the_end_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "IDLE_S", 30.0)
    rank = Rank()
    (one,) = rank.load().loads
    rank.side.begin(rank.step(idle=True, loads=(replace(one, local=False),)))
    rank.side.load()
    assert rank.side.finished()[1] == {"r"}


class _NeverJoined:
    """A session that cannot be joined: it waits for as long as it may, and records that time."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def get(self, session: int, incarnation: int, wait_s: float = 0.05) -> None:
        self.waits.append(wait_s)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("call_ms", "at_most_s", "load_s", "store_s"),
    [(250.0, 0.05, 0.05, 5.0), (250.0, 9.0, 0.25, 5.0), (20_000.0, 0.0, 20.0, 20.0)],
)
def test_a_session_is_joined_within_its_limits(call_ms: float, at_most_s: float, load_s: float, store_s: float) -> None:
    session: Any = _NeverJoined()
    rank = Rank(EngineSettings(segment_tokens=8, call_ms=call_ms), session=session)
    (one,) = rank.load().loads
    rank.side.begin(rank.step(idle=True, loads=(replace(one, at_most_s=at_most_s),)))
    rank.side.load()
    assert rank.side.finished() == (set(), {"r"})
    assert "this rank has not joined the scheduler's session" in rank.warned[0]
    assert rank.side.errors() == ALL
    rank.run(rank.step(saves=(save(1, "k"),)))
    assert rank.side.flush(TIMEOUT_S)
    assert session.waits == [load_s, store_s]
    assert rank.counters.read().tokens_not_stored == 8


def test_a_load_without_a_lease_leaves_no_session() -> None:
    """The scheduler's side plans it where it could not prepare the load that it had promised to vLLM."""
    rank = Rank()
    assert rank.run(rank.load()) == set()
    joined = rank.side._session._connection.pool
    (one,) = rank.load().loads
    assert rank.run(rank.step(idle=True, loads=(replace(one, leases=(), incarnation=0, local=False),))) == set()
    assert rank.side._loads.flush(TIMEOUT_S)
    assert rank.side.errors() == ALL
    assert rank.side._session._connection.pool is joined is not None


def test_an_unserved_rank_fails_every_block() -> None:
    rank, unserved = Rank(), UnservedWorker()
    unserved.begin(StepPlan(2, loads=rank.load().loads, saves=(save(3, "k"),), held=(("done", 3),)))
    unserved.load()
    unserved.save()
    assert unserved.finished() == ({"done"}, {"r"})
    assert unserved.errors() == ALL
    report = unserved.report()
    assert (report.done, report.serves) == (3, False)


# -- the time of steps


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


def test_a_step_is_timed_once_the_device_reached_it() -> None:
    """From the last start to the first stop."""
    device = Device()
    watch = StepTimer(device)

    def steps(numbers: Iterable[int]) -> None:
        for number in numbers:
            watch.start()
            watch.stop(number)
            watch.stop(number)

    watch.start()
    device.mark()
    device.reached = 5
    steps((1, 2, 3))
    assert watch.take() == {1: 1.0}
    device.reached = 9
    assert watch.take() == {2: 1.0, 3: 1.0}
    assert watch.take() == {}
    device.reached = 0
    steps(range(100))
    device.reached = 1 << 30
    assert len(watch.take()) == MAX_STEPS


# -- saves


def test_blocks_taken_back_are_not_read() -> None:
    rank = Rank()
    rank.blocks.gate.clear()
    rank.run(rank.step(saves=(save(1, "a", "b"), save(2, "c", "d"), save(3, "e", "f"))))
    assert rank.blocks.copying.wait(TIMEOUT_S)
    assert rank.side.report().done == 0
    taker = threading.Thread(target=rank.side.begin, args=(rank.step(2, reused=(1, 2)),))
    taker.start()
    # The step begins only after the segment that is being copied.
    taker.join(0.05)
    assert taker.is_alive()
    rank.blocks.gate.set()
    taker.join(TIMEOUT_S)
    assert rank.side.flush(TIMEOUT_S)
    assert rank.blocks.copied == [10, 30, 32]
    assert (rank.side.report().done, rank.counters.read().tokens_not_stored) == (3, 32)


def test_an_error_ends_only_its_save(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    right = rank.blocks.to_slot

    def broken(slot: NDArray[np.uint8], part: Part) -> int:
        if part.blocks[0] == 10:
            raise RuntimeError("the copy failed")
        return right(slot, part)

    monkeypatch.setattr(rank.blocks, "to_slot", broken)
    rank.run(rank.step(saves=(save(1, "a"), save(2, "b"))))
    assert rank.side.flush(TIMEOUT_S)
    assert rank.reported == ["storing segments: the copy failed"]
    assert (rank.has("a"), rank.has("b"), rank.side.report().done) == (0, 1, 2)


def test_a_device_that_cannot_mark_a_step_keeps_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the blocks of a finished request until its save job is reported as done."""
    rank = Rank()

    def failing() -> Callable[[], None]:
        raise RuntimeError("no events")

    monkeypatch.setattr(rank.blocks, "computed", failing)
    rank.run(rank.step(saves=(save(1, "k"),), held=(("r", 1),)))
    assert rank.side.flush(TIMEOUT_S)
    assert rank.side.finished() == ({"r"}, set())
    assert rank.has("k") == 0


def test_a_full_queue_waits_as_long_as_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the blocks of a finished request until its job and those before it have ended."""
    now, begun, patiences = 0.0, threading.Event(), []
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr(save_module, "time", clock)

    def refused(keys: Any, fill: Any, first: int, patience: float, **_: Any) -> bytes:
        nonlocal now
        patiences.append(patience)
        now += patience
        return bytes([Code.WRITE_BUDGET] * len(keys))

    def pool(*_: Any) -> Any:
        assert begun.wait(TIMEOUT_S)
        return SimpleNamespace(store_all=refused)

    rank = Rank(session=SimpleNamespace(get=pool, close=lambda: None))
    saves = tuple(save(job, "k") for job in range(1, SETTINGS.write_queue))
    rank.run(rank.step(saves=saves, held=(("r", saves[-1].job),)))
    assert rank.side.finished() == (set(), set())
    begun.set()
    assert rank.side.flush(TIMEOUT_S)
    assert rank.side.finished() == ({"r"}, set())
    assert (len(patiences), sum(patiences)) == (len(saves), SETTINGS.write_patience_s)


@pytest.mark.parametrize("marked", [True, False])
def test_refused_segments_lose_their_markers(marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, codes = Rank(), bytes([Code.COMMITTED, Code.WRITE_BUDGET, Code.EXISTS])
    monkeypatch.setattr(MemoryPool, "store_all", lambda *_, **__: codes)
    rank.run(rank.step(saves=(save(1, "a", "b", "c", marked=marked),)))
    assert rank.side.flush(TIMEOUT_S)
    assert [(one.keys, one.seconds) for one in rank.marked] == ([(keys("b")[0], 0.0)] if marked else [])
    assert (rank.counters.read().tokens_stored, rank.counters.read().tokens_not_stored) == (8, 16)


@pytest.mark.parametrize(("reason", "lost"), [("queue", 3), ("taken", 1), ("waiting", 2), ("error", 2)])
def test_jobs_that_are_given_up_lose_their_markers(reason: str, lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines would wait for segments that are never stored."""
    rank = Rank(EngineSettings(segment_tokens=8, write_queue=1))
    rank.blocks.gate.clear()

    def fail(message: engine.EngineRequest) -> None:
        rank._record(message)
        if reason == "error" and isinstance(message, engine.Prepare) and message.keys.startswith(keys(f"{lost}")[0]):
            raise Unreachable("no slots")

    rank.daemon.intercept = fail
    for job in range(1, 4 if reason == "queue" else 3):
        rank.run(rank.step(job, saves=(save(job, f"{job}", f"{job}.", marked=True),)))
        assert rank.blocks.copying.wait(TIMEOUT_S)
    opens = threading.Timer(0.05, rank.blocks.gate.set)
    opens.start()
    if reason in ("taken", "waiting"):
        rank.side.begin(rank.step(9, reused=(lost,)))
    opens.join()
    assert rank.side.flush(TIMEOUT_S)
    (marked,) = rank.marked
    assert (marked.keys, marked.seconds) == (b"".join(keys(f"{lost}", f"{lost}.")), 0.0)
    rank.side.close(TIMEOUT_S)
