"""Work on many bytes in two threads: all of it is done, once, and nobody works on when it is over."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest

from tokenlake_client.checksums import copy_with_checksums, shard_checksums
from tokenlake_client.hands import SHARE_BYTES, Hands

LIMIT_S = 30.0


@pytest.fixture
def hands() -> Hands:
    return Hands()


def test_both_hands_do_each_item_once(hands: Hands) -> None:
    if hands._alone:
        pytest.skip("one processor")
    both = threading.Barrier(2)
    done: Counter[int] = Counter()
    threads = set()

    def work(item: int) -> None:
        if item < 2:
            both.wait(LIMIT_S)
        threads.add(threading.get_ident())
        done[item] += 1

    hands.each(work, range(100), SHARE_BYTES)
    assert done == Counter(range(100))
    assert len(threads) == 2


def test_little_work_stays_with_the_caller(hands: Hands) -> None:
    threads = set()
    hands.each(lambda _: threads.add(threading.get_ident()), range(100), SHARE_BYTES - 1)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("here", [True, False], ids=["caller", "second"])
def test_an_error_ends_the_work_of_both(hands: Hands, here: bool) -> None:
    if hands._alone:
        pytest.skip("one processor")
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
        hands.each(work, range(2), SHARE_BYTES)
    assert working == set(), "nobody works on"


def test_a_second_hand_that_is_busy_keeps_nobody_waiting(hands: Hands) -> None:
    """Another caller has it: one thread does everything."""
    busy, free = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        free.wait(LIMIT_S)

    hands._second.submit(hold)
    assert busy.wait(LIMIT_S)
    done: list[int] = []
    hands.each(done.append, range(100), SHARE_BYTES)
    assert done == list(range(100))
    free.set()


@pytest.mark.parametrize("shards", [1, 4, 8])
@pytest.mark.parametrize("nbytes", [4096, 1 << 20, (9 << 20) + 64])
def test_copies_and_their_checksums(hands: Hands, shards: int, nbytes: int) -> None:
    """Of any size: shards beyond what a cache holds are hashed in pieces."""
    source = np.random.default_rng(shards).integers(0, 256, (3, nbytes), dtype=np.uint8)
    slots = np.zeros_like(source)
    made = copy_with_checksums(list(zip(slots, source, strict=True)), shards, hands)
    assert np.array_equal(slots, source)
    assert made == [shard_checksums(segment, shards) for segment in source]
    assert copy_with_checksums([], shards, hands) == []
