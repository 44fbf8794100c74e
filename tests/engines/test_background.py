"""The queue of background tasks: in order, bounded, and finished before it closes."""

from __future__ import annotations

import threading

from tokenlake_client.engines.common.background import BackgroundQueue


class Recorder:
    """Records executed tasks; a task waits while the gate is closed."""

    def __init__(self, limit: int | None = None) -> None:
        self.done: list[int] = []
        self.gate = threading.Event()
        self.started = threading.Event()
        self.queue: BackgroundQueue[int] = BackgroundQueue(self.execute, "test", limit)

    def execute(self, task: int) -> None:
        self.started.set()
        assert self.gate.wait(10)
        self.done.append(task)


def test_tasks_are_executed_in_order() -> None:
    recorder = Recorder()
    recorder.gate.set()
    for task in range(5):
        assert recorder.queue.submit(task)
    assert recorder.queue.flush(10)
    assert recorder.done == [0, 1, 2, 3, 4]
    assert recorder.queue.oldest() is None


def test_the_number_of_waiting_tasks_is_limited() -> None:
    recorder = Recorder(limit=1)
    assert recorder.queue.submit(1)
    assert recorder.started.wait(10)
    assert recorder.queue.submit(2)
    assert not recorder.queue.submit(3)
    assert recorder.queue.oldest() == 1
    assert not recorder.queue.flush(0)
    recorder.gate.set()
    recorder.queue.close(10)
    assert recorder.done == [1, 2]
    assert not recorder.queue.submit(4)


def test_waiting_tasks_can_be_withdrawn() -> None:
    recorder = Recorder()
    for task in range(4):
        recorder.queue.submit(task)
    assert recorder.started.wait(10)
    assert recorder.queue.withdraw(lambda task: task in (0, 2)) == [2]
    recorder.gate.set()
    assert recorder.queue.flush(10)
    assert recorder.done == [0, 1, 3]


def test_close_without_drain_discards_waiting_tasks() -> None:
    recorder = Recorder()
    recorder.queue.submit(1)
    recorder.queue.submit(2)
    assert recorder.started.wait(10)
    recorder.queue.close(0, drain=False)
    assert not recorder.queue.submit(3)
    recorder.gate.set()
    assert recorder.queue.flush(10)
    assert recorder.done == [1]
