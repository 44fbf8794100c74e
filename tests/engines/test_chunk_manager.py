"""The scheduler's side behind vLLM's OffloadingConnector, without vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engines.chunk_pool import LAYOUT, ChunkPools, Clock, layout_of
from tokenlake.errors import TokenLakeError
from tokenlake_client.engines.vllm.adapters import AdapterUse, RequestAdapter
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.offloading.jobs import StoreJob
from tokenlake_client.engines.vllm.offloading.lookup import Found
from tokenlake_client.engines.vllm.offloading.manager import FETCH_QUEUE, OPEN_S, ChunkManager
from tokenlake_client.engines.vllm.settings import EngineSettings

TIMEOUT_S = 10.0


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


KEYS = [key(number) for number in range(4)]


class Made:
    """A manager on a pool, with its clock and all that it reported."""

    def __init__(self, pools: ChunkPools | None = None, *, opened: bool = True, **settings: Any) -> None:
        self.pools = pools or ChunkPools()
        self.clock = Clock()
        self.counters = EngineCounters()
        self.reports: list[str] = []
        self.refusals: list[str] = []
        self.manager = ChunkManager(
            EngineSettings(**settings),
            self.counters,
            lambda operation, error: self.reports.append(f"{operation}: {error}"),
            self.refusals.append,
            self.clock,
        )
        self.manager.new_request("r")
        if opened:
            self.open()

    def open(self) -> None:
        self.manager.open(lambda: self.pools, self.pools.layout)  # type: ignore[arg-type, return-value]

    def store(self, *keys: bytes, name: str = "r") -> StoreJob:
        """Store chunks as a rank does."""
        planned = self.manager.prepare_store(name, keys)
        assert planned is not None
        stored, job = planned
        assert list(stored) == list(keys)
        for segment in job.keys:
            self.pools.segments[segment] = np.zeros(LAYOUT.segment_bytes, np.uint8)
        self.manager.complete_store(keys)
        return job

    def find(self, *keys: bytes, name: str = "r") -> list[Found]:
        # The first question of a request begins its lookup, which is sent in the background.
        self.manager.lookup(name, KEYS[0], lambda: KEYS)
        assert self.manager.flush(TIMEOUT_S)
        self.clock.now += 0.001
        return [self.manager.lookup(name, each, lambda: KEYS) for each in keys or KEYS]

    def settle(self, name: str = "r") -> list[Found]:
        """Steps, until no chunk is pending."""
        until = time.monotonic() + TIMEOUT_S
        while {Found.PENDING, Found.RETRY} & set(found := self.find(name=name)):
            self.manager.step_ends([], [])
            assert time.monotonic() < until
            time.sleep(0.001)
        return found


MISS, HIT, PENDING, RETRY = Found.MISS, Found.HIT, Found.PENDING, Found.RETRY


def test_all_chunks_are_asked_for_at_once() -> None:
    made = Made()
    made.store(KEYS[0], KEYS[2])
    assert made.find() == [HIT, MISS, HIT, MISS]
    assert made.pools.asked == [4]
    assert made.pools.matches[0].independent
    assert made.pools.matches[0].request == "r"


def test_the_manager_says_which_tokens_are_loaded() -> None:
    """The chunks of one group stand for the tokens."""
    made = Made()
    made.manager.counted_group = 1
    made.manager.new_request("r", None, lambda: 99)
    windowed = [key(number, 1) for number in range(4)]
    asked = [*KEYS[:2], *windowed, *KEYS[2:]]
    made.store(*asked)
    made.manager.lookup("r", windowed[0], lambda: asked)
    assert made.manager.flush(TIMEOUT_S)
    assert [made.manager.lookup("r", each, lambda: asked) for each in asked] == [HIT] * 8
    (options,) = made.pools.matches
    assert (options.prompt_tokens, options.counted_keys) == (99, 4)
    (lease,) = made.pools.leases.values()
    made.manager.takes("r", 5, 5)
    assert lease.took == (5, 5)
    made.manager.prepare_load("r", windowed[2:3])
    assert [at for at, held in enumerate(lease.held) if held] == [2]
    made.manager.takes("r", 5, 96)
    assert lease.took == (5, 96)
    made.manager.load_failed("r")
    assert lease.took == (5, 5)


def test_the_answer_is_not_awaited() -> None:
    made = Made()
    made.store(*KEYS)
    made.pools.answers = False
    assert made.find() == [RETRY] * 4
    made.pools.answers = True
    assert made.find() == [HIT] * 4
    assert made.pools.asked == [4]


def test_a_late_answer_is_a_miss_and_costs_one_deadline() -> None:
    made = Made(match_ms=50.0)
    made.store(*KEYS)
    made.pools.answers = False
    assert made.find(KEYS[0]) == [RETRY]
    made.clock.now += 0.06
    assert made.find() == [MISS] * 4
    made.manager.new_request("next")
    assert made.find(name="next") == [MISS] * 4
    made.pools.answers = True
    made.manager.new_request("later")
    assert made.settle("later") == [HIT] * 4
    assert made.counters.read().lookups_late == 1
    assert made.find() == [MISS] * 4, "the late request does not use the pool again"


def test_remote_segments_are_fetched_before_they_hit() -> None:
    """Segments of other nodes are fetched before they are hits."""
    made = Made()
    made.store(*KEYS)
    made.pools.remote.update(made.pools.segments)
    assert made.find(KEYS[0], KEYS[1]) == [PENDING] * 2
    made.manager.step_ends([], [])
    until = time.monotonic() + TIMEOUT_S
    while made.find(KEYS[0], KEYS[1]) != [HIT] * 2:
        assert time.monotonic() < until
    assert len(made.pools.remote) == 2, "only the chunks that vLLM asked for are fetched"
    job = made.manager.prepare_load("r", KEYS[:2])
    assert job.segments == (0, 1)
    assert made.manager.remote("r", KEYS[0])
    assert made.pools.leased() == 2


def test_a_long_fetch_is_begun_once() -> None:
    """Before, each step asked for the same chunks again, until the queue of fetches was full and the hits were given
    up."""
    made = Made()
    made.store(*KEYS)
    made.pools.remote.update(made.pools.segments)
    made.pools.fetches.clear()
    assert made.find(KEYS[0]) == [PENDING]
    for _ in range(2 * FETCH_QUEUE):
        made.manager.lookup("r", KEYS[0], lambda: KEYS)
        made.manager.step_ends([], [])
        made.clock.now += 0.001
    assert made.pools.fetching.acquire(timeout=TIMEOUT_S)
    made.pools.fetches.set()
    assert made.manager.flush(TIMEOUT_S)
    assert made.manager.lookup("r", KEYS[0], lambda: KEYS) is HIT
    assert not made.pools.fetching.acquire(blocking=False), "one fetch"


@pytest.mark.parametrize("verify", [False, True])
def test_a_lost_segment_is_a_miss(verify: bool) -> None:
    made = Made(verify=verify)
    job = made.store(*KEYS)
    made.pools.lost.add(job.keys[1])
    if not verify:
        made.pools.remote.update(made.pools.segments)
    assert made.settle() == [HIT, MISS, HIT, HIT]
    assert made.counters.read().loads_failed == 1


def test_segments_that_cannot_be_fetched_are_misses_and_counted() -> None:
    made = Made()
    made.store(*KEYS)
    made.pools.remote.update(made.pools.segments)
    assert made.find() == [PENDING] * 4
    made.pools.connected = False
    made.manager.step_ends([], [])
    assert made.settle() == [MISS] * 4
    assert made.counters.read().loads_failed == 1
    assert made.reports == []


def test_a_load_that_failed_on_a_rank_is_counted() -> None:
    """A load that failed on a rank is counted if the pool made it."""
    made = Made()
    made.store(*KEYS)
    made.settle()
    made.manager.load_failed("r")
    assert made.counters.read().loads_failed == 0, "another connector's load"
    made.manager.prepare_load("r", KEYS)
    made.manager.load_failed("r")
    assert made.counters.read().loads_failed == 1


def test_a_daemon_that_dies_during_a_lookup() -> None:
    made = Made()
    made.store(*KEYS)
    made.pools.answers = False
    assert made.find(KEYS[0]) == [RETRY]
    made.pools.connected = False
    with pytest.raises(TokenLakeError):
        made.find(KEYS[0])
    made.pools.connected = True
    assert made.find() == [MISS] * 4, "the request does not use the pool again"


def test_a_load_keeps_only_its_segments() -> None:
    made = Made()
    made.store(*KEYS)
    made.settle()
    assert made.pools.leased() == 4
    job = made.manager.prepare_load("r", [KEYS[3], KEYS[1]])
    assert (job.segments, job.groups, job.member.session) == ((3, 1), (0, 0), 7)
    assert made.pools.leased() == 2
    made.manager.complete_load("r")
    assert made.pools.leased() == 0


def test_a_request_loads_once_until_it_is_preempted() -> None:
    """vLLM asks again after a load only if the load failed, and the second attempt would fail too."""
    made = Made()
    made.store(*KEYS)
    made.settle()
    made.manager.prepare_load("r", KEYS)
    made.manager.complete_load("r")
    assert made.find() == [MISS] * 4
    made.manager.step_ends([], ["r"])
    assert made.settle() == [HIT] * 4


def test_a_request_that_begins_without_a_load_releases_its_lease() -> None:
    made = Made()
    made.store(*KEYS)
    made.settle()
    made.manager.step_ends(["r"], [])
    assert made.pools.leased() == 0
    made.manager.new_request("aborted")
    made.settle("aborted")
    made.manager.finished("aborted")
    assert made.pools.leased() == 0


def test_an_aborted_request_keeps_the_lease_of_its_load() -> None:
    made = Made()
    made.store(*KEYS)
    made.settle()
    made.manager.prepare_load("r", KEYS)
    made.manager.finished("r")
    assert made.pools.leased() == 4
    made.manager.complete_load("r")
    assert made.pools.leased() == 0


def test_the_group_is_part_of_the_key() -> None:
    made = Made()
    job = made.store(key(1, 0))
    other = made.store(key(1, 1))
    assert job.keys != other.keys
    assert (job.groups, other.groups) == ((0,), (1,))


@pytest.mark.parametrize("size", [8, 16, 64])
def test_a_hash_of_another_size_is_refused_by_name(size: int) -> None:
    made = Made()
    short = bytes(size) + bytes(4)
    assert made.manager.lookup("r", short, lambda: [short]) is MISS
    assert made.manager.prepare_store("r", [short]) is None
    (reason,) = made.refusals
    assert "'prefix_caching_hash_algo'" in reason
    assert f"{size} bytes" in reason
    assert made.find() == [MISS] * 4, "the pool is not used any more"


def test_requests_wait_for_the_pool_to_be_opened() -> None:
    """Requests wait for the pool to be opened for a limited time."""
    made = Made(opened=False)
    assert made.find() == [RETRY] * 4
    assert made.manager.prepare_store("r", KEYS) is None
    made.clock.now += OPEN_S
    assert made.find() == [MISS] * 4
    made.open()
    made.store(*KEYS)
    assert made.settle() == [HIT] * 4


def test_a_manager_that_was_stopped() -> None:
    made = Made()
    made.store(*KEYS)
    made.manager.stop("the reason")
    made.manager.stop("the reason")
    assert made.find() == [MISS] * 4
    assert made.manager.prepare_store("r", KEYS) is None
    assert made.refusals == ["the reason"]


def test_a_salt_and_an_epoch_change_the_keys() -> None:
    first, salted = Made().store(*KEYS), Made(salt="x").store(*KEYS)
    made = Made()
    made.manager.new_weights("other weights")
    assert len({first.keys, salted.keys, made.store(*KEYS).keys}) == 3


def test_chunks_computed_before_an_epoch_are_not_stored_in_it() -> None:
    made = Made()
    for name in ("loading", "running", "waiting"):
        made.manager.new_request(name)
    made.store(*KEYS)
    made.settle("loading")
    made.manager.prepare_load("loading", KEYS)
    made.manager.step_ends(["running"], [])
    made.manager.new_weights("other weights")
    assert made.manager.prepare_store("loading", KEYS) is None
    assert made.manager.prepare_store("running", KEYS) is None
    assert made.manager.prepare_store("waiting", KEYS) is not None
    made.manager.step_ends([], ["running"])
    assert made.manager.prepare_store("running", KEYS) is not None


def test_several_ranks_fill_slots_that_the_manager_reserves() -> None:
    made = Made(ChunkPools(layout_of(2)))
    planned = made.manager.prepare_store("r", KEYS)
    assert planned is not None
    assert planned[1].write == 1
    made.manager.complete_store(set(KEYS))
    assert made.manager.prepare_store("r", KEYS) is not None


def test_nothing_is_stored_where_saving_is_off() -> None:
    assert Made(save=False).manager.prepare_store("r", KEYS) is None


def adapted(found: Callable[[RequestAdapter], None]) -> Made:
    made = Made()
    adapter = RequestAdapter(3, "name", "/path")
    made.manager.new_request("a", adapter=adapter)
    assert made.find(name="a") == [RETRY] * 4
    assert made.manager.prepare_store("a", KEYS) is None
    found(adapter)
    return made


def test_the_digest_of_an_adapter_is_part_of_the_keys() -> None:
    def known(adapter: RequestAdapter) -> None:
        adapter.files, adapter.digest = "files", "digest"

    made = adapted(known)
    job = made.store(*KEYS, name="a")
    assert job.adapter == AdapterUse(3, "files")
    assert made.settle("a") == [HIT] * 4
    assert made.settle() == [MISS] * 4, "a request without the adapter"


def test_jobs_name_other_numbers_of_an_adapter() -> None:
    """Jobs name the other numbers of an adapter in vLLM's cache."""
    made = Made()
    for number in (3, 4):
        adapter = RequestAdapter(number, "name", "/path")
        adapter.files, adapter.digest = "files", "digest"
        made.manager.new_request(f"r{number}", adapter=adapter)
    assert made.store(*KEYS, name="r4").adapter == AdapterUse(4, "files", others=(3,))
    made.manager.cache_emptied()
    job = made.store(*KEYS, name="r4").adapter
    assert job is not None
    assert (job.others, job.since > 0) == ((), True)


def test_an_adapter_that_cannot_be_read_or_takes_too_long() -> None:
    def refused(adapter: RequestAdapter) -> None:
        adapter.refused = True

    assert adapted(refused).find(name="a") == [MISS] * 4
    late = adapted(lambda adapter: None)
    late.clock.now += 0.02
    assert late.find(name="a") == [MISS] * 4
    assert Made().find(name="of no request that the pool serves") == [MISS] * 4
