"""vLLM's hooks on connectors that are made without an engine: an error of the connector's own code does not reach
vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from tests.engines.vllm.conftest import TINY
from tests.engines.vllm.test_identity import configured
from tests.engines.vllm_signatures import Source, stored
from tokenlake.errors import ConfigurationError, LayoutRefused
from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.engines.vllm import patches, side
from tokenlake_client.engines.vllm.known import connector as known
from tokenlake_client.engines.vllm.known.request import end_of
from tokenlake_client.engines.vllm.offloading import connector as opaque
from tokenlake_client.engines.vllm.offloading.pages import PageCache, PageTable
from tokenlake_client.engines.vllm.offloading.spec import PoolWorker
from tokenlake_client.engines.vllm.patches import ADAPTERS, VERSION, Patch, apply

pytestmark = pytest.mark.timeout(300)

REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_REPETITION: "repetition",
}


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> tuple[Any, KVConnectorRole, KVCacheConfig]:
    """The arguments of a connector of vLLM's scheduler. There is no daemon."""
    transfer = KVTransferConfig(
        kv_connector="TokenLakeConnector",
        kv_connector_module_path="tokenlake_client.engines.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"socket": str(tmp_path / "none.sock")},
    )
    spec = FullAttentionSpec(block_size=128, num_kv_heads=TINY.kv_heads, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer.{number}" for number in range(TINY.layers)], spec)]
    cache = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    return configured(model, kv_transfer_config=transfer), KVConnectorRole.SCHEDULER, cache


def broken(*_: object, **__: object) -> Any:
    raise AttributeError("it was renamed")


def test_a_scheduler_side_that_cannot_be_opened(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine starts where the scheduler's side cannot be opened, and tells the daemon why it goes without it."""
    told: list[str] = []
    monkeypatch.setattr(
        "tokenlake_client.engines.common.settings.declined", lambda socket, daemon_uid, reason: told.append(reason)
    )
    ended: list[Connection] = []
    monkeypatch.setattr(Connection, "close", lambda connection: ended.append(connection))
    monkeypatch.setattr(known, "SchedulerSide", broken)
    connector = known.KnownLayoutConnector(*arguments)
    assert connector.layout is None
    assert told == ["it was renamed"]
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
    assert len(ended) == 1, "the connection does not outlive the attempt"
    assert connector.counts.failures == 2, "the connection, and the constructor"


def test_errors_in_hooks_of_the_opaque_connector(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[object] = []
    monkeypatch.setattr(OffloadingConnector, "on_new_request", lambda connector, request: arrived.append(request))
    monkeypatch.setattr(side, "stats_of", broken)
    connector = opaque.OpaqueLayoutConnector(*arguments)
    try:
        epochs: list[str] = []
        assert connector._manager is not None
        monkeypatch.setattr(connector._manager.chunks, "new_weights", epochs.append)
        request = SimpleNamespace(request_id="r", lora_request=None, mm_features=())
        connector.on_new_request(request)
        assert arrived == [request], "vLLM's own connector sees the request"
        assert connector.counts.failures == 2, "the hook failed, so that the manager does not know the request"
        assert connector.get_kv_connector_stats() is None
        connector.bind_gpu_block_pool(object())
        assert connector.reset_cache() is False
        assert epochs, "the weights may have changed"
        assert connector.counts.failures == 4
    finally:
        connector.shutdown()


@pytest.mark.parametrize("status", [status for status in RequestStatus if RequestStatus.is_finished(status)])
def test_the_end_of_a_request_is_one_of_the_pools_reasons(status: RequestStatus) -> None:
    end, reason = end_of(status.name, 5), REASONS.get(status, "")
    assert (end.stop_reason, end.output_tokens) == ((reason, 5) if reason else ("", -1))
    assert end.complete == (reason in ("stop", "length"))


# -- sleep, and loads that a step waits for


def test_ranks_sleep_and_wake(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device does not reach vLLM."""
    config, _, cache = arguments
    for made in (known.KnownLayoutConnector, opaque.OpaqueLayoutConnector):
        rank = made(config, KVConnectorRole.WORKER, cache)
        rank.unregister_kv_caches()
        rank.restore_kv_caches()
        calls: list[str] = []
        worker = SimpleNamespace(sleep=lambda calls=calls: calls.append("sleep"), wake=broken, close=lambda: None)
        place = rank if made is known.KnownLayoutConnector else rank.connector_worker
        value = worker if place is rank else SimpleNamespace(chunks=worker, shutdown=worker.close)
        monkeypatch.setattr(place, "_worker" if place is rank else "worker", value, raising=False)
        rank.unregister_kv_caches()
        rank.restore_kv_caches()
        assert (calls, rank.counts.failures) == (["sleep"], 1)


def test_no_load_is_made_for_a_step_that_waits_for_it() -> None:
    """vLLM makes them where the setting `sync_load_budget_bytes` allows it."""
    loads: list[object] = []
    chunks: Any = SimpleNamespace(submit_load=lambda *job: loads.append(job))
    assert not PoolWorker(chunks, 0, PageCache([[PageTable(torch.zeros(2, 8, dtype=torch.int8), 8)]], 1)).submit_load(
        1, None, None, expedited=True
    )
    assert not loads
    with pytest.raises(ConfigurationError, match="sync_load_budget_bytes"):
        side.Side({"sync_load_budget_bytes": 1 << 20})


# -- methods of vLLM that are replaced


def test_the_stored_signatures_are_those_of_this_vllm() -> None:
    source = Source(Path(vllm.__file__).parents[1])
    assert stored()[source.version] == source.signatures()


@pytest.mark.parametrize("patch", [VERSION, ADAPTERS])
def test_this_vllm_has_all_methods_that_are_replaced(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = patches._named(patch.owner)
    before = getattr(owner, patch.method)
    monkeypatch.setattr(owner, patch.method, before)
    assert not apply(patch._replace(method="it_was_renamed"))
    assert not apply(patch._replace(owner="vllm.gone:Class"))
    assert getattr(owner, patch.method) is before
    assert apply(patch)
    replaced = getattr(owner, patch.method)
    assert apply(patch), "a second call changes nothing"
    assert getattr(owner, patch.method) is replaced


def test_what_goes_without_the_pool_if_they_are_lacking(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "apply", lambda patch: False)
    without = side.Side({})
    without.serve_adapters(object(), "float32")
    assert without.admit(SimpleNamespace(lora_request=object(), mm_features=())) is None
    assert without.counters.read().requests_not_served == 1
    monkeypatch.setattr(opaque, "EXTENDED", (*opaque.EXTENDED, "it_was_renamed"))
    with pytest.raises(LayoutRefused, match="lacks a method of OffloadingConnector"):
        opaque.OpaqueLayoutConnector(*arguments)
