"""A thousand injected faults of the client at each door, with a pool in memory: no call of the engine raises, no wrong
byte or token is delivered, and no lease or write is left at the daemon."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from tests.engines import l2_adapter
from tests.engines.faults import ERRORS, MESSAGES, Faults
from tests.engines.hicache import HostPool, Policy, Transfer, standing_in
from tests.engines.models import SEGMENT, prompt
from tests.engines.small_vllm import COPIES, KnownLayout, Opaque
from tests.engines.test_hicache_storage import TIMEOUT_S, Engines, indices, names
from tests.engines.test_lmcache_adapter import Servers
from tests.robustness.live import wait_until
from tokenlake.core import events
from tokenlake.hints import Hints
from tokenlake_client.deadlines import Deadlines
from tokenlake_client.engines.common import pages
from tokenlake_client.engines.vllm.copies import HostCopy
from tokenlake_client.engines.vllm.known.request import RequestEnd
from tokenlake_client.testing import MemoryDaemon, MemoryPool

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(300)

FAULTS = 1000
NEW = 5
"""The tokens of an answer: they complete a segment."""
DEADLINES = Deadlines(match_s=0.05, call_s=0.1, store_s=0.1, fetch_s=0.1, grace_s=0.02)
DEADLINES_MS: dict[str, Any] = {"match_ms": 50, "call_ms": 100, "fetch_ms": 100}


@pytest.fixture
def faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """The faults of a test, whose seed is its parameter."""
    seed, shares = request.param
    made = Faults(seed, **shares)
    yield made
    made.end()


def seeded(seed: int, **shares: float) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("faults", [(seed, shares)], indirect=True, ids=[f"seed-{seed}"])


def check(faults: Faults, calls: Collection[str], *, messages: Collection[str] = MESSAGES) -> None:
    """There were enough faults, of each kind."""
    print(f"seed {faults.seed}: {faults.total} faults of {len(faults.counts)} kinds")
    assert faults.total >= FAULTS
    assert not [name for name in calls if not faults.of(f"call {name} ")]
    assert not [error for error in ERRORS if not any(name.endswith(f" {error.__name__}") for name in faults.counts)]
    assert not [name for name in messages if not faults.of(f"message {name} ")]
    assert faults.of("copy ")
    assert faults.of("bytes spoiled")


def mostly_connected(chance: random.Random, *pools: MemoryPool) -> None:
    """Wait in most rounds until the pools have connected again, so that the doors use them."""
    if chance.random() < 0.95:

        def there() -> bool:
            return all(pool.connected or pool._grants.closed for pool in pools)

        wait_until(there, "the pools are connected again", TIMEOUT_S)


def nothing_left(daemon: MemoryDaemon, *pools: MemoryPool) -> None:
    """All leases and writes come back to the daemon. It is told of the end of pools that were closed while they had no
    connection, as at the end of their processes."""
    for pool in pools:
        link = pool._grants.link
        if pool._grants.left and link.incarnation == daemon.incarnation:
            daemon._handle(events.ProcessGone(link.connection))

    def left() -> int:
        for pool in pools:
            pool._state.grants.sweep()
        census = daemon.core.census()
        return census["leases"] + census["writes"]

    wait_until(lambda: left() == 0, "no lease and no write is left", TIMEOUT_S)


@seeded(7)
def test_sglang(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    module = standing_in(monkeypatch)
    engines = Engines(module, monkeypatch)
    pool, states = HostPool(pages=64), HostPool(pages=64, part_bytes=(96, 16), page_size=1)
    backend = engines.start(pool, verify=True, write_patience_s=0.01, lease_s=0.05, **DEADLINES_MS)
    backend.register_mem_host_pool_v2(states, "mamba")
    wait_until(lambda: engines.ready(backend), "both pools are connected", TIMEOUT_S)
    clients = [side.pages.connection.pool for side in backend._sides.values()]
    faults.install(monkeypatch.setattr)
    faults.install_copies(monkeypatch.setattr, pages, "_into")
    chance = random.Random(faults.seed)
    chains = [names(12, seed) for seed in range(8)]
    contents = {name: (seed, order) for seed, chain in enumerate(chains) for order, name in enumerate(chain)}
    loaded = rounds = 0
    while faults.total < FAULTS + 500:
        rounds += 1
        mostly_connected(chance, *clients)
        chain = chance.choice(chains)[(start := chance.randrange(6)) : start + chance.randrange(1, 7)]
        places = chance.sample(range(pool.pages), len(chain))
        if rounds % 50 == 0:
            engines.daemon.evict()
        if rounds % 400 == 0:
            engines.daemon.stop()
            assert backend.batch_exists(chain) == 0
            engines.daemon.start()
        hybrid = chance.random() < 0.3
        host, given = (states, torch.tensor(places)) if hybrid else (pool, indices(*places))
        if chance.random() < 0.03:
            # A call that SGLang does not make.
            given = given[1:]
        transfers = [Transfer("mamba", given, chain, Policy.TRAILING_PAGES)]
        if chance.random() < 0.4:
            for place, name in zip(places, chain, strict=True):
                host.fill(place, *contents[name])
            done = backend.batch_set_v2(transfers)["mamba"] if hybrid else backend.batch_set_v1(chain, given)
            assert len(done) == len(chain)
            continue
        if chance.random() < 0.7:
            if hybrid:
                assert 0 <= backend.batch_exists_v2(chain, transfers).kv_hit_pages <= len(chain)
            else:
                assert 0 <= backend.batch_exists(chain) <= len(chain)
        for place in places:
            host.fill(place, 99, place)
        done = backend.batch_get_v2(transfers)["mamba"] if hybrid else backend.batch_get_v1(chain, given)
        for place, name, there in zip(places, chain, done, strict=True):
            loaded += there
            assert not there or host.read(place) == host.content(*contents[name])
    faults.end()
    assert loaded > 300
    check(faults, ["Pool.opaque_keys", "Pool.match", "Pool.store_all", "Lease.fetch", "Lease.release"])
    backend._drop_leases()
    nothing_left(engines.daemon, *clients)
    backend.close()


@seeded(11)
def test_lmcache(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(l2_adapter.standing_in(monkeypatch), monkeypatch)
    server = servers.start(verify=True, write_patience_s=0.01, lease_s=0.05, **DEADLINES_MS).connect()
    (kept,) = server.adapter._forms.values()
    client: Any = kept.connection.pool
    faults.install(monkeypatch.setattr)
    faults.install_copies(monkeypatch.setattr, pages, "_into")
    chance = random.Random(faults.seed)
    chains = [(l2_adapter.keys(8, seed), l2_adapter.written(8, seed)) for seed in range(6)]
    loaded = rounds = 0
    while faults.total < FAULTS + 500:
        rounds += 1
        mostly_connected(chance, client)
        keys, objects = chance.choice(chains)
        start = chance.randrange(4)
        keys, objects = keys[start:], objects[start:]
        if rounds % 50 == 0:
            servers.daemon.evict()
        if rounds % 200 == 0:
            servers.daemon.stop()
            assert server.find(keys) == [False] * len(keys)
            servers.daemon.start()
        if chance.random() < 0.4:
            server.store(keys, objects)
            continue
        found = server.find(keys)
        if chance.random() < 0.8:
            read = [l2_adapter.Held() for _ in keys]
            for done, got, right in zip(server.load(keys, read), read, objects, strict=True):
                loaded += done
                assert not done or got.bytes.tobytes() == right.bytes.tobytes()
        if chance.random() < 0.8:
            server.adapter.submit_unlock([key for key, there in zip(keys, found, strict=True) if there])
    faults.end()
    assert loaded > 300
    check(faults, ["Pool.opaque_keys", "Pool.match", "Pool.store_all", "Lease.fetch", "Lease.release"])
    wait_until(lambda: server.leases == 0, "the leases that were not unlocked have ended", TIMEOUT_S)
    nothing_left(servers.daemon, client)
    server.adapter.close()


@seeded(13, calls=0.12, messages=0.3)
def test_transformers(faults: Faults, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine, layout_of
    from tokenlake_client.engines.transformers.segment_copy import SegmentCopy

    layout = layout_of(model, segment_tokens=SEGMENT)
    client = MemoryPool(layout, verify=True, deadlines=DEADLINES)
    shared = [prompt(4 * SEGMENT, seed) for seed in range(4)]
    prompts = [head[: 16 * number] + prompt(SEGMENT - 3, 10 + number) for head in shared for number in range(1, 5)]
    faults.install(monkeypatch.setattr)
    faults.install_copies(monkeypatch.setattr, SegmentCopy, "read", "write")
    chance = random.Random(faults.seed)
    expected: dict[int, list[list[int]]] = {}
    options = {mode: EngineOptions(mode=mode, window=2, write_patience=0.01) for mode in ("fetch", "auto")}
    engines = [TokenLakeEngine(model, client, each) for each in options.values()]
    rounds = 0
    while faults.total < FAULTS:
        rounds += 1
        if rounds % 40 == 0:
            client.daemon.evict()
        if rounds % 100 == 0:
            client.daemon.stop()
            client.daemon.start()
        mostly_connected(chance, client)
        number = chance.randrange(len(prompts))
        ids = torch.tensor([prompts[number]])
        if number not in expected:
            expected[number] = model.generate(ids, max_new_tokens=NEW).tolist()
        engine = chance.choice(engines)
        engine._connection._retry_at = 0.0
        hints = Hints(ttl_s=9.0) if chance.random() < 0.5 else None
        if chance.random() < 0.2:
            engine.prefill(prompts[number], hints=hints)
        assert engine.generate(ids, max_new_tokens=NEW, hints=hints).tolist() == expected[number]
    for engine in engines:
        engine.flush()
    faults.end()
    counts = [engine.counts for engine in engines]
    assert sum(each.tokens_hit for each in counts) > 1000
    check(
        faults,
        ["Pool.prefix", "Pool.match", "Pool.store_all", "Pool.hint", "Lease.fetch", "Lease.release", "Lease.takes"],
    )
    nothing_left(client.daemon, client)
    for engine in engines:
        engine.close()
    client.close()


@seeded(17, messages=0.3)
def test_vllm_with_a_known_layout(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = MemoryDaemon()
    engine = KnownLayout(daemon, DEADLINES, weigh_loads=False, write_patience_s=0.01, **DEADLINES_MS)
    faults.install(monkeypatch.setattr)
    faults.install_copies(monkeypatch.setattr, COPIES, "from_slot", "to_slot")
    chance = random.Random(faults.seed)
    heads = [[chance.randrange(1000) for _ in range(6 * 8)] for _ in range(6)]
    rounds = 0
    while faults.total < FAULTS + 500:
        rounds += 1
        if rounds % 50 == 0:
            daemon.evict()
        if rounds % 300 == 0:
            daemon.stop()
            daemon.start()
        mostly_connected(chance, engine.pool, *engine.joined)
        engine.connection._retry_at = 0.0
        head = chance.choice(heads)[: 8 * chance.randrange(1, 7)]
        tokens = head + [rounds] * chance.randrange(1, 12)
        end = RequestEnd(complete=chance.random() < 0.8, stop_reason=chance.choice(["stop", "abort"]))
        engine.serve(f"r{rounds}", tokens, local=chance.choice([0, 0, 0, 4]), end=end)
    engine.settle()
    faults.end()
    assert engine.loaded > 500
    check(
        faults,
        [
            *("Pool.prefix", "Pool.store_all", "EngineCalls.begin_match", "EngineCalls.attach", "PendingMatch.poll"),
            *("PendingMatch.cancel", "Lease.fetch", "Lease.release", "Lease.takes", "Lease.begin_nodes"),
        ],
    )
    nothing_left(daemon, engine.pool, *engine.joined)
    assert not engine.scheduler._requests
    engine.close()


@pytest.mark.parametrize("shards", [1, 2])
@seeded(19, messages=0.3)
def test_vllm_with_an_opaque_layout(faults: Faults, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = MemoryDaemon()
    engine = Opaque(daemon, DEADLINES, shards, write_patience_s=0.01, **DEADLINES_MS)
    faults.install(monkeypatch.setattr)
    faults.install_copies(monkeypatch.setattr, HostCopy, "from_slot", "to_slot")
    chance = random.Random(faults.seed)
    rounds = 0
    while faults.total < FAULTS + 500:
        rounds += 1
        if rounds % 50 == 0:
            daemon.evict()
        if rounds % 300 == 0:
            daemon.stop()
            daemon.start()
        mostly_connected(chance, engine.pool, *engine.joined)
        engine.connection._retry_at = 0.0
        engine.serve(f"r{rounds}", chance.randrange(6), chance.randrange(1, 7), gives_up=chance.random() < 0.1)
    assert engine.manager.flush(TIMEOUT_S)
    faults.end()
    assert engine.loaded > 100
    writes = ["Pool.store_all"] if shards == 1 else ["EngineCalls.reserve", "EngineCalls.attach_write", "Write.commit"]
    check(
        faults,
        [
            *("Pool.opaque_keys", "EngineCalls.begin_match", "EngineCalls.attach", "PendingMatch.poll", *writes),
            *("PendingMatch.cancel", "Lease.fetch", "Lease.release", "Lease.takes"),
        ],
    )
    nothing_left(daemon, engine.pool, *engine.joined)
    assert not engine.manager._requests
    assert not engine.manager.waiting
    engine.close()
