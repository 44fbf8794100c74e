"""LoRA adapters: their digests, and the adapters that vLLM has loaded."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.fakes import FakeRequest
from tests.connector.side import SEGMENT, Bench, blocks_of, request
from tokenlake_client.engines.vllm.adapters import (
    Adapters,
    AdapterUse,
    LoadedAdapters,
    RequestAdapter,
    options_of,
)
from tokenlake_client.engines.vllm.request import RequestEnd
from tokenlake_client.weights import digest_of_directory, state_of_directory

SOON_S = 20.0


def save(directory: Path, content: bytes = b"weights") -> Path:
    """An adapter in `directory`, whose former files are replaced."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
    new = directory / "new"
    new.write_bytes(content)
    os.replace(new, directory / "adapter_model.safetensors")
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


def test_the_contents_are_the_digest(adapters: Adapters, tmp_path: Path) -> None:
    one, copy, other = save(tmp_path / "one"), save(tmp_path / "copy"), save(tmp_path / "other", b"others")
    first = found(adapters, lora(one))
    assert first.digest == digest_of_directory(one)
    assert found(adapters, lora(copy, "b", 2)).digest == first.digest
    assert found(adapters, lora(other, "a", 3)).digest != first.digest
    assert first.use == AdapterUse(1, state_of_directory(one))


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


def test_replaced_files_are_another_adapter(adapters: Adapters, tmp_path: Path) -> None:
    directory = save(tmp_path / "one")
    first = found(adapters, lora(directory))
    assert not found(adapters, lora(directory)).replaced
    # The same size, and the old time of modification.
    former = (directory / "adapter_model.safetensors").stat()
    save(directory, b"wEIGHTS")
    os.utime(directory / "adapter_model.safetensors", ns=(former.st_atime_ns, former.st_mtime_ns))
    second = found(adapters, lora(directory))
    assert second.digest != first.digest
    assert second.use != first.use
    assert second.replaced
    adapters.cache_emptied()
    assert not found(adapters, lora(directory)).replaced


@pytest.mark.parametrize("fault", ["nothing", "no weights", "no configuration", "damaged", "unreadable"])
def test_files_that_cannot_be_read_are_refused_by_name(
    fault: str, adapters: Adapters, tmp_path: Path, lines: list[str]
) -> None:
    directory = save(tmp_path / "one")
    if fault == "nothing":
        directory = tmp_path / "none"
    elif fault == "no weights":
        (directory / "adapter_model.safetensors").unlink()
    elif fault == "no configuration":
        (directory / "adapter_config.json").unlink()
    elif fault == "damaged":
        (directory / "adapter_config.json").write_text("{")
    else:
        (directory / "adapter_model.safetensors").unlink()
        (directory / "adapter_model.safetensors").symlink_to(tmp_path / "gone")
    assert found(adapters, lora(directory, "mine")).refused
    assert len(lines) == 1
    assert lines[0].startswith("served without the pool: LoRA adapter 'mine': its files cannot be read")


def test_an_adapter_without_a_name_is_refused(adapters: Adapters, tmp_path: Path, lines: list[str]) -> None:
    assert adapters.find(lora(save(tmp_path / "one"), "")).refused
    assert lines == ["served without the pool: requests for a LoRA adapter without a name"]


def test_a_rank_compares_the_files_that_vllm_has_loaded(lines: list[str]) -> None:
    loaded = LoadedAdapters(lines.append)
    use = AdapterUse(1, "files")
    assert loaded.may_load(None)
    assert loaded.may_store(None)
    assert loaded.may_load(use), "vLLM loads the adapter before the request computes"
    assert not loaded.may_store(use)
    loaded.loaded(1, "files")
    assert loaded.may_load(use)
    assert loaded.may_store(use)
    for files in ("older", None):
        loaded.loaded(1, files)
        assert not loaded.may_load(use)
        assert not loaded.may_store(use)
    assert "changed after vLLM loaded them" in lines[-1]


class TestRequests:
    """The scheduler's side, with adapters whose digest the test sets."""

    @pytest.fixture
    def bench(self) -> Bench:
        return Bench()

    @staticmethod
    def digested(adapter: RequestAdapter, digest: str = "d") -> RequestAdapter:
        adapter.use, adapter.digest = AdapterUse(5, digest), digest
        return adapter

    def arrive(self, bench: Bench, adapter: RequestAdapter, name: str = "r", tokens: int = 3 * SEGMENT) -> FakeRequest:
        one = request(tokens, name)
        bench.side.new_request(one, adapter=adapter)
        return one

    def know(self, bench: Bench, one: FakeRequest, adapter: str | None) -> None:
        bench.pool.known |= set(bench.pool.prefix(one.all_token_ids, adapter=adapter).keys)

    def test_keys_have_the_adapter(self, bench: Bench) -> None:
        one = self.arrive(bench, self.digested(RequestAdapter("a")))
        self.know(bench, one, None)
        assert bench.side.matched(one, 0) == 0
        two = self.arrive(bench, self.digested(RequestAdapter("a")), "two")
        self.know(bench, two, "d")
        external = bench.side.matched(two, 0)
        assert external == 3 * SEGMENT - 4
        bench.side.allocated(two, blocks_of(two), external)
        plan = bench.step(one, 0, one.num_tokens)
        assert [load.adapter for load in plan.loads] == [AdapterUse(5, "d")]
        assert [save.adapter for save in plan.saves] == [AdapterUse(5, "d")]
        assert list(plan.saves[0].keys) == bench.pool.prefix(one.all_token_ids, adapter="d").keys

    def test_a_request_waits_for_the_digest_as_long_as_for_a_lookup(self, bench: Bench) -> None:
        adapter = RequestAdapter("a")
        one = self.arrive(bench, adapter)
        assert bench.side.matched(one, 0) is None
        self.digested(adapter)
        self.know(bench, one, "d")
        assert bench.side.matched(one, 0) == 3 * SEGMENT - 4
        late = RequestAdapter("a")
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
        adapter = RequestAdapter("a")
        one = self.arrive(bench, adapter)
        assert bench.side.matched(one, 0) is None
        adapter.refused = True
        assert bench.side.matched(one, 0) == 0
        bench.side.allocated(one, blocks_of(one), 0)
        assert bench.step(one, 0, one.num_tokens).saves == ()
        assert not bench.side.finished(one, blocks_of(one), RequestEnd(complete=True))
        assert bench.counters.read().requests_not_served == 1
        assert bench.reported == []

    def test_an_end_before_the_digest_is_known(self, bench: Bench) -> None:
        one = self.arrive(bench, RequestAdapter("a"))
        assert not bench.side.finished(one, blocks_of(one), RequestEnd(complete=False))
        assert bench.reported == []

    @pytest.mark.parametrize("replaced", [False, True])
    def test_results_of_replaced_files_in_vllms_cache_are_not_stored(self, bench: Bench, replaced: bool) -> None:
        adapter = self.digested(RequestAdapter("a"))
        adapter.replaced = replaced
        one = self.arrive(bench, adapter)
        assert bench.side.matched(one, SEGMENT) == 0
        bench.side.allocated(one, blocks_of(one), 0)
        assert bool(bench.step(one, SEGMENT, 2 * SEGMENT).saves) is not replaced
        two = self.arrive(bench, adapter, "two", 2 * SEGMENT)
        assert bench.side.matched(two, 0) == 0
        bench.side.allocated(two, blocks_of(two), 0)
        assert bench.step(two, 0, 2 * SEGMENT).saves
