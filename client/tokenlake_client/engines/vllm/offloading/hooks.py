"""The hooks that vLLM's OffloadingConnector lacks, for backends that are ours (`patches.OFFLOADING`).

Each rank reports on its cache in its first step. When all have reported, the layout is known and the pool is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

from tokenlake_client.engines.vllm.offloading.identity import RankFacts, counted_group, identity_of, rank_facts


@dataclass
class PoolWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """vLLM's message from the ranks to the scheduler's side, with the reports of ranks on their caches."""

    facts: dict[int, RankFacts] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The messages of several ranks as one."""
        whole = super().aggregate(other)
        facts = {**self.facts, **getattr(other, "facts", {})}
        return PoolWorkerMetadata(whole.completed_jobs, whole.transfer_stats, facts)


def manager_of(connector: Any) -> Any:
    """The `PoolManager` of an OffloadingConnector in vLLM's scheduler; None if it has another backend or role."""
    manager = getattr(connector.connector_scheduler, "manager", None)
    return manager if hasattr(manager, "opening") else None


def worker_of(connector: Any) -> Any:
    """The `PoolWorker` of an OffloadingConnector on a rank; None if it has another backend or role."""
    worker = getattr(connector.connector_worker, "worker", None)
    return worker if hasattr(worker, "take_failed") else None


def on_new_request(connector: Any, original: Callable[..., Any], request: Any) -> Any:
    """Serve the request without the pool if it has an adapter whose contents are not known."""
    result = original(request)
    manager = manager_of(connector)
    if manager is not None:
        manager.arrived(request)
    return result


def build_connector_worker_meta(connector: Any, original: Callable[..., Any]) -> Any:
    """Add the report on the rank's cache to the first message."""
    meta, worker = original(), worker_of(connector)
    if worker is None or worker.reported:
        return meta
    worker.reported = True
    facts = rank_facts(connector._vllm_config, connector._kv_cache_config, worker.rank, worker.cache)
    told = PoolWorkerMetadata(facts={worker.rank: facts})
    return told if meta is None else told.aggregate(meta)


def update_connector_output(connector: Any, original: Callable[..., Any], connector_output: Any) -> Any:
    """Hand the reports of ranks to the manager, and name the requests whose load failed."""
    facts = getattr(connector_output.kv_connector_worker_meta, "facts", {})
    manager = manager_of(connector)
    if manager is not None:
        if facts:
            begin(connector)
            manager.opening.reported(facts, connector._vllm_config.parallel_config.world_size)
        for name in connector_output.failed_recving or ():
            manager.chunks.load_failed(name)
    return original(connector_output)


def get_transfer_results(connector: Any, original: Callable[..., Any], finished_req_ids: set[str]) -> Any:
    """Name the requests whose load failed."""
    results, worker = original(finished_req_ids), worker_of(connector)
    if worker is not None:
        results.failed_recving |= worker.take_failed() & set(results.finished_recving or ())
    return results


def begin(connector: Any) -> None:
    """Begin to identify the model of a connector in vLLM's scheduler. Reads the model's files in the background."""
    manager = manager_of(connector)
    if manager is None or manager.opening.begun:
        return
    spec, config, cached = manager.spec, connector._vllm_config, connector._kv_cache_config
    manager.chunks.counted_group = counted_group(cached)
    manager.serve_adapters(config.lora_config, config.model_config.dtype)
    manager.opening.identify(
        lambda: identity_of(
            config, cached, spec.settings, chunk_blocks=spec.blocks_per_chunk, replicated=spec.replicated_layout
        )
    )
