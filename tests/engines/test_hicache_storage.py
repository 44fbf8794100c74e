"""The storage backend of SGLang's HiCache, on a pool in memory and without SGLang: what is stored is found and read
back byte for byte; an error of the pool is a miss, and does not reach SGLang."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.hicache import PAGE, Config, HostPool, Policy, Transfer, standing_in
from tests.robustness.live import wait_until
from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import SLOT_BYTES
from tokenlake_client.engines.sglang.identity import EngineFacts
from tokenlake_client.testing import MemoryDaemon, MemoryPool

torch = pytest.importorskip("torch")

EXTRA = {"interface_v1": 1, "backend_name": "tokenlake", "module_path": "m", "class_name": "c", "match_ms": 10_000}
FACTS = EngineFacts("sglang 0", "m", None, None, "auto", False, None, None)
TIMEOUT_S = 10.0


def names(count: int, seed: int = 0) -> list[str]:
    """SGLang's hashes of pages."""
    return [hashlib.sha256(f"{seed} {number}".encode()).hexdigest() for number in range(count)]


def indices(*pages: int) -> Any:
    """The tokens of pages in a host pool."""
    return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])


class Engines:
    """Backends at one daemon in memory, each that of an engine."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = module
        self.daemon = MemoryDaemon()
        self.backends: list[Any] = []
        self.digest = "w"
        monkeypatch.setattr(module, "engine_facts", lambda: FACTS)
        monkeypatch.setattr(module, "weights_digest_of", lambda facts, settings: self.digest)
        monkeypatch.setattr(module.Pool, "connect", self._connect)

    def _connect(
        self, socket: object, layout: Any, credential: object, *, verify: bool, **ignored: object
    ) -> MemoryPool:
        return MemoryPool(layout, self.daemon, verify=verify)

    def start(self, pool: HostPool | None = None, *, config: Config | None = None, **settings: Any) -> Any:
        config = config or Config()
        config.extra_config = {**EXTRA, **settings}
        backend = self.module.TokenLakeStorage(config, {})
        self.backends.append(backend)
        backend.register_mem_pool_host(pool or HostPool())
        wait_until(lambda: self.ready(backend), "the backend has connected", TIMEOUT_S)
        return backend

    def ready(self, backend: Any) -> bool:
        return all(side.pages.connection.pool is not None for side in backend._sides.values())


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    engines = Engines(standing_in(monkeypatch), monkeypatch)
    yield engines
    for backend in engines.backends:
        backend.close()


def stored(engines: Engines, count: int = 6, seed: int = 0, **options: Any) -> tuple[Any, list[str], HostPool]:
    """A backend that has stored pages, their names, and its host pool with them in pages 0, 1, ..."""
    pool = HostPool()
    pool.write(range(count), seed)
    backend = engines.start(pool, **options)
    assert backend.batch_set_v1(names(count, seed), indices(*range(count))) == [True] * count
    return backend, names(count, seed), pool


def test_stored_pages_are_found_and_read_by_another_engine(engines: Engines) -> None:
    _, pages, written = stored(engines)
    read = HostPool()
    second = engines.start(read)
    assert second.batch_exists([*pages, *names(2, seed=9)]) == 6
    assert second.batch_get_v1(pages, indices(9, 3, 5, 1, 0, 7)) == [True] * 6
    assert [read.read(page) for page in (9, 3, 5, 1, 0, 7)] == [written.read(page) for page in range(6)]
    counts = second.counts
    assert (counts.lookups, counts.tokens_hit_here, counts.tokens_not_found) == (1, 6 * PAGE, 2 * PAGE)
    assert (counts.tokens_loaded, counts.loads_failed, counts.failures) == (6 * PAGE, 0, 0)
    assert engines.backends[0].counts.tokens_stored == 6 * PAGE


def test_the_lease_of_a_lookup_lasts_until_the_read(engines: Engines) -> None:
    _, pages, written = stored(engines)
    read = HostPool()
    second = engines.start(read)
    assert second.batch_exists(pages) == 6
    side = second._sides["kv"]
    # Nothing is evicted between both, whatever other engines need.
    keys = side.pages._keys(side.pages.connection.pool, pages)
    engines.daemon.evict(keys)
    assert second.batch_get_v1(pages[:4], indices(0, 1, 2, 3)) == [True] * 4
    assert second.batch_get_v1(pages[4:], indices(4, 5)) == [True] * 2
    assert [read.read(page) for page in range(6)] == [written.read(page) for page in range(6)]
    assert len(side.pages.leases) == 0


def test_the_lease_of_an_aborted_request_ends(engines: Engines) -> None:
    backend, pages, _ = stored(engines, lease_s=0.001)
    assert backend.batch_exists(pages) == 6
    wait_until(lambda: backend.counts.pages_not_read == 6, "the lease has ended", TIMEOUT_S)
    # A late read looks the pages up again.
    assert backend.batch_get_v1(pages, indices(*range(10, 16))) == [True] * 6


def test_a_lost_page_shortens_the_hit(engines: Engines) -> None:
    backend, pages, _ = stored(engines)
    side = backend._sides["kv"]
    engines.daemon.evict(side.pages._keys(side.pages.connection.pool, pages[2:3]))
    assert backend.batch_get_v1(pages, indices(*range(10, 16))) == [True, True, False, False, False, False]
    assert backend.counts.loads_failed == 1
    assert backend.batch_exists(pages) == 2


def test_a_corrupt_page_is_not_read(engines: Engines) -> None:
    backend, pages, _ = stored(engines, verify=True)
    side = backend._sides["kv"]
    pool = side.pages.connection.pool
    with pool.match(side.pages._keys(pool, pages)) as lease:
        place = lease.places[3]
        pool.link.regions.get(int(place["region"]), write=True).slots[place["slot"]] ^= 1
    assert backend.batch_exists(pages) == 6
    assert backend.batch_get_v1(pages, indices(*range(10, 16))) == [True] * 3 + [False] * 3


def test_a_page_that_the_pool_has_counts_as_stored(engines: Engines) -> None:
    backend, pages, _ = stored(engines)
    assert backend.batch_set_v1(pages, indices(*range(6))) == [True] * 6
    assert backend.counts.tokens_not_stored == 6 * PAGE


def test_an_engine_that_only_reads(engines: Engines) -> None:
    backend = engines.start(save=False)
    assert backend.batch_set_v1(names(2), indices(0, 1)) == [False] * 2
    assert backend.batch_exists(names(2)) == 0


def test_a_full_pool_makes_the_backup_thread_wait_once(engines: Engines) -> None:
    backend = engines.start(write_patience_s=0.01)
    asked = 0

    def full(message: engine.EngineRequest) -> engine.EngineReply | None:
        nonlocal asked
        if isinstance(message, engine.Prepare):
            asked += 1
            count = len(message.keys) // KEY_BYTES
            return engine.Prepared(message.id, 0, bytes([Code.WRITE_BUDGET]) * count, bytes(SLOT_BYTES * count))
        return None

    engines.daemon.intercept = full
    pages = names(2)
    assert backend.batch_set_v1(pages, indices(0, 1)) == [False] * 2
    waited = asked
    assert waited > 1
    assert backend.batch_set_v1(pages, indices(0, 1)) == [False] * 2
    assert asked == waited + 1
    engines.daemon.intercept = None
    assert backend.batch_set_v1(pages, indices(0, 1)) == [True] * 2
    engines.daemon.intercept = full
    assert backend.batch_set_v1(names(2, seed=1), indices(0, 1)) == [False] * 2
    assert asked > waited + 2


@pytest.mark.parametrize("failing", [engine.Match, engine.Prepare, engine.Commit])
@pytest.mark.parametrize("error", [Unreachable("broken"), RuntimeError("unexpected")])
def test_no_error_reaches_sglang(engines: Engines, failing: type, error: Exception) -> None:
    backend, pages, _ = stored(engines)

    def fail(message: engine.EngineRequest) -> None:
        if isinstance(message, failing):
            raise error

    engines.daemon.intercept = fail
    transfers = [Transfer("kv", indices(0, 1), pages[:2]), Transfer("mamba", indices(0), pages[:1])]
    assert backend.batch_exists(pages) == (0 if failing is engine.Match else 6)
    more = names(2, seed=3)
    assert backend.batch_set_v1(more, indices(0, 1)) == [failing is engine.Match] * 2
    assert backend.batch_get_v1(names(1, seed=4), indices(8)) == [False]
    assert backend.batch_get_v2(transfers)["mamba"] == [False]
    assert backend.batch_set_v2(transfers)["mamba"] == [False]
    assert backend.batch_exists_v2(pages, transfers).kv_hit_pages == 0
    assert backend.get_stats() is None
    backend.clear()


def test_wrong_sizes_touch_no_memory(engines: Engines) -> None:
    backend, pages, pool = stored(engines)
    before = [pool.read(page) for page in range(pool.pages)]
    assert backend.batch_get_v1(pages, indices(0, 1)) == [False] * 6
    assert backend.batch_get_v1(pages, None) == [False] * 6
    pool.kv_buffer.append(pool.kv_buffer[0])
    assert backend.batch_get_v1(pages, indices(*range(6))) == [False] * 6
    assert backend.batch_set_v1(names(1, seed=2), indices(0)) == [False]
    pool.kv_buffer.pop()
    assert [pool.read(page) for page in range(pool.pages)] == before
    assert backend.counts.failures == 4


def test_without_a_daemon_everything_is_a_miss(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, pages, _ = stored(engines)
    engines.daemon.stop()
    assert backend.batch_exists(pages) == 0
    assert backend.batch_get_v1(pages, indices(*range(6))) == [False] * 6
    assert backend.batch_set_v1(pages, indices(*range(6))) == [False] * 6
    assert backend.counts.tokens_not_asked == 6 * PAGE


def side_pools(engines: Engines, count: int = 6) -> tuple[Any, list[str], HostPool, HostPool]:
    """A backend with a second pool, of states: pages of one token, of which pages 2 and 5 are stored."""
    backend, pages, _ = stored(engines, count)
    states = HostPool(part_bytes=(96, 16, 16), page_size=1)
    states.write(range(count), 7)
    backend.register_mem_host_pool_v2(backend.mem_pool_host, "kv")
    backend.register_mem_host_pool_v2(states, "mamba")
    wait_until(lambda: engines.ready(backend), "the second pool is connected", TIMEOUT_S)
    wanted = [pages[2], pages[5]]
    assert backend.batch_set_v2([Transfer("mamba", torch.tensor([2, 5]), wanted)]) == {"mamba": [True, True]}
    read = HostPool(part_bytes=(96, 16, 16), page_size=1)
    return backend, pages, states, read


def test_a_hybrid_model_restores_the_prefixes_that_have_a_state(engines: Engines) -> None:
    backend, pages, states, _ = side_pools(engines)
    state = Transfer("mamba", None, pages[:1], Policy.TRAILING_PAGES)
    found = backend.batch_exists_v2(pages, [state])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [3, 6])
    assert found.extra_pool_hit_pages == {"kv": 6, "mamba": 6}
    # Only the state that the prefix needs stays leased.
    assert [dict(entry.left) for entry in backend._sides["mamba"].pages.leases._entries] == [{pages[5]: 1}]
    assert backend.batch_get_v2([Transfer("mamba", torch.tensor([9]), [pages[5]])]) == {"mamba": [True]}
    assert states.read(9) == states.read(5)
    shorter = backend.batch_exists_v2(pages[:5], [state])
    assert (shorter.kv_hit_pages, shorter.restorable_prefix_pages) == (3, [3])
    every = Transfer("mamba", None, None, Policy.ALL_PAGES)
    assert backend.batch_exists_v2(pages, [every]).kv_hit_pages == 0
    blocks = Transfer("blocks", None, None, Policy.BLOCK_GROUPS)
    assert backend.batch_exists_v2(pages, [blocks]).kv_hit_pages == 6


def test_pools_of_one_page_name_do_not_mix(engines: Engines) -> None:
    backend, pages, _, _ = side_pools(engines)
    assert backend.batch_get_v2([Transfer("mamba", torch.tensor([9]), [pages[0]])]) == {"mamba": [False]}


def test_a_model_whose_keys_and_values_have_no_memory(engines: Engines) -> None:
    pool = HostPool()
    pool.kv_buffer = None  # type: ignore[assignment]
    backend = engines.start(pool)
    assert backend.batch_exists(names(3)) == 3
    assert backend.batch_get_v1(names(3), indices(0, 1, 2)) == [True] * 3
    assert backend.batch_set_v1(names(3), indices(0, 1, 2)) == [True] * 3


def test_ranks_do_not_share_unless_their_pages_are_equal(engines: Engines) -> None:
    _, pages, _ = stored(engines, config=Config(tp_rank=0, tp_size=2))
    assert engines.start(config=Config(tp_rank=1, tp_size=2)).batch_exists(pages) == 0
    assert engines.start(config=Config(tp_rank=0, tp_size=2)).batch_exists(pages) == 6
    _, latent, _ = stored(engines, seed=1, config=Config(tp_rank=0, tp_size=2, is_mla_model=True))
    assert engines.start(config=Config(tp_rank=1, tp_size=2, is_mla_model=True)).batch_exists(latent) == 6


@pytest.mark.parametrize(
    "other",
    [
        {"config": Config(pp_rank=1, pp_size=2)},
        {"config": Config(attn_cp_rank=1, attn_cp_size=2)},
        {"pool": HostPool(layout="page_head")},
        {"pool": HostPool(dtype="torch.bfloat16")},
        {"pool": HostPool(page_size=2 * PAGE)},
        {"pool": HostPool(part_bytes=(48, 48))},
        {"pool": HostPool(head_num=1)},
        {"salt": "s"},
    ],
)
def test_another_identity_shares_nothing(engines: Engines, other: dict[str, Any]) -> None:
    _, pages, _ = stored(engines)
    assert engines.start(**other).batch_exists(pages) == 0


def test_other_weights_share_nothing(engines: Engines) -> None:
    _, pages, _ = stored(engines)
    engines.digest = "other"
    assert engines.start().batch_exists(pages) == 0


def test_weights_that_change_in_place(engines: Engines) -> None:
    backend, pages, _ = stored(engines)
    assert backend.batch_exists(pages) == 6
    backend._weights.change()
    assert len(backend._sides["kv"].pages.leases) == 0
    # A lookup that was under way keeps a lease on pages of the old weights.
    side = backend._sides["kv"]
    old = side.pages.connection.pool.match(
        side.pages.connection.pool.opaque_keys((side.pages._kind.group, bytes.fromhex(page)) for page in pages)
    )
    assert old.hits == 6
    side.pages.leases.hold({page: index for index, page in enumerate(pages)}, old)
    # SGLang's memory may hold pages of either weights.
    assert backend.batch_exists(pages) == 0
    assert backend.batch_get_v1(pages, indices(*range(6))) == [False] * 6
    assert backend.batch_set_v1(names(1, seed=1), indices(0)) == [False]
    backend._weights.emptied()
    assert backend.batch_exists(pages) == 0
    assert backend.batch_set_v1(pages, indices(*range(6))) == [True] * 6
    assert backend.batch_exists(pages) == 6
    # Another engine has the old weights.
    other = engines.start()
    assert other.batch_exists(pages) == 6
    # Emptying the caches alone changes nothing.
    backend._weights.emptied()
    assert backend.batch_exists(pages) == 6
    assert backend.counts.failures == 0


def test_settings_that_end_the_start(engines: Engines) -> None:
    for wrong in ({"interface_v1": 0}, {"unknown": 1}, {"match_ms": -1}):
        with pytest.raises(ConfigurationError):
            engines.module.TokenLakeStorage(Config(extra_config={**EXTRA, **wrong}), {})
    with pytest.raises(ConfigurationError, match="page_size"):
        engines.start(HostPool(page_size=1))


def test_a_host_pool_without_places_is_not_served(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    backend = engines.start(HostPool(broken=True))
    assert backend.batch_exists(names(2)) == 0
    assert backend.batch_set_v1(names(2), indices(0, 1)) == [False] * 2
    assert "served without the pool: SGLang gives no places" in caplog.text


def test_128_pages_take_one_match_and_few_prepares(engines: Engines) -> None:
    pool = HostPool(pages=300)
    pool.write(range(128), 0)
    backend = engines.start(pool)
    sent: list[str] = []
    engines.daemon.intercept = lambda message: sent.append(type(message).__name__)
    assert all(backend.batch_set_v1(names(128), indices(*range(128))))
    assert sent.count("Prepare") == sent.count("Commit") == 4
    sent.clear()
    assert backend.batch_exists(names(128)) == 128
    assert all(backend.batch_get_v1(names(128), indices(*range(128, 256))))
    assert sent.count("Match") == 1
    assert [pool.read(128 + page) for page in range(128)] == [pool.read(page) for page in range(128)]


def test_keys_are_of_the_client(engines: Engines) -> None:
    backend, pages, _ = stored(engines)
    pool = backend._sides["kv"].pages.connection.pool
    keys: list[SegmentKey] = backend._sides["kv"].pages._keys(pool, pages)
    assert len(set(keys)) == 6
    assert not backend.exists("0" * 64)
    assert backend.exists(pages[0])
    with pytest.raises(ValueError, match="bytes"):
        backend._sides["kv"].pages._keys(pool, ["00"])
    assert backend.batch_exists(["not hexadecimal"]) == 0
