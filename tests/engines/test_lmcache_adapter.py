"""LMCache's L2 adapter, on a pool in memory and without LMCache: what is stored is found and read back byte for byte;
an error of the pool is a miss, every task has a result, and nothing reaches LMCache's threads."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.engines.l2_adapter import Described, Dtype, Held, Key, keys, standing_in, written
from tests.robustness.live import wait_until
from tokenlake.errors import ConfigurationError, LayoutRefused, ProtocolRefused
from tokenlake_client.engines.lmcache.identity import form_of, layout_of, name_of
from tokenlake_client.engines.lmcache.settings import AdapterSettings
from tokenlake_client.testing import MemoryDaemon, MemoryPool

TIMEOUT_S = 10.0
PARAMS = {"engine": "vllm 0 float32", "weights_digest": "w", "match_ms": 10_000}


class Servers:
    """Adapters at one daemon in memory, each that of a server."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = module
        self.daemon = MemoryDaemon()
        self.adapters: list[Any] = []
        monkeypatch.setattr(module.Pool, "connect", self._connect)

    def _connect(
        self, socket: object, layout: Any, credential: object, *, verify: bool, **ignored: object
    ) -> MemoryPool:
        return MemoryPool(layout, self.daemon, verify=verify)

    def start(self, **settings: Any) -> Server:
        adapter = self.module.TokenLakeL2({**PARAMS, **settings}, l1_memory_desc=None)
        self.adapters.append(adapter)
        return Server(adapter)


class Server:
    """LMCache's threads."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, named: Sequence[Key], objects: Sequence[Held]) -> int:
        task = self.adapter.submit_store_task(list(named), list(objects))
        wait_for(self.adapter.get_store_event_fd())
        results: dict[int, int] = self.adapter.pop_completed_store_tasks()
        return results[task]

    def find(self, named: Sequence[Key], described: Described | None = None) -> list[bool]:
        groups = {key.object_group_id: described or Described() for key in named}
        task = self.adapter.submit_lookup_and_lock_task(list(named), groups)
        wait_for(self.adapter.get_lookup_and_lock_event_fd())
        found: list[bool] = self.adapter.query_lookup_and_lock_result(task).values
        assert self.adapter.query_lookup_and_lock_result(task) is None
        return found

    def load(self, named: Sequence[Key], objects: Sequence[Held]) -> list[bool]:
        task = self.adapter.submit_load_task(list(named), list(objects))
        wait_for(self.adapter.get_load_event_fd())
        loaded: list[bool] = self.adapter.query_load_result(task).values
        return loaded

    def connect(self, described: Described | None = None) -> Server:
        """The first lookup connects in the background."""
        self.find(keys(1, seed=99), described)
        form = self.adapter._forms
        wait_until(lambda: all(kept.connection.pool for kept in form.values()), "the pool is connected", TIMEOUT_S)
        return self

    @property
    def leases(self) -> int:
        return sum(len(kept.leases) for kept in self.adapter._forms.values())


def wait_for(descriptor: int) -> None:
    """Wait for the event of a task, as LMCache does."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    assert poller.poll(1e3 * TIMEOUT_S)
    os.eventfd_read(descriptor)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    servers = Servers(standing_in(monkeypatch), monkeypatch)
    yield servers
    for adapter in servers.adapters:
        adapter.close()


def test_stored_objects_are_found_and_loaded_by_another_server(servers: Servers) -> None:
    first, second = servers.start(), servers.start()
    objects = written(6)
    assert first.store(keys(6), objects) == sum(each.get_size() for each in objects)
    second.connect()
    assert second.find([*keys(6), *keys(2, seed=9)]) == [True] * 6 + [False] * 2
    read = [Held() for _ in range(6)]
    assert second.load(keys(6), read) == [True] * 6
    assert [each.bytes.tobytes() for each in read] == [each.bytes.tobytes() for each in objects]
    second.adapter.submit_unlock(keys(6))
    assert second.leases == 0
    status = second.adapter.report_status()
    assert status["is_healthy"]
    assert (status["tokens_loaded"], status["tokens_hit_here"], status["failures"]) == (6 * 256, 6 * 256, 0)
    assert first.adapter.counts.tokens_stored == 6 * 256


def test_the_counts_are_on_the_metrics_page(servers: Servers) -> None:
    registry = pytest.importorskip("prometheus_client").REGISTRY
    name, labels = "lmcache:tokenlake_looked_up_tokens_total", {"source": "this_node"}
    server = servers.start()
    server.store(keys(3), written(3))
    server.find(keys(3))
    assert registry.get_sample_value(name, labels) == 3 * 256
    assert registry.get_sample_value("lmcache:tokenlake_stored_tokens_total") == 3 * 256
    server.adapter.close()
    assert registry.get_sample_value(name, labels) is None


def test_locked_objects_are_not_evicted_until_they_are_unlocked(servers: Servers) -> None:
    server, objects = servers.start(), written(4)
    server.store(keys(4), objects)
    assert server.find(keys(4)) == [True] * 4
    # LMCache unlocks what it does not load, in any order; the rest stays.
    server.adapter.submit_unlock([keys(4)[2]])
    servers.daemon.evict()
    read = [Held() for _ in range(4)]
    assert server.load(keys(4), read) == [True, True, False, True]
    assert [each.bytes.tobytes() for each in read[:2]] == [each.bytes.tobytes() for each in objects[:2]]
    server.adapter.submit_unlock(keys(4))
    assert server.leases == 0


def test_two_requests_lock_the_same_object(servers: Servers) -> None:
    server = servers.start()
    server.store(keys(2), written(2))
    assert server.find(keys(2)) == server.find(keys(2)) == [True] * 2
    assert server.load(keys(2), [Held(), Held()]) == [True] * 2
    server.adapter.submit_unlock(keys(2))
    servers.daemon.evict()
    assert server.load(keys(2), [Held(), Held()]) == [True] * 2
    server.adapter.submit_unlock(keys(2))
    assert server.leases == 0


def test_the_lease_of_an_aborted_request_ends(servers: Servers) -> None:
    server = servers.start(lease_s=0.5)
    server.store(keys(3), written(3))
    assert server.find(keys(3)) == [True] * 3
    wait_until(lambda: server.adapter.counts.pages_not_read == 3, "the lease has ended", TIMEOUT_S)
    # A late load looks the objects up again.
    assert server.load(keys(3), [Held() for _ in range(3)]) == [True] * 3
    wait_until(lambda: server.leases == 0, "nothing stays leased", TIMEOUT_S)


def test_a_corrupt_object_is_not_loaded(servers: Servers) -> None:
    server = servers.start(verify=True)
    server.store(keys(4), written(4))
    (kept,) = server.adapter._forms.values()
    pool = kept.connection.pool
    with pool.match(kept._keys(pool, [name_of(key) for key in keys(4)])) as lease:
        place = lease.places[1]
        pool.link.regions.get(int(place["region"]), write=True).slots[place["slot"]] ^= 1
    assert server.find(keys(4)) == [True] * 4
    assert server.load(keys(4), [Held() for _ in range(4)]) == [True, False, True, True]
    assert server.adapter.counts.loads_failed == 1


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "other"},
        {"kv_rank": 2 << 24},
        {"object_group_id": 1},
        {"cache_salt": "user"},
        {"chunk_hash": bytes(32)},
    ],
)
def test_each_part_of_a_key_tells_objects_apart(servers: Servers, other: dict[str, Any]) -> None:
    server = servers.start()
    server.store(keys(1), written(1))
    changed = [replace(keys(1)[0], **other)]
    server.find(changed)
    wait_until(lambda: all(kept.connection.pool for kept in server.adapter._forms.values()), "connections", TIMEOUT_S)
    assert server.find(changed) == [False]
    assert server.find(keys(1)) == [True]


@pytest.mark.parametrize(
    "settings", [{"engine": "vllm 1"}, {"weights_digest": "v"}, {"salt": "s"}, {"chunk_tokens": 128}]
)
def test_servers_with_other_settings_share_nothing(servers: Servers, settings: dict[str, Any]) -> None:
    servers.start().store(keys(1), written(1))
    assert servers.start(**settings).connect().find(keys(1)) == [False]


@pytest.mark.parametrize(
    "described",
    [
        Described([(2, 3, 4, 16)]),
        Described(dtypes=[Dtype("torch.int32")]),
        Described([(2, 3, 16, 2)] * 2, [Dtype()] * 2),
    ],
)
def test_objects_of_another_form_are_not_found(servers: Servers, described: Described) -> None:
    servers.start().store(keys(1), written(1))
    assert servers.start().connect(described).find(keys(1), described) == [False]


def test_without_a_daemon_everything_is_a_miss(servers: Servers) -> None:
    server = servers.start()
    server.store(keys(2), written(2))
    servers.daemon.stop()
    assert server.find(keys(2)) == [False] * 2
    assert server.load(keys(2), [Held(), Held()]) == [False] * 2
    assert server.store(keys(2, seed=1), written(2, seed=1)) == -1


def test_no_error_reaches_lmcache(servers: Servers) -> None:
    server = servers.start()
    server.store(keys(2), written(2))

    def refuse(message: object) -> None:
        raise ProtocolRefused("the daemon sends nonsense")

    servers.daemon.intercept = refuse
    assert server.find(keys(2)) == [False] * 2
    assert server.load(keys(2), [Held(), Held()]) == [False] * 2
    assert server.store(keys(2, seed=1), written(2, seed=1)) == -1
    servers.daemon.intercept = None
    # Messages that LMCache does not send: another size, no description, a short hash.
    narrow = Held()
    narrow.bytes = narrow.bytes[:8]
    assert server.store(keys(1, seed=2), [narrow]) == -1
    task = server.adapter.submit_lookup_and_lock_task(keys(1), {})
    wait_for(server.adapter.get_lookup_and_lock_event_fd())
    assert server.adapter.query_lookup_and_lock_result(task).values == [False]
    assert server.find([Key(b"12345678")]) == [False]
    server.adapter.submit_unlock([Key(b"12345678")])
    assert server.adapter.counts.failures >= 6


def test_tasks_after_the_end_fail(servers: Servers) -> None:
    server = servers.start()
    server.adapter.close()
    task = server.adapter.submit_load_task(keys(1), [Held()])
    assert server.adapter.query_load_result(task) is None
    server.adapter.close()


def test_the_start_needs_the_name_of_the_engine(servers: Servers) -> None:
    with pytest.raises(ConfigurationError, match="engine"):
        servers.start(engine="")
    with pytest.raises(ConfigurationError, match="unknown"):
        servers.start(unknown=1)


def test_weights_that_cannot_be_identified_are_refused() -> None:
    form = form_of(keys(1, model_name="no/such-model")[0], Described().shapes, Described().dtypes)
    with pytest.raises(LayoutRefused, match="weights_digest"):
        layout_of(form, "0", AdapterSettings(engine="e"))
