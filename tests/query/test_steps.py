"""A round merges what it waits for, once, and nothing else."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import pytest

from tests.query.scene import HEADS, LAYOUT, SCALE, Text, draw_queries
from tokenlake.attention import AttentionShape, Partial, empty_partial
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake_client import Pool

pytest.importorskip("torch")

from tokenlake_query.asking import Asker, Question
from tokenlake_query.segments import Segments
from tokenlake_query.steps import Part, Round, Step, Tools
from tokenlake_query.timer import Timer
from tokenlake_query.views import Share, View
from tokenlake_query.work import MAX_KERNELS, Attention, Task, Worker

TOKENS = 3
NOBODY = cast(Pool, None)
"""No view here is brought anywhere."""


@pytest.fixture
def tools() -> Iterator[Tools]:
    """The computing thread is not started: what it would say comes by hand."""
    timer = Timer()
    timer.start()
    with ThreadPoolExecutor(1) as fetching:
        yield Tools(Worker(), timer, fetching)


def view_of(segments: Segments) -> View:
    return View(NOBODY, Attention(LAYOUT, AttentionShape.of(LAYOUT, HEADS, SCALE)), segments, ())


class Scene:
    """A round over one view of segments here, and its answers."""

    def __init__(self, tools: Tools, deadline_s: float = 10.0) -> None:
        shape = (TOKENS, HEADS, LAYOUT.value_dim)
        view = view_of(Segments([np.zeros(8, np.uint8)]))
        self.outputs = np.full(shape, 7, np.float32)
        self.sums = np.full(shape[:2], 7, np.float32)
        self.answers: list[wire.Answered] = []
        step = Step(1, "float32", (Part(view, slice(0, TOKENS)),), draw_queries(0, TOKENS), self.outputs, self.sums)
        self.round = Round(step, wire.Query(1, 1, 0, 1, deadline_s), tools, self.answers.append)
        self.round.begin()


def drawn(seed: int) -> Partial:
    draw = np.random.default_rng(seed)
    out = draw.standard_normal((TOKENS, HEADS, LAYOUT.value_dim), np.float32)
    return Partial(out, draw.standard_normal((TOKENS, HEADS), np.float32))


def test_what_comes_once_is_the_answer(tools: Tools) -> None:
    scene = Scene(tools)
    scene.round.put(0, None, drawn(1))
    assert [answer.codes for answer in scene.answers] == [bytes([Code.LOCAL])]
    assert np.array_equal(scene.outputs, drawn(1).out)
    assert np.array_equal(scene.sums, drawn(1).lse)


def test_what_comes_again_or_late_or_from_elsewhere_changes_nothing(tools: Tools) -> None:
    scene = Scene(tools)
    scene.round.put(0, "nobody asked", drawn(2))
    assert not scene.answers
    scene.round.put(0, None, drawn(1))
    scene.round.put(0, None, drawn(3))
    assert len(scene.answers) == 1
    assert np.array_equal(scene.outputs, drawn(1).out)


def test_a_round_that_another_replaced_writes_and_says_nothing(tools: Tools) -> None:
    scene = Scene(tools)
    scene.round.void()
    assert not scene.round.wanted()
    scene.round.put(0, None, drawn(1))
    assert not scene.answers
    assert (scene.outputs == 7).all()


def test_what_cannot_be_computed_is_lost(tools: Tools) -> None:
    scene = Scene(tools)
    scene.round.put(0, None, None)
    assert [answer.codes for answer in scene.answers] == [bytes([Code.LOST])]


def test_the_deadline_answers_for_who_does_not(tools: Tools) -> None:
    scene = Scene(tools, deadline_s=0.05)
    until = time.monotonic() + 10
    while not scene.answers:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert scene.answers[0].codes == bytes([Code.LOST])
    scene.round.put(0, None, drawn(1))
    assert len(scene.answers) == 1
    assert (scene.outputs == 7).all(), "the buffer is the engine's again"


def test_a_view_of_nothing_is_answered_at_once(tools: Tools) -> None:
    shape = (TOKENS, HEADS, LAYOUT.value_dim)
    outputs, sums = np.full(shape, 7, np.float32), np.full(shape[:2], 7, np.float32)
    view = view_of(Segments(()))
    answers: list[wire.Answered] = []
    step = Step(1, "float32", (Part(view, slice(0, TOKENS)),), draw_queries(0, TOKENS), outputs, sums)
    Round(step, wire.Query(1, 1, 0, 1, 10.0), tools, answers.append).begin()
    assert [answer.codes for answer in answers] == [bytes([Code.LOCAL])]
    empty = empty_partial(*shape)
    assert np.array_equal(outputs, empty.out)
    assert np.array_equal(sums, empty.lse)


def test_tasks_that_share_segments_are_computed_together_and_give_the_same() -> None:
    """Whole views, prefixes and tails shared or not; several layers and one that nobody wants any more."""
    head, one, other = (Text(seed, 4) for seed in (1, 2, 3))
    slots = [[text.content(index) for index in range(4)] for text in (head, one, other)]
    runs = [Segments(slots[0]), Segments(slots[0] + slots[1]), Segments(slots[0][:2] + slots[2]), Segments(slots[1])]
    attention = Attention(LAYOUT, AttentionShape.of(LAYOUT, HEADS, SCALE))
    worker = Worker()
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
    # All are there before it looks: one batch.
    for one_task in tasks:
        worker.submit([one_task])
    worker.start()
    assert finished.wait(30)
    assert results.pop(len(cases) - 1) is None
    alone = Worker()
    alone.start()
    for number, together in results.items():
        taken: list[Partial | None] = []
        came = threading.Event()

        def done(partial: Partial | None, taken: list[Partial | None] = taken, came: threading.Event = came) -> None:
            taken.append(partial)
            came.set()

        segments, layer = cases[number]
        alone.submit([Task(attention, layer, segments, draw_queries(number, 1 + number), lambda: True, done)])
        assert came.wait(30)
        assert together is not None
        assert taken[0] is not None
        assert np.abs(together.out - taken[0].out).max() < 1e-5
        assert np.abs(together.lse - taken[0].lse).max() < 1e-5


def test_nothing_keeps_segments_once_a_round_is_over(tools: Tools) -> None:
    """A timer may hold it for as long as its deadline would have been."""
    scene = Scene(tools, deadline_s=1000.0)
    step = scene.round._step
    assert step is not None
    view = weakref.ref(step.parts[0].view)
    del step
    scene.round.put(0, None, drawn(1))
    # The task is the computing thread's, which was not started.
    while not tools.worker._queue.empty():
        tools.worker._queue.get()
    gc.collect()
    assert view() is None


def test_engines_that_choose_many_scales_leave_few_kernels() -> None:
    """Each has threads and a scratch buffer."""
    worker = Worker()
    worker.start()
    segments = Segments([Text(1, 1).content(0)])
    for number in range(2 * MAX_KERNELS):
        came = threading.Event()
        taken: list[Partial | None] = []

        def done(partial: Partial | None, taken: list[Partial | None] = taken, came: threading.Event = came) -> None:
            taken.append(partial)
            came.set()

        attention = Attention(LAYOUT, AttentionShape.of(LAYOUT, HEADS, SCALE + number))
        worker.submit([Task(attention, 0, segments, draw_queries(number, TOKENS), lambda: True, done)])
        assert came.wait(30)
        assert taken[0] is not None
    assert len(worker._kernels) == MAX_KERNELS


class Quick:
    """A peer that has answered before `ask` returns."""

    answers = True

    def ask(self, question: Question, *_: object) -> int:
        question.received(50)
        question.arrived(0, drawn(1))
        return 100


def test_an_answer_that_comes_at_once_knows_what_was_sent(tools: Tools) -> None:
    shape = (TOKENS, HEADS, LAYOUT.value_dim)
    outputs, sums = np.full(shape, 7, np.float32), np.full(shape[:2], 7, np.float32)
    shares = [Share(cast(Asker, Quick()), 1, (SegmentKey(bytes(32)),))]
    view = View(NOBODY, Attention(LAYOUT, AttentionShape.of(LAYOUT, HEADS, SCALE)), Segments(()), shares)
    answers: list[wire.Answered] = []
    step = Step(1, "float32", (Part(view, slice(0, TOKENS)),), draw_queries(0, TOKENS), outputs, sums)
    Round(step, wire.Query(1, 1, 0, 1, 10.0), tools, answers.append).begin()
    assert [(answer.codes, answer.sent_bytes, answer.received_bytes) for answer in answers] == [
        (bytes([Code.LOCAL]), 100, 50)
    ]
    assert np.array_equal(outputs, drawn(1).out)
