"""The published policies of the study: each keeps the contract of a policy, and its published behaviour."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

from tests.rules import test_eviction as contract
from tests.rules import test_retention as retention
from tests.rules.eviction_scene import Memory
from tests.rules.test_store_machine import SEARCH, StoreMachine
from tokenlake.store.eviction import EvictionPolicy
from tokenlake_bench.eviction.arc import AdaptiveReplacement
from tokenlake_bench.eviction.policies import PUBLISHED
from tokenlake_bench.eviction.s3fifo import MOST_PASSED, S3Fifo

Make = Callable[[], EvictionPolicy]
every_policy = pytest.mark.parametrize("make", PUBLISHED.values(), ids=list(PUBLISHED))
CONTRACT: tuple[Callable[[Make], None], ...] = (
    contract.test_nothing_is_cold_where_nothing_is,
    contract.test_what_is_evicted_was_there_and_goes_once,
    contract.test_looking_at_the_coldest_changes_nothing,
    contract.test_the_same_calls_lead_to_the_same_evictions,
    contract.test_a_pin_in_between_is_no_use,
    contract.test_touches_within_a_second_are_one_use,
    contract.test_what_was_used_often_and_lately_outlives_what_passes_once,
    contract.test_what_learns_nothing_saves_nothing,
    contract.test_what_is_no_statistics_is_not_taken_over,
    retention.test_high_priority_goes_after_and_low_before_what_says_nothing,
    retention.test_what_outlived_its_time_goes_first_and_a_use_renews_it,
    retention.test_a_time_to_live_goes_on_when_high_priority_ends,
    retention.test_every_mixture_keeps_the_books,
)
"""The tests that every policy of the daemons passes."""


@every_policy
@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__.removeprefix("test_"))
def test_the_contract_of_a_policy(test: Callable[[Make], None], make: Make) -> None:
    test(make)


class S3FifoMachine(StoreMachine):
    policy = S3Fifo


class ArcMachine(StoreMachine):
    policy = AdaptiveReplacement


TestS3Fifo = S3FifoMachine.TestCase
TestArc = ArcMachine.TestCase
TestS3Fifo.settings = TestArc.settings = settings(SEARCH, max_examples=60)


def test_s3fifo_keeps_what_passes_once_on_probation() -> None:
    """A scan of segments used once evicts nothing from the main queue."""
    memory = Memory(S3Fifo(), 20)
    for number in range(20):
        memory.store(number, 0, float(number))
    for number in range(20):
        memory.request([number], 100.0 + number)
    for number in range(200):
        memory.store(("scan", number), 0, 200.0 + number)
    assert sum(isinstance(name, int) for name in memory.here) >= 17


def test_s3fifo_puts_evicted_keys_into_the_main_queue() -> None:
    memory = Memory(S3Fifo(), 10)
    for number in range(11):
        memory.store(number, 0, float(number))
    back = memory.evicted[0]
    memory.store(back, 0, 20.0)
    for number in range(30):
        memory.store(("scan", number), 0, 30.0 + number)
    assert back in memory.here


def test_s3fifo_bounds_its_search_among_used_segments() -> None:
    policy = S3Fifo()
    memory = Memory(policy, 4 * MOST_PASSED)
    for number in range(4 * MOST_PASSED):
        memory.store(number, 0, 0.0)
    for name in memory.here:
        policy.touch(memory.here[name], 10.0)
    memory.evict(20.0)
    assert len(policy._main) <= MOST_PASSED


def test_arc_gives_room_to_segments_used_once_after_a_miss() -> None:
    """A miss of a key that was evicted after one use moves the border: more of a scan stays."""

    def kept(missed: bool) -> int:
        memory = Memory(AdaptiveReplacement(), 20)
        for number in range(10):
            memory.store(("again", number), 0, float(number))
            memory.request([("again", number)], 20.0 + number)
        for number in range(20):
            memory.store(number, 0, 50.0 + number)
        if missed:
            for number in range(10):
                memory.store(number, 0, 100.0 + number)
        for number in range(20):
            memory.store(("scan", number), 0, 200.0 + number)
        return sum(isinstance(name, tuple) and name[0] == "scan" for name in memory.here)

    assert kept(missed=True) > kept(missed=False)


@every_policy
def test_ghosts_are_no_more_than_segments(make: Make) -> None:
    memory = Memory(make(), 50)
    for number in range(1000):
        memory.store(number, 0, float(number))
    ghosts = [value for field, value in vars(memory.policy).items() if field.startswith("_ghosts")]
    assert 0 < sum(map(len, ghosts)) <= 51
