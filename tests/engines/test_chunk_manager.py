"""The scheduler's side behind vLLM's OffloadingConnector, without vLLM."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.engines.chunk_pool import TIMEOUT_S, ChunkPool, layout_of
from tokenlake.identity import SegmentKey
from tokenlake_client.engines.vllm.adapters import AdapterUse, RequestAdapter
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.offloading.jobs import StoreJob
from tokenlake_client.engines.vllm.offloading.lookup import Found
from tokenlake_client.engines.vllm.offloading.manager import FETCH_QUEUE, OPEN_S, ChunkManager
from tokenlake_client.engines.vllm.settings import EngineSettings

MISS, HIT, PENDING, RETRY = Found.MISS, Found.HIT, Found.PENDING, Found.RETRY


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


KEYS = [key(number) for number in range(4)]


class Made:
    """A manager on a pool, with its clock and all that it reported. `stored`: the chunks that the pool has."""

    def __init__(self, *stored: bytes, shards: int = 1, opened: bool = True, **settings: Any) -> None:
        self.layout = layout_of(shards)
        self.pool = ChunkPool(self.layout)
        self.now = 100.0
        self.counters = EngineCounters()
        self.reports: list[str] = []
        self.refusals: list[str] = []
        self.manager = ChunkManager(
            EngineSettings(**settings),
            self.counters,
            lambda operation, error: self.reports.append(f"{operation}: {error}"),
            self.refusals.append,
            lambda: self.now,
        )
        self.manager.new_request("r")
        if opened:
            self.open()
        if stored:
            self.job = self.store(*stored)

    def open(self) -> None:
        self.manager.open(lambda: self.pool, self.layout)

    def store(self, *keys: bytes, name: str = "r") -> StoreJob:
        """Store chunks as a rank does."""
        planned = self.manager.prepare_store(name, keys)
        assert planned is not None
        stored, job = planned
        assert list(stored) == list(keys)
        self.pool.put([*map(SegmentKey, job.keys)])
        self.manager.complete_store(keys)
        return job

    def elsewhere(self) -> None:
        """The stored segments are on another node."""
        self.pool.remote.update(map(SegmentKey, self.job.keys))

    def find(self, *keys: bytes, name: str = "r") -> list[Found]:
        # The first question of a request begins its lookup, which is sent in the background.
        self.manager.lookup(name, KEYS[0], lambda: KEYS)
        assert self.manager.flush(TIMEOUT_S)
        self.now += 0.001
        return [self.manager.lookup(name, each, lambda: KEYS) for each in keys or KEYS]

    def settle(self, name: str = "r") -> list[Found]:
        """Steps, until no chunk is pending."""
        until = time.monotonic() + TIMEOUT_S
        while {PENDING, RETRY} & set(found := self.find(name=name)):
            self.manager.step_ends([], [])
            assert time.monotonic() < until
            time.sleep(0.001)
        return found


# -- lookups


def test_all_chunks_are_asked_for_at_once() -> None:
    """The answer is not awaited."""
    made = Made(KEYS[0], KEYS[2])
    made.pool.daemon.freeze()
    assert made.find() == [RETRY] * 4
    made.pool.daemon.thaw()
    assert made.find() == [HIT, MISS, HIT, MISS]
    ((count, options),) = made.pool.asked
    assert (count, options.independent, options.request) == (4, True, "r")


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
    ((_, options),) = made.pool.asked
    assert (options.prompt_tokens, options.counted_keys) == (99, 4)
    made.manager.takes("r", 5, 5)
    assert made.pool.took == (5, 5)
    made.manager.prepare_load("r", windowed[2:3])
    assert made.pool.leased() == [2]
    made.manager.takes("r", 5, 96)
    assert made.pool.took == (5, 96)
    made.manager.load_failed("r")
    assert made.pool.took == (5, 5)


def test_a_late_answer_is_a_miss_and_costs_one_deadline() -> None:
    made = Made(*KEYS, match_ms=50.0)
    made.pool.daemon.freeze()
    assert made.find(KEYS[0]) == [RETRY]
    made.now += 0.06
    assert made.find() == [MISS] * 4
    made.manager.new_request("next")
    assert made.find(name="next") == [MISS] * 4
    made.pool.daemon.thaw()
    made.manager.new_request("later")
    assert made.settle("later") == [HIT] * 4
    assert made.counters.read().lookups_late == 1
    assert made.find() == [MISS] * 4, "the late request does not use the pool again"


def test_remote_segments_are_fetched_before_they_hit() -> None:
    made = Made(*KEYS)
    made.elsewhere()
    assert made.find(KEYS[0], KEYS[1]) == [PENDING] * 2
    made.manager.step_ends([], [])
    until = time.monotonic() + TIMEOUT_S
    while made.find(KEYS[0], KEYS[1]) != [HIT] * 2:
        assert time.monotonic() < until
    assert len(made.pool.remote) == 2, "only the chunks that vLLM asked for are fetched"
    assert made.manager.prepare_load("r", KEYS[:2]).segments == (0, 1)
    assert made.manager.remote("r", KEYS[0])
    assert made.pool.leased() == [0, 1]


def test_a_long_fetch_is_begun_once() -> None:
    """Before, each step asked for the same chunks again, until the queue of fetches was full and the hits were given
    up."""
    made = Made(*KEYS)
    made.elsewhere()
    made.pool.fetches.clear()
    assert made.find(KEYS[0]) == [PENDING]
    for _ in range(2 * FETCH_QUEUE):
        made.manager.lookup("r", KEYS[0], lambda: KEYS)
        made.manager.step_ends([], [])
        made.now += 0.001
    assert made.pool.fetching.acquire(timeout=TIMEOUT_S)
    made.pool.fetches.set()
    assert made.manager.flush(TIMEOUT_S)
    assert made.manager.lookup("r", KEYS[0], lambda: KEYS) is HIT
    assert not made.pool.fetching.acquire(blocking=False), "one fetch"


@pytest.mark.parametrize("fault", ["lost elsewhere", "lost here", "no daemon"])
def test_segments_that_cannot_be_fetched_are_misses(fault: str) -> None:
    """Where reads are verified, those of this node are fetched, too."""
    made = Made(*KEYS, verify=fault == "lost here")
    if fault != "lost here":
        made.elsewhere()
    assert made.find() == [PENDING] * 4
    if fault == "no daemon":
        made.pool.daemon.stop()
        assert made.settle() == [MISS] * 4
    else:
        made.pool.lost.add(SegmentKey(made.job.keys[1]))
        assert made.settle() == [HIT, MISS, HIT, HIT]
    assert made.counters.read().loads_failed == 1
    assert made.reports == []


@pytest.mark.parametrize("size", [8, 16, 64])
def test_a_hash_of_another_size_is_refused_by_name(size: int) -> None:
    made = Made()
    short = bytes(size) + bytes(4)
    assert made.manager.lookup("r", short, lambda: [short]) is MISS
    assert made.manager.prepare_store("r", [short]) is None
    (reason,) = made.refusals
    assert f"'prefix_caching_hash_algo' makes block hashes of {size} bytes" in reason
    assert made.find() == [MISS] * 4, "the pool is not used any more"


def test_requests_wait_for_the_pool_to_be_opened() -> None:
    """For a limited time."""
    made = Made(opened=False)
    assert made.find() == [RETRY] * 4
    assert made.manager.prepare_store("r", KEYS) is None
    made.now += OPEN_S
    assert made.find() == [MISS] * 4
    made.open()
    made.store(*KEYS)
    assert made.settle() == [HIT] * 4


def test_a_manager_that_was_stopped() -> None:
    made = Made(*KEYS)
    made.manager.stop("the reason")
    made.manager.stop("the reason")
    assert made.find() == [MISS] * 4
    assert made.manager.prepare_store("r", KEYS) is None
    assert made.refusals == ["the reason"]


# -- tails

TAILS = [key(number) for number in (10, 11)]


def ask_tails(made: Made, *keys: bytes) -> list[Found]:
    """vLLM's questions for tails in one step."""
    found = [made.manager.lookup_tail("r", each) for each in keys or TAILS]
    waits = made.manager.tails_wait("r")
    assert waits is bool({RETRY, PENDING} & set(found))
    assert made.manager.flush(TIMEOUT_S)
    made.now += 0.001
    return found


def test_tails_have_a_lookup_of_their_own() -> None:
    """One load takes chunks and tails."""
    made = Made(*KEYS[1:], TAILS[1])
    assert made.find() == [MISS, HIT, HIT, HIT]
    assert ask_tails(made) == [RETRY, RETRY]
    assert ask_tails(made) == [MISS, HIT]
    assert [count for count, _ in made.pool.asked] == [4, 2]
    assert made.pool.asked[1][1].counted_keys == 0
    job = made.manager.prepare_load("r", [KEYS[2], TAILS[1]])
    assert job.segments == (1, 3)
    assert len(job.leases) == 2
    assert [made.pool.leased(lease) for lease in (0, 1)] == [[1], [0]]
    assert made.manager.lookup_tail("r", TAILS[1]) is MISS, "a request loads once"
    made.manager.complete_load("r")
    assert [made.pool.leased(lease) for lease in (0, 1)] == [[], []]


def test_a_tail_alone() -> None:
    """The ranks do not attach to a lease that holds nothing any more."""
    made = Made(*KEYS, TAILS[0])
    assert made.find() == [HIT] * 4
    ask_tails(made)
    assert ask_tails(made) == [HIT, MISS]
    job = made.manager.prepare_load("r", TAILS[:1])
    assert (job.segments, len(job.leases)) == ((0,), 1)


def test_tails_on_another_node() -> None:
    made = Made(*TAILS)
    made.elsewhere()
    assert ask_tails(made) == [RETRY, RETRY]
    found = ask_tails(made)
    assert found == [PENDING, PENDING]
    until = time.monotonic() + TIMEOUT_S
    while found != [HIT, HIT]:
        made.manager.step_ends([], [])
        assert time.monotonic() < until
        found = ask_tails(made)


def test_late_tails_leave_the_chunks() -> None:
    made = Made(*KEYS, *TAILS, match_ms=50.0)
    assert made.find() == [HIT] * 4
    made.pool.daemon.freeze()
    ask_tails(made)
    assert ask_tails(made) == [RETRY, RETRY]
    made.now += 0.06
    assert ask_tails(made) == [MISS, MISS]
    made.pool.daemon.thaw()
    assert made.find() == [HIT] * 4
    assert made.manager.prepare_load("r", KEYS).segments == (0, 1, 2, 3)


@pytest.mark.parametrize("end", ["begins", "ends", "is preempted"])
def test_a_request_that_does_not_load_its_tails_releases_them(end: str) -> None:
    made = Made(*TAILS)
    ask_tails(made)
    assert ask_tails(made) == [HIT, HIT]
    if end == "begins":
        made.manager.step_ends(["r"], [])
    elif end == "ends":
        made.manager.finished("r")
    else:
        made.manager.step_ends([], ["r"])
    assert made.pool.leased() == []


def test_the_leading_chunks_that_the_pool_has() -> None:
    made = Made(*KEYS[:2], KEYS[3])
    assert made.manager.leading("r", KEYS) == 0
    made.find()
    assert [made.manager.leading("r", keys) for keys in (KEYS, KEYS[1:], KEYS[:1], [])] == [2, 1, 1, 0]


# -- loads


def test_a_load_keeps_only_its_segments() -> None:
    """vLLM asks again after a load only if the load failed, and the second attempt would fail too."""
    made = Made(*KEYS)
    assert made.settle() == [HIT] * 4
    made.manager.load_failed("r")
    assert made.counters.read().loads_failed == 0, "another connector's load"
    job = made.manager.prepare_load("r", [KEYS[3], KEYS[1]])
    assert (job.segments, job.groups, job.member.session) == ((3, 1), (0, 0), made.pool.engine.session)
    assert made.pool.leased() == [1, 3]
    made.manager.complete_load("r")
    assert made.pool.leased() == []
    assert made.find() == [MISS] * 4
    made.manager.step_ends([], ["r"])
    assert made.settle() == [HIT] * 4, "a preempted request begins anew"


@pytest.mark.parametrize("end", ["begins", "ends", "ends while it loads"])
def test_a_request_that_does_not_load_releases_its_lease(end: str) -> None:
    """A load that is under way keeps it."""
    made = Made(*KEYS)
    made.settle()
    if end == "begins":
        made.manager.step_ends(["r"], [])
    elif end == "ends while it loads":
        made.manager.prepare_load("r", KEYS)
        made.manager.finished("r")
        assert made.pool.leased() == [0, 1, 2, 3]
        made.manager.complete_load("r")
    else:
        made.manager.finished("r")
    assert made.pool.leased() == []


# -- stores


def test_what_is_part_of_the_keys() -> None:
    """The group, the salt, and the weights that changed in place."""
    plain, salted, changed = Made(), Made(salt="x"), Made()
    changed.manager.new_weights("other weights")
    jobs = [plain.store(key(1)), plain.store(key(1, 1)), salted.store(key(1)), changed.store(key(1))]
    assert len({job.keys for job in jobs}) == 4
    assert [job.groups for job in jobs[:2]] == [(0,), (1,)]


def test_chunks_computed_before_an_epoch_are_not_stored_in_it() -> None:
    made = Made(*KEYS)
    for name in ("loading", "running", "waiting"):
        made.manager.new_request(name)
    made.settle("loading")
    made.manager.prepare_load("loading", KEYS)
    made.manager.step_ends(["running"], [])
    made.manager.new_weights("other weights")
    stores = [made.manager.prepare_store(name, KEYS) is not None for name in ("loading", "running", "waiting")]
    assert stores == [False, False, True]
    made.manager.step_ends([], ["running"])
    assert made.manager.prepare_store("running", KEYS) is not None


def test_several_ranks_fill_slots_that_the_manager_reserves() -> None:
    made = Made(shards=2)
    for _ in range(2):
        planned = made.manager.prepare_store("r", KEYS)
        assert planned is not None
        assert planned[1].write
        made.manager.complete_store(set(KEYS))
    assert Made(save=False).manager.prepare_store("r", KEYS) is None, "nothing is stored where saving is off"


# -- adapters


def with_adapter(made: Made, name: str = "a", number: int = 3, digest: str | None = None) -> RequestAdapter:
    adapter = RequestAdapter(number, "name", "/path")
    adapter.files, adapter.digest = digest or "", digest
    made.manager.new_request(name, adapter=adapter)
    return adapter


@pytest.mark.parametrize("outcome", ["known", "refused", "late"])
def test_a_request_waits_for_the_digest_of_its_adapter(outcome: str) -> None:
    made = Made()
    adapter = with_adapter(made)
    assert made.find(name="a") == [RETRY] * 4
    assert made.manager.prepare_store("a", KEYS) is None
    if outcome == "known":
        adapter.files, adapter.digest = "files", "digest"
        assert made.store(*KEYS, name="a").adapter == AdapterUse(3, "files")
        assert made.settle("a") == [HIT] * 4
        assert made.settle() == [MISS] * 4, "a request without the adapter"
        return
    adapter.refused = outcome == "refused"
    made.now += 0.02 * (outcome == "late")
    assert made.find(name="a") == [MISS] * 4
    assert made.find(name="one that the pool cannot serve") == [MISS] * 4


def test_jobs_name_other_numbers_of_an_adapter() -> None:
    """Those in vLLM's cache."""
    made = Made()
    for number in (3, 4):
        with_adapter(made, f"r{number}", number, "digest")
    assert made.store(*KEYS, name="r4").adapter == AdapterUse(4, "digest", others=(3,))
    made.manager.cache_emptied()
    job = made.store(*KEYS, name="r4").adapter
    assert job is not None
    assert (job.others, job.since > 0) == ((), True)
