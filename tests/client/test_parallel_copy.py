"""Copies in two threads: each item once, and no thread works on when the call is over."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from tokenlake_client.parallel_copy import MIN_PARALLEL_BYTES, ParallelCopy

LIMIT_S = 30.0


@pytest.fixture
def parallel_copy() -> ParallelCopy:
    return ParallelCopy(processors=2)


def test_two_threads_copy_each_item_once(parallel_copy: ParallelCopy) -> None:
    both = threading.Barrier(2)
    done: Counter[int] = Counter()
    threads = set()

    def work(item: int) -> None:
        if item < 2:
            both.wait(LIMIT_S)
        threads.add(threading.get_ident())
        done[item] += 1

    parallel_copy.each(work, range(100), MIN_PARALLEL_BYTES)
    assert done == Counter(range(100))
    assert len(threads) == 2


@pytest.mark.parametrize(("processors", "nbytes"), [(2, MIN_PARALLEL_BYTES - 1), (1, MIN_PARALLEL_BYTES)])
def test_the_caller_copies_few_bytes_alone(processors: int, nbytes: int) -> None:
    """The caller copies few bytes alone, and any number of bytes where the process may use only one processor."""
    threads = set()
    ParallelCopy(processors).each(lambda _: threads.add(threading.get_ident()), range(100), nbytes)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("here", [True, False], ids=["caller", "second"])
def test_an_error_ends_the_work_of_both(parallel_copy: ParallelCopy, here: bool) -> None:
    both = threading.Barrier(2)
    caller = threading.get_ident()
    working: set[int] = set()

    def work(item: int) -> None:
        working.add(threading.get_ident())
        both.wait(LIMIT_S)
        failing = (threading.get_ident() == caller) == here
        working.discard(threading.get_ident())
        if failing:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        parallel_copy.each(work, range(2), MIN_PARALLEL_BYTES)
    assert working == set(), "a thread still copies after the call"


def test_a_busy_thread_delays_no_other_caller(parallel_copy: ParallelCopy) -> None:
    """While the second thread works for another caller, this one copies everything itself."""
    busy, free = threading.Barrier(3), threading.Event()

    def hold(item: int) -> None:
        busy.wait(LIMIT_S)
        free.wait(LIMIT_S)

    other = threading.Thread(target=parallel_copy.each, args=(hold, range(2), MIN_PARALLEL_BYTES))
    other.start()
    busy.wait(LIMIT_S)
    done: list[int] = []
    parallel_copy.each(done.append, range(100), MIN_PARALLEL_BYTES)
    assert done == list(range(100))
    free.set()
    other.join(LIMIT_S)
