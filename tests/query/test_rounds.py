"""A round merges each result that it waits for once, and nothing else."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from queue import Queue
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.query.scene import HEADS, LAYOUT, SCALE, Text, draw_queries
from tests.robustness.live import wait_until
from tokenlake.attention import AttentionShape, Partial, Stored, empty_partial
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake_client import Pool

pytest.importorskip("torch")

from tokenlake_query import compute_thread
from tokenlake_query.compute_thread import MAX_KERNELS, SLICE_BYTES, SWEPT, Attention, ComputeThread, Task
from tokenlake_query.kernels import Kernel, Slot, kernel_for
from tokenlake_query.pace import Pace
from tokenlake_query.peer_client import PeerClient, ResultHandler
from tokenlake_query.rounds import Part, Round, Step, Threads
from tokenlake_query.segments import Segments
from tokenlake_query.tenant_threads import TenantThreads
from tokenlake_query.timer_thread import TimerThread
from tokenlake_query.views import Share, View

TOKENS = 3
NO_POOL = cast(Pool, None)
"""No segments are fetched in these tests."""


@pytest.fixture
def threads() -> Threads:
    """The computing thread is not started: the tests put results themselves."""
    timer = TimerThread()
    timer.start()
    return Threads("red", ComputeThread(), timer, TenantThreads(1, "fetch", Pace()))


class Scene:
    """A round over one view, by default of local segments, and its answers."""

    def __init__(
        self,
        threads: Threads,
        deadline_s: float = 10.0,
        segments: Sequence[NDArray[np.uint8]] = (np.zeros(8, np.uint8),),
        shares: Sequence[Share] = (),
    ) -> None:
        shape = (TOKENS, HEADS, LAYOUT.value_dim)
        view = View(NO_POOL, Attention.of(LAYOUT, HEADS, SCALE), Segments(segments), shares)
        self.view = weakref.ref(view)
        self.outputs = np.full(shape, 7, np.float32)
        self.sums = np.full(shape[:2], 7, np.float32)
        self.answers: list[wire.Answered] = []
        step = Step(1, "float32", (Part(view, slice(0, TOKENS)),), draw_queries(0, TOKENS), self.outputs, self.sums)
        self.round = Round(step, wire.Query(1, 1, 0, 1, deadline_s), threads, self.answers.append)
        self.round.begin()


def drawn(seed: int) -> Partial:
    draw = np.random.default_rng(seed)
    out = draw.standard_normal((TOKENS, HEADS, LAYOUT.value_dim), np.float32)
    return Partial(out, draw.standard_normal((TOKENS, HEADS), np.float32))


def test_one_result_is_the_answer(threads: Threads) -> None:
    scene = Scene(threads)
    scene.round.put(0, None, drawn(1))
    assert [answer.codes for answer in scene.answers] == [bytes([Code.LOCAL])]
    assert np.array_equal(scene.outputs, drawn(1).out)
    assert np.array_equal(scene.sums, drawn(1).lse)


def test_repeated_late_and_foreign_results_are_ignored(threads: Threads) -> None:
    scene = Scene(threads)
    scene.round.put(0, "unknown source", drawn(2))
    assert not scene.answers
    scene.round.put(0, None, drawn(1))
    scene.round.put(0, None, drawn(3))
    assert len(scene.answers) == 1
    assert np.array_equal(scene.outputs, drawn(1).out)


def test_a_cancelled_round_writes_and_sends_nothing(threads: Threads) -> None:
    scene = Scene(threads)
    scene.round.cancel()
    assert not scene.round.wanted()
    scene.round.put(0, None, drawn(1))
    assert not scene.answers
    assert (scene.outputs == 7).all()


def test_a_failed_part_is_lost(threads: Threads) -> None:
    scene = Scene(threads)
    scene.round.put(0, None, None)
    assert [answer.codes for answer in scene.answers] == [bytes([Code.LOST])]


def test_missing_results_are_lost_at_the_deadline(threads: Threads) -> None:
    scene = Scene(threads, deadline_s=0.05)
    until = time.monotonic() + 10
    while not scene.answers:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert scene.answers[0].codes == bytes([Code.LOST])
    scene.round.put(0, None, drawn(1))
    assert len(scene.answers) == 1
    assert (scene.outputs == 7).all(), "the buffer belongs to the engine again"


def test_an_empty_view_is_answered_at_once(threads: Threads) -> None:
    scene = Scene(threads, segments=())
    assert [answer.codes for answer in scene.answers] == [bytes([Code.LOCAL])]
    empty = empty_partial(TOKENS, HEADS, LAYOUT.value_dim)
    assert np.array_equal(scene.outputs, empty.out)
    assert np.array_equal(scene.sums, empty.lse)


def computed(
    worker: ComputeThread, attention: Attention, segments: Segments, queries: Stored, layer: int = 0
) -> Partial:
    """The result of one task."""
    taken: Queue[Partial | None] = Queue()
    worker.submit([Task(attention, layer, segments, queries, lambda: True, taken.put)], "red")
    partial = taken.get(timeout=30)
    assert partial is not None
    return partial


def test_tasks_that_share_segments_give_equal_results() -> None:
    """Whole views, prefixes and tails, shared or not; several layers, and one task that is not wanted any more."""
    head, one, other = (Text(seed, 4) for seed in (1, 2, 3))
    slots = [[text.content(index) for index in range(4)] for text in (head, one, other)]
    runs = [Segments(slots[0]), Segments(slots[0] + slots[1]), Segments(slots[0][:2] + slots[2]), Segments(slots[1])]
    attention = Attention.of(LAYOUT, HEADS, SCALE)
    worker = ComputeThread()
    results: dict[int, Partial | None] = {}
    finished = threading.Event()
    cases = [(run, layer) for run in runs for layer in (0, 1)] + [(runs[0], 0)]

    def task(number: int, segments: Segments, layer: int) -> Task:
        def done(partial: Partial | None) -> None:
            results[number] = partial
            if len(results) == len(cases):
                finished.set()

        wanted = number != len(cases) - 1
        return Task(attention, layer, segments, draw_queries(number, 1 + number), lambda: wanted, done)

    tasks = [task(number, segments, layer) for number, (segments, layer) in enumerate(cases)]
    # All tasks are queued before the thread starts: they are one batch.
    for one_task in tasks:
        worker.submit([one_task], "red")
    worker.start()
    assert finished.wait(30)
    assert results.pop(len(cases) - 1) is None
    alone = ComputeThread()
    alone.start()
    for number, together in results.items():
        segments, layer = cases[number]
        single = computed(alone, attention, segments, draw_queries(number, 1 + number), layer)
        assert together is not None
        assert np.abs(together.out - single.out).max() < 1e-5
        assert np.abs(together.lse - single.lse).max() < 1e-5


def test_tasks_share_the_time_of_their_batch() -> None:
    """By queries times segments: 1 x 4, 3 x 4 and 2 x 2 of 20."""
    slots = [Text(1, 4).content(index) for index in range(4)]
    attention = Attention.of(LAYOUT, HEADS, SCALE)
    worker, spent, finished = ComputeThread(), dict[int, int](), threading.Event()

    def task(tokens: int, count: int, wanted: bool = True) -> Task:
        def done(partial: Partial | None) -> None:
            if not wanted:
                finished.set()

        queries = draw_queries(tokens, tokens)
        return Task(
            attention, 0, Segments(slots[:count]), queries, lambda: wanted, done, lambda ns: spent.update({tokens: ns})
        )

    began = time.perf_counter_ns()
    worker.submit([task(1, 4), task(3, 4), task(2, 2), task(9, 4, wanted=False)], "red")
    worker.start()
    assert finished.wait(30)
    assert 0 < sum(spent.values()) < time.perf_counter_ns() - began
    assert spent.keys() == {1, 2, 3}
    assert spent[3] == pytest.approx(3 * spent[1], abs=3)
    assert spent[2] == pytest.approx(spent[1], abs=1)


def test_a_finished_round_keeps_no_segments(threads: Threads) -> None:
    """The round keeps no segments leased, though its timer refers to it until the deadline."""
    scene = Scene(threads, deadline_s=1000.0)
    scene.round.put(0, None, drawn(1))
    threads.compute.start()

    def collected() -> bool:
        gc.collect()
        return scene.view() is None

    wait_until(collected, "the computing thread dropped the task, and the view is collected")


def test_the_number_of_kept_kernels_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are kept for later batches; each has threads and a scratch buffer."""
    made: list[weakref.ref[Kernel]] = []

    def counted(layout: Layout, shape: AttentionShape) -> Kernel:
        kernel = kernel_for(layout, shape)
        made.append(weakref.ref(kernel))
        return kernel

    monkeypatch.setattr(compute_thread, "kernel_for", counted)
    worker = ComputeThread()
    worker.start()
    segments = Segments([Text(1, 1).content(0)])
    for number in range(2 * MAX_KERNELS):
        computed(worker, Attention.of(LAYOUT, HEADS, SCALE + number), segments, draw_queries(number, TOKENS))
    gc.collect()
    assert len(made) == 2 * MAX_KERNELS
    assert sum(kernel() is not None for kernel in made) <= MAX_KERNELS


class Quick:
    """A peer that answers before `ask` returns."""

    usable = True

    def ask(self, handler: ResultHandler, *_: object) -> int:
        handler.received(50)
        handler.arrived(0, drawn(1))
        return 100


def test_an_immediate_answer_counts_the_sent_bytes(threads: Threads) -> None:
    share = Share(cast(PeerClient, Quick()), 1, (SegmentKey(bytes(32)),))
    scene = Scene(threads, segments=(), shares=[share])
    [answer] = scene.answers
    assert (answer.codes, answer.sent_bytes, answer.received_bytes) == (bytes([Code.LOCAL]), 100, 50)
    assert np.array_equal(scene.outputs, drawn(1).out)


class Failing:
    """A kernel that fails on queries that begin with `POISON`, and records the size of each call."""

    POISON = 7.0

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.entered = threading.Event()
        self.proceed = threading.Event()
        self.proceed.set()

    def attend(self, queries: Stored, slots: Sequence[Slot], layer: int) -> Partial:
        self.calls.append((len(queries), len(slots)))
        self.entered.set()
        assert self.proceed.wait(30)
        if (queries[:, 0, 0] == self.POISON).any():
            raise MemoryError("no room for these queries")
        return empty_partial(*queries.shape[:2], LAYOUT.value_dim)


class Worker:
    """A computing thread with a `Failing` kernel, and the order in which its tasks are done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel = Failing()
        monkeypatch.setattr(compute_thread, "kernel_for", lambda layout, shape: self.kernel)
        self.thread = ComputeThread()
        self.done: dict[str, Partial | None] = {}
        self.segments = Segments([Text(1, 1).content(0) for _ in range(64)])

    def submit(
        self, name: str, tenant: str, tokens: int = 1, poison: bool = False, wanted: bool = True, heads: int = HEADS
    ) -> None:
        queries = draw_queries(0, tokens, heads=heads)
        if poison:
            queries[0, 0, 0] = Failing.POISON
        attention = Attention.of(LAYOUT, heads, SCALE)
        task = Task(attention, 0, self.segments, queries, lambda: wanted, lambda partial: self._put(name, partial))
        self.thread.submit([task], tenant)

    def _put(self, name: str, partial: Partial | None) -> None:
        self.done[name] = partial

    def wait(self, tasks: int) -> list[str]:
        wait_until(lambda: len(self.done) == tasks, "all tasks are done")
        return list(self.done)


SLOW_RATE = 24_000
"""Query tokens times segments per second."""


def _make_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the computing thread take every kernel for one of `SLOW_RATE`."""
    products = HEADS * LAYOUT.segment_tokens * (LAYOUT.key_dim + LAYOUT.value_dim)
    monkeypatch.setattr(compute_thread, "FIRST_RATE", SLOW_RATE * products)
    monkeypatch.setattr(compute_thread._Cost, "measured", lambda *_: None)


@pytest.mark.parametrize("tenant", ["red", "blue"])
def test_a_task_that_fails_is_the_only_one(monkeypatch: pytest.MonkeyPatch, tenant: str) -> None:
    """Not the tasks with which it was batched, of its own tenant or of another one."""
    worker = Worker(monkeypatch)
    worker.submit("first", "red")
    worker.submit("poison", tenant, poison=True)
    worker.submit("last", "red")
    worker.thread.start()
    assert set(worker.wait(3)) == {"first", "poison", "last"}
    assert worker.done["poison"] is None
    assert worker.done["first"] is not None
    assert worker.done["last"] is not None


def test_a_huge_task_is_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of another tenant are computed between its slices, one after the other."""
    _make_slow(monkeypatch)
    worker = Worker(monkeypatch)
    worker.kernel.proceed.clear()
    worker.submit("huge", "red", tokens=4096)
    worker.submit("first", "blue")
    worker.thread.start()
    assert worker.kernel.entered.wait(30)
    worker.submit("second", "blue")
    worker.kernel.proceed.set()
    assert worker.wait(3)[-1] == "huge"
    computed = [rows * segments for rows, segments in worker.kernel.calls]
    assert max(computed) <= SLOW_RATE * compute_thread.SLICE_S
    assert sum(computed) == (4096 + 1 + 1) * len(worker.segments)


def test_the_rest_of_an_unwanted_task_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_slow(monkeypatch)
    worker = Worker(monkeypatch)
    answers = iter([True, True, False])
    attention = Attention.of(LAYOUT, HEADS, SCALE)
    queries = draw_queries(0, 4096)
    task = Task(attention, 0, worker.segments, queries, lambda: next(answers, False), lambda it: worker._put("it", it))
    worker.thread.submit([task], "red")
    worker.thread.start()
    worker.wait(1)
    assert worker.done == {"it": None}
    assert len(worker.kernel.calls) == 2


def test_the_timer_forgets_finished_rounds() -> None:
    """Their deadlines may be years away."""
    timer = TimerThread()
    timer.start()
    threads = Threads("red", ComputeThread(), timer, TenantThreads(1, "fetch", Pace()))
    for _ in range(1000):
        Scene(threads, deadline_s=1e9).round.put(0, None, drawn(1))
        Scene(threads, deadline_s=1e9).round.cancel()
    assert len(timer) == 0
    assert len(timer._timers._heap) < 200


def test_a_batch_joins_a_bounded_number_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copy is not cut into slices. A larger task needs none."""
    monkeypatch.setattr(compute_thread, "MAX_JOINED", 4)
    worker = Worker(monkeypatch)
    for number, tokens in enumerate([2, 2, 1, 9, 3]):
        worker.submit(str(number), "red", tokens)
    worker.thread.start()
    worker.wait(5)
    assert [rows for rows, _ in worker.kernel.calls] == [4, 1, 9, 3]
    assert all(partial is not None for partial in worker.done.values())


def test_earlier_use_costs_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that computed alone for long is served as soon as one that was away meanwhile."""
    _make_slow(monkeypatch)
    clock = itertools.count(step=1_000_000_000)
    stepped = SimpleNamespace(monotonic=time.monotonic, perf_counter_ns=clock.__next__)
    monkeypatch.setattr(compute_thread, "time", stepped)
    worker = Worker(monkeypatch)
    worker.thread.start()
    for number in range(20):
        worker.submit(f"early {number}", "blue")
        worker.wait(number + 1)
    worker.kernel.proceed.clear()
    worker.kernel.entered.clear()
    earlier = len(worker.kernel.calls)
    worker.submit("huge", "red", tokens=4096)
    assert worker.kernel.entered.wait(30)
    worker.submit("late", "blue")
    worker.kernel.proceed.set()
    worker.wait(22)
    rows = [rows for rows, _ in worker.kernel.calls[earlier:]]
    assert rows.index(1) <= 3, "slices of the huge task came first"


def test_slices_of_many_heads_have_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 heads read each KV head: one token is enough work for a slice, and no slice has more than it should."""
    _make_slow(monkeypatch)
    worker = Worker(monkeypatch)
    worker.submit("many heads", "red", tokens=8, heads=1024)
    worker.submit("small", "blue")
    worker.thread.start()
    assert worker.wait(2) == ["small", "many heads"]
    assert max(rows for rows, _ in worker.kernel.calls) == 1


def test_outputs_of_a_slice_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the whole query takes no longer than a slice should."""
    monkeypatch.setattr(compute_thread, "FIRST_RATE", 1e30)
    worker = Worker(monkeypatch)
    worker.submit("wide", "red", tokens=256, heads=1024)
    worker.thread.start()
    worker.wait(1)
    rows = SLICE_BYTES // (1024 * LAYOUT.value_dim * 4)
    assert set(worker.kernel.calls) == {(rows, 64)}


def test_cancelled_tasks_leave_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an earlier task of their tenant is computed."""
    _make_slow(monkeypatch)
    worker = Worker(monkeypatch)
    worker.kernel.proceed.clear()
    worker.submit("huge", "red", tokens=64)
    worker.thread.start()
    assert worker.kernel.entered.wait(30)
    for number in range(4 * SWEPT):
        worker.submit(f"cancelled {number}", "red", wanted=False)
    worker.submit("wanted", "red")
    worker.kernel.proceed.set()
    done = worker.wait(4 * SWEPT + 2)
    assert done[-2:] == ["huge", "wanted"]


def test_waiting_tasks_of_a_tenant_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks beyond the bound fail at once; another tenant's are accepted."""
    monkeypatch.setattr(compute_thread, "MAX_WAITING", 3)
    worker = Worker(monkeypatch)
    for number in range(4):
        worker.submit(f"red {number}", "red")
    assert worker.done == {"red 3": None}
    worker.submit("blue", "blue")
    worker.thread.start()
    assert set(worker.wait(5)) == {"red 0", "red 1", "red 2", "red 3", "blue"}
    assert worker.done["blue"] is not None


def test_a_slice_that_does_not_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process then sends no more reports, and its daemon replaces it."""
    worker = Worker(monkeypatch)
    assert worker.thread.slice_lasts() == 0
    worker.kernel.proceed.clear()
    worker.submit("stuck", "red")
    worker.thread.start()
    wait_until(lambda: worker.thread.slice_lasts() > 0.1, "the slice lasts")
    worker.kernel.proceed.set()
    worker.wait(1)
    wait_until(lambda: worker.thread.slice_lasts() == 0, "the slice has ended")
