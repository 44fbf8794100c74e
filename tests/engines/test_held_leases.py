"""The leases between SGLang's lookups and its reads end by being read, by time, and by number."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.chunk_pool import layout_of
from tests.engines.faulty_pool import opened
from tests.robustness.live import wait_until
from tokenlake.identity import SegmentKey
from tokenlake_client.engines.common.held_leases import HeldLeases
from tokenlake_client.lease import Lease
from tokenlake_client.testing import MemoryPool

HOLD_S = 10.0


class Made:
    """Pages in a memory pool, and leases over them with a clock of the test."""

    def __init__(self, limit: int = 64) -> None:
        self.pool = MemoryPool(layout_of())
        opened.append(self.pool)  # closed at the end of the test
        self.now = 100.0
        self.dropped: list[int] = []
        self.held = HeldLeases(HOLD_S, self.dropped.append, limit=limit, clock=lambda: self.now)

    def lease(self, first: int, count: int) -> tuple[list[str], Lease]:
        """The names of pages, and a lease of them."""
        names = [f"{number:064x}" for number in range(first, first + count)]
        keys: list[SegmentKey] = self.pool.opaque_keys((0, bytes.fromhex(name)) for name in names)
        self.pool.store_all(keys, lambda index, slot: slot.fill(index))
        return names, self.pool.match(keys)

    def hold(self, first: int, count: int) -> tuple[list[str], Lease]:
        names, lease = self.lease(first, count)
        self.held.hold({name: index for index, name in enumerate(names)}, lease)
        return names, lease


@pytest.fixture
def made() -> Any:
    made = Made()
    yield made
    made.held.close()


def unreleased(lease: Lease) -> list[int]:
    return [index for index, each in enumerate(each for hold in lease._holds for each in hold.unreleased) if each]


def test_batches_of_one_lookup(made: Made) -> None:
    names, lease = made.hold(0, 6)
    assert made.held.take(names[:4]) == (lease, 0, 4)
    assert made.held.take(names[4:]) == (lease, 4, 6)
    assert made.held.take(names[4:]) is None
    assert len(made.held) == 0
    assert made.dropped == []


def test_pages_before_the_first_read_are_released(made: Made) -> None:
    names, lease = made.hold(0, 6)
    assert made.held.take(names[3:5]) == (lease, 3, 5)
    assert unreleased(lease) == [3, 4, 5]


def test_a_read_ends_where_the_lease_does(made: Made) -> None:
    names, lease = made.hold(0, 3)
    assert made.held.take([*names, "f" * 64]) == (lease, 0, 3)


def test_an_aborted_request_releases_its_pages_in_time(made: Made) -> None:
    _, aborted = made.hold(0, 3)
    made.now += HOLD_S / 2
    names, later = made.hold(10, 2)
    made.now += HOLD_S / 2
    made.held.expire()
    assert unreleased(aborted) == []
    assert unreleased(later) == [0, 1]
    assert made.dropped == [3]
    assert made.held.take(names) == (later, 0, 2)


def test_a_rest_that_is_not_read_is_released_in_time(made: Made) -> None:
    names, lease = made.hold(0, 6)
    taken = made.held.take(names[:2])
    assert taken is not None
    lease.release(taken.start, taken.stop)
    made.now += HOLD_S
    made.held.expire()
    assert unreleased(lease) == []
    assert made.dropped == [4]


def test_the_oldest_lease_makes_room() -> None:
    made = Made(limit=2)
    leases = [made.hold(10 * number, 2)[1] for number in range(3)]
    assert [len(unreleased(lease)) for lease in leases] == [0, 2, 2]
    assert made.dropped == [2]
    made.held.close()
    assert [len(unreleased(lease)) for lease in leases] == [0, 0, 0]


def test_a_closed_object_keeps_nothing(made: Made) -> None:
    made.held.close()
    _, lease = made.hold(0, 2)
    assert unreleased(lease) == []


def test_two_lookups_of_one_prefix(made: Made) -> None:
    names, first = made.hold(0, 2)
    _, second = made.lease(0, 2)
    made.held.hold({name: index for index, name in enumerate(names)}, second)
    assert made.held.take(names) == (first, 0, 2)
    assert made.held.take(names) == (second, 0, 2)


def test_the_thread_ends_leases() -> None:
    made = Made()
    held = HeldLeases(0.0, made.dropped.append)
    _, lease = made.lease(0, 2)
    held.hold({"0": 0, "1": 1}, lease)
    # The time is over at once.
    wait_until(lambda: not unreleased(lease), "the thread has released the lease", 10.0)
    held.close()
