"""LoRA adapters: their digests, and the adapters that vLLM has loaded."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.fakes import FakeRequest
from tests.connector.side import BLOCK, SEGMENT, Bench, blocks_of, request
from tokenlake_client.engines.vllm import adapters as module
from tokenlake_client.engines.vllm.adapters import (
    Adapters,
    AdapterUse,
    CachedAdapters,
    LoadedAdapters,
    RequestAdapter,
    options_of,
)
from tokenlake_client.weights import digest_of_directory, state_of_directory

SOON_S = 20.0
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save(directory: Path, content: bytes = b"weights") -> Path:
    """An adapter in `directory`."""
    directory.mkdir()
    (directory / CONFIG).write_text(json.dumps({"r": 8}))
    (directory / WEIGHTS).write_bytes(content)
    return directory


def lora(directory: Path | str, name: str = "a", number: int = 1, **fields: Any) -> Any:
    settings = {"lora_name": name, "lora_int_id": number, "lora_path": str(directory), "is_3d_lora_weight": False}
    return SimpleNamespace(**settings | fields)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def adapters(lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Adapters({}, lines.append)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def found(adapters: Adapters, asked: Any) -> RequestAdapter:
    adapter = adapters.find(asked)
    until(lambda: adapter.refused or adapter.digest is not None)
    return adapter


def test_settings_that_change_the_computation_change_the_digest(tmp_path: Path, adapters: Adapters) -> None:
    directory = save(tmp_path / "one")
    config = SimpleNamespace(lora_dtype="auto", target_modules=None, enable_moe_shared_loras=False, max_loras=4)
    assert options_of(config, "float32") == {}
    config.lora_dtype = "float32"
    assert options_of(config, "float32") == {}
    config.target_modules = ["q_proj"]
    narrow = Adapters(options_of(config, "float32"), lambda line: None)
    asked = (lora(directory), lora(directory, is_3d_lora_weight=True))
    digests = [found(one, ask).digest for one in (adapters, narrow) for ask in asked]
    assert len(set(digests)) == 4


def dangling(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to("gone")


FAULTS: dict[str, Callable[[Path], object]] = {
    "nothing": shutil.rmtree,
    "no weights": lambda directory: (directory / WEIGHTS).unlink(),
    "no configuration": lambda directory: (directory / CONFIG).unlink(),
    "damaged": lambda directory: (directory / CONFIG).write_text("{"),
    "unreadable": dangling,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_cannot_be_read_are_refused_by_name(
    fault: str, adapters: Adapters, tmp_path: Path, lines: list[str]
) -> None:
    directory = save(tmp_path / "one")
    FAULTS[fault](directory)
    assert found(adapters, lora(directory, "mine")).refused
    (line,) = lines
    assert line.startswith("served without the pool: LoRA adapter 'mine': its files cannot be read")


def test_a_slow_digest_delays_no_adapter_whose_digest_is_known(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, slow = save(tmp_path / "known"), save(tmp_path / "slow", b"others")
    first = found(adapters, lora(known))
    resume = threading.Event()

    def digest(directory: Path) -> str:
        assert resume.wait(SOON_S)
        return digest_of_directory(directory)

    monkeypatch.setattr("tokenlake_client.engines.vllm.adapters.digest_of_directory", digest)
    waiting = [adapters.find(lora(slow, "slow", 2)) for _ in range(3)]
    assert found(adapters, lora(known)).digest == first.digest
    assert [one.digest for one in waiting] == [None] * 3
    resume.set()
    until(lambda: all(one.digest is not None for one in waiting))


def test_the_number_of_requests_that_wait_for_digests_is_limited(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    directory = save(tmp_path / "one")
    resume = threading.Event()

    def state(path: Path) -> str:
        assert resume.wait(SOON_S)
        return state_of_directory(path)

    monkeypatch.setattr("tokenlake_client.engines.vllm.adapters.state_of_directory", state)
    asked = [adapters.find(lora(directory)) for _ in range(5000)]
    refused = [one.refused for one in asked]
    assert 0 < refused.count(False) < 2000
    assert set(lines) == {"served without the pool: LoRA adapter 'a': too many requests wait for its digest"}
    resume.set()
    until(lambda: all(one.refused or one.digest is not None for one in asked))


def test_an_adapter_without_a_name_is_refused(adapters: Adapters, tmp_path: Path, lines: list[str]) -> None:
    assert adapters.find(lora(save(tmp_path / "one"), "")).refused
    assert lines == ["served without the pool: requests for a LoRA adapter without a name"]


def test_other_numbers_of_an_adapter_in_vllms_cache() -> None:
    loaded = LoadedAdapters(lambda line: None)
    loaded.loaded(1, "old")
    loaded.loaded(2, "new")
    loaded.loaded(3, "new")
    assert loaded.may_store(AdapterUse(2, "new", others=(3, 4)))
    assert not loaded.may_store(AdapterUse(2, "new", others=(1,)))


def test_what_may_have_computed_a_request() -> None:
    """The time and the numbers that may have computed a request."""
    now = [5.0]
    cached = CachedAdapters(lambda: now[0])

    def placed(number: int, *, local: bool, path: str = "/a") -> AdapterUse | None:
        adapter = RequestAdapter(number, "a", path)
        known = cached.placed(adapter, cached=local)
        adapter.digest = "d"
        return adapter.use if known else None

    assert placed(1, local=False) == AdapterUse(1, "", since=5.0)
    now[0] = 6.0
    assert placed(2, local=False) == AdapterUse(2, "", since=6.0)
    assert placed(2, local=True) == AdapterUse(2, "", since=0.0, others=(1,))
    assert placed(2, local=True, path="/b") == AdapterUse(2, "", since=0.0)
    now[0] = 9.0
    cached.emptied()
    now[0] = 10.0
    assert placed(2, local=True) == AdapterUse(2, "", since=9.0)
    for number in range(1000):
        assert placed(number, local=False) is not None
    assert placed(2, local=True) is None, "the numbers are not remembered without limit"
    assert placed(2, local=False) == AdapterUse(2, "", since=10.0)


def test_an_adapter_that_a_rank_has_forgotten_is_refused(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """vLLM numbers each adapter anew that is loaded while it runs, so the memory of numbers has a limit."""
    monkeypatch.setattr(module, "MAX_ADAPTERS", 2)
    loaded = LoadedAdapters(lines.append, lambda: 10.0)
    for number in (1, 2):
        loaded.loaded(number, f"files {number}")
    assert loaded.may_store(AdapterUse(1, "files 1", 5.0))
    loaded.loaded(3, "files 3")
    assert lines == []
    for files in ("files 2", "other files"):
        assert not loaded.may_load(AdapterUse(2, files, 5.0))
        assert not loaded.may_store(AdapterUse(2, files, 5.0))
    assert not loaded.may_store(AdapterUse(3, "files 3", 5.0, others=(2,)))
    assert loaded.may_store(AdapterUse(1, "files 1", 5.0)), "it was used later"
    assert loaded.may_load(AdapterUse(4, "files 4", 5.0)), "no adapter with a higher number was forgotten"
    loaded.loaded(2, "files 2")
    assert not loaded.may_store(AdapterUse(2, "files 2", 5.0)), "earlier tokens may be of other files"
    assert loaded.may_store(AdapterUse(2, "files 2", 11.0))


def test_the_cache_of_a_forgotten_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler does not trust the cache for a forgotten adapter."""
    monkeypatch.setattr(module, "MAX_ADAPTERS", 2)
    cached = CachedAdapters()

    def placed(name: str, *, local: bool) -> bool:
        return cached.placed(RequestAdapter(1, name, name), cached=local)

    assert placed("a", local=False)
    assert placed("b", local=False)
    assert placed("a", local=True)
    assert placed("c", local=False)
    assert placed("a", local=True), "it was used later than b"
    assert not placed("b", local=True)
    assert placed("b", local=False), "the request computes all its tokens"
    cached.emptied()
    assert placed("b", local=True)


class TestRequests:
    """The scheduler's side, with adapters whose digest the test sets."""

    @pytest.fixture
    def bench(self) -> Bench:
        return Bench()

    @staticmethod
    def unknown() -> RequestAdapter:
        return RequestAdapter(5, "a", "/a")

    def digested(self, adapter: RequestAdapter | None = None, digest: str = "d") -> RequestAdapter:
        adapter = self.unknown() if adapter is None else adapter
        adapter.files = adapter.digest = digest
        return adapter

    def arrive(self, bench: Bench, adapter: RequestAdapter, name: str = "r", tokens: int = 3 * SEGMENT) -> FakeRequest:
        one = request(tokens, name)
        bench.side.new_request(one, adapter=adapter)
        return one

    def know(self, bench: Bench, one: FakeRequest, adapter: str | None) -> None:
        bench.pool.known |= set(bench.pool.prefix(one.all_token_ids, adapter=adapter).keys)

    def test_a_request_waits_for_the_digest_as_long_as_for_a_lookup(self, bench: Bench) -> None:
        adapter = self.unknown()
        one = self.arrive(bench, adapter)
        assert bench.side.matched(one, 0) is None
        self.digested(adapter)
        self.know(bench, one, "d")
        assert bench.side.matched(one, 0) == 3 * SEGMENT - 4
        late = self.unknown()
        two = self.arrive(bench, late, "two")
        assert bench.side.matched(two, 0) is None
        bench.now += 1.0
        assert bench.side.matched(two, 0) == 0
        assert bench.counters.read().lookups_late == 1
        # Its segments are stored once the digest is known.
        bench.side.allocated(two, blocks_of(two), 0)
        assert bench.step(two, 0, 2 * SEGMENT).saves == ()
        self.digested(late)
        assert [len(save.keys) for save in bench.step(two, 2 * SEGMENT, SEGMENT).saves] == [3]

    def test_a_refused_adapter_is_served_without_the_pool(self, bench: Bench) -> None:
        adapter = self.unknown()
        one = self.arrive(bench, adapter)
        assert bench.side.matched(one, 0) is None
        adapter.refused = True
        assert bench.side.matched(one, 0) == 0
        bench.side.allocated(one, blocks_of(one), 0)
        assert bench.step(one, 0, one.num_tokens).saves == ()
        assert not bench.end(one)[0]
        assert bench.counters.read().requests_not_served == 1
        assert bench.reported == []

    def test_a_failed_load_pauses_its_adapter(self, bench: Bench) -> None:
        """vLLM has loaded other files than those that were digested, so each load would fail."""
        expected = 3 * SEGMENT - 4

        def matched(name: str, digest: str = "d") -> int | None:
            one = self.arrive(bench, self.digested(digest=digest), name)
            self.know(bench, one, digest)
            external = bench.side.matched(one, 0)
            assert external is not None
            bench.side.allocated(one, blocks_of(one), external)
            bench.idle()
            return external

        assert matched("one") == expected
        bench.side.worker_output(None, ["one"], {101})
        assert matched("two") == 0
        assert matched("other files", "new") == expected
        bench.now += 60.0
        assert matched("three") == expected
        bench.side.worker_output(None, ["three"], set())
        assert matched("four") == expected


class TestReplacedFiles:
    """vLLM loads other files of an adapter in place: of the results of the former ones none is stored under the keys of
    the new ones."""

    @pytest.fixture
    def bench(self) -> Bench:
        return Bench()

    @pytest.fixture
    def loaded(self, bench: Bench) -> LoadedAdapters:
        def clock() -> float:
            bench.now += 1.0
            return bench.now

        loaded = LoadedAdapters(lambda line: None, clock)
        loaded.loaded(5, "old")
        return loaded

    @staticmethod
    def place(bench: Bench, *, local: int = 0, digest: str | None = "new", name: str = "r") -> Any:
        adapter, one = RequestAdapter(5, "a", "/a"), request(3 * SEGMENT, name)
        adapter.files, adapter.digest = digest or "", digest
        bench.now += 1.0
        bench.side.new_request(one, adapter=adapter)
        while bench.side.matched(one, local) is None:
            bench.now += 1.0
        bench.side.allocated(one, blocks_of(one), 0)
        return one, adapter

    @staticmethod
    def stored(bench: Bench, loaded: LoadedAdapters, one: FakeRequest, computed: int, new: int) -> int:
        bench.now += 1.0
        plan = bench.step(one, computed, new)
        return sum(len(save.keys) for save in plan.saves if loaded.may_store(save.adapter))

    def test_within_a_prompt(self, bench: Bench, loaded: LoadedAdapters) -> None:
        one, _ = self.place(bench)
        assert self.stored(bench, loaded, one, 0, SEGMENT + BLOCK) == 0
        loaded.loaded(5, "new")
        assert self.stored(bench, loaded, one, SEGMENT + BLOCK, 2 * SEGMENT - BLOCK) == 0
        two, _ = self.place(bench, name="two")
        assert self.stored(bench, loaded, two, 0, 3 * SEGMENT) == 3

    def test_segments_that_are_offered_again(self, bench: Bench, loaded: LoadedAdapters) -> None:
        one, _ = self.place(bench)
        assert self.stored(bench, loaded, one, 0, 2 * SEGMENT) == 0
        loaded.loaded(5, "new")
        bench.side.worker_output(None, [], {7})
        assert self.stored(bench, loaded, one, 2 * SEGMENT, BLOCK) == 0

    @pytest.mark.parametrize("emptied", [False, True])
    @pytest.mark.parametrize("late", [False, True])
    def test_tokens_in_vllms_cache(self, bench: Bench, loaded: LoadedAdapters, late: bool, emptied: bool) -> None:
        one, _ = self.place(bench, digest="old")
        assert self.stored(bench, loaded, one, 0, 3 * SEGMENT) == 3
        loaded.loaded(5, "new")
        if emptied:
            bench.now += 1.0
            bench.side.cache_emptied()
        two, adapter = self.place(bench, local=SEGMENT, digest=None if late else "new", name="two")
        adapter.files = adapter.digest = "new"
        assert self.stored(bench, loaded, two, SEGMENT, 2 * SEGMENT) == (3 if emptied else 0)
