"""The published policies of the study: each keeps the contract of a policy, and its published behaviour."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

from tests.rules import test_eviction as contract
from tests.rules.eviction_scene import Memory, key_of, size_of
from tests.rules.test_store_machine import SEARCH, StoreMachine
from tokenlake.memory.eviction import EvictionPolicy
from tokenlake_bench.eviction.s3fifo import MOST_PASSED, S3Fifo

Make = Callable[[], EvictionPolicy]
every_policy = pytest.mark.parametrize("make", [S3Fifo])
CONTRACT: tuple[Callable[[Make], None], ...] = (
    contract.test_an_empty_order_has_no_victim,
    contract.test_each_segment_is_evicted_once,
    contract.test_asking_for_the_victim_changes_nothing,
    contract.test_the_same_calls_lead_to_the_same_evictions,
    contract.test_a_hot_segment_outlives_a_scan,
)
"""The tests that every policy of the daemons passes."""


@every_policy
@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__.removeprefix("test_"))
def test_the_contract_of_a_policy(test: Callable[[Make], None], make: Make) -> None:
    test(make)


@every_policy
def test_a_return_to_the_order_is_no_access(make: Make) -> None:
    """A segment leaves the order and returns: its value is at most that of a segment accessed once, just now."""
    memory = Memory(make(), 100)
    for number in range(10):
        memory.store(number, 0, float(10 * number))
    pinned = memory.here[0]
    memory.policy.remove(pinned, 100.0, evicted=False)
    memory.policy.insert(pinned, 110.0)
    retention_value = memory.policy.retention_value(pinned, 110.0)
    memory.store("new", 0, 110.0)
    assert retention_value <= memory.policy.retention_value(memory.here["new"], 110.0)


@every_policy
def test_touches_within_a_second_are_one_access(make: Make) -> None:
    """A segment touched a thousand times in one second leaves before one that was accessed twice."""
    memory = Memory(make(), 3)
    memory.store("twice", 0, 0.0)
    memory.request(["twice"], 20.0)
    memory.store("once", 0, 20.0)
    for step in range(1000):
        memory.request(["once"], 20.0 + step / 1001)
    for number in range(8):
        memory.store(number, 0, 30.0 + number)
    gone = [*memory.evicted, *memory.order(40.0)]
    assert gone.index("once") < gone.index("twice")


class S3FifoMachine(StoreMachine):
    policy = S3Fifo


TestS3Fifo = S3FifoMachine.TestCase
TestS3Fifo.settings = settings(SEARCH, max_examples=60)


def test_s3fifo_keeps_a_scan_on_probation() -> None:
    """A scan of segments that are used once evicts no segment of the main queue."""
    memory = Memory(S3Fifo(), 20)
    for number in range(20):
        memory.store(number, 0, float(number))
    for number in range(20):
        memory.request([number], 100.0 + number)
    for number in range(200):
        memory.store(("scan", number), 0, 200.0 + number)
    assert sum(isinstance(name, int) for name in memory.here) >= 17


def test_s3fifo_takes_a_ghost_into_the_main_queue() -> None:
    memory = Memory(S3Fifo(), 10)
    for number in range(11):
        memory.store(number, 0, float(number))
    back = memory.evicted[0]
    memory.store(back, 0, 20.0)
    for number in range(30):
        memory.store(("scan", number), 0, 30.0 + number)
    assert back in memory.here


def test_s3fifo_moves_a_bounded_number_at_a_time() -> None:
    policy = S3Fifo()
    memory = Memory(policy, 4 * MOST_PASSED)
    for number in range(4 * MOST_PASSED):
        memory.store(number, 0, 0.0)
    for name in memory.here:
        policy.touch(memory.here[name], 10.0)
    memory.evict(20.0)
    # The eviction moved `MOST_PASSED` requested segments to the end of the order and evicted the next one.
    assert next(iter(policy)).key == key_of(MOST_PASSED + 1)


@every_policy
def test_ghosts_are_bounded_by_segments(make: Make) -> None:
    memory = Memory(make(), 50)
    sizes = []
    for number in range(1000):
        memory.store(number, 0, float(number))
        if number in (30, 120, 999):
            sizes.append(size_of(memory.policy))
    assert sizes[2] < 1.05 * sizes[1]
