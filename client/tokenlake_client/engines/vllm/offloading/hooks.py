"""Hooks that vLLM's OffloadingConnector lacks, added to its class for backends that are ours.

vLLM's class takes each load for a success, does not pass the requests on to the backend, and does not pass reports on
the caches of the ranks to the scheduler's side. So some of its methods are extended::

    on_new_request                        the digest of the request's LoRA adapter goes to the manager
    get_transfer_results                  names requests whose load failed, so that vLLM computes them
    update_connector_output               counts these loads, and passes the ranks' reports on their caches on
    build_connector_worker_meta           carries the report of a rank in its first step
    get_handshake_metadata                carries the report of a rank before the first request
    set_xfer_handshake_metadata_pp_aware  passes the reports before the first request on

When all ranks have reported, the layout is known and the pool is opened: before the first request, by vLLM's handshake,
or else in the first step. `MultiConnector` has one handshake for all its connectors, so that a connector within it uses
the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tokenlake_client.engines.vllm.offloading.identity import RankFacts, counted_group, identity_of, rank_facts

_EXTENDED = "_tokenlake_extended"


@dataclass
class PoolWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """vLLM's message from the ranks to the scheduler's side, with the reports of ranks on their caches."""

    facts: dict[int, RankFacts] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The messages of several ranks as one."""
        whole = super().aggregate(other)
        facts = {**self.facts, **getattr(other, "facts", {})}
        return PoolWorkerMetadata(whole.completed_jobs, whole.transfer_stats, facts)


@dataclass
class FactsHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """vLLM's message from a rank to the scheduler's side before the first request."""

    facts: dict[int, RankFacts] = field(default_factory=dict)


def manager_of(connector: Any) -> Any:
    """The `PoolManager` of an OffloadingConnector in vLLM's scheduler; None if it has another backend or role."""
    manager = getattr(connector.connector_scheduler, "manager", None)
    return manager if hasattr(manager, "opening") else None


def worker_of(connector: Any) -> Any:
    """The `PoolWorker` of an OffloadingConnector on a rank; None if it has another backend or role."""
    worker = getattr(connector.connector_worker, "worker", None)
    return worker if hasattr(worker, "take_failed") else None


def extend() -> None:
    """Extend the methods of vLLM's OffloadingConnector. A second call does nothing."""
    if getattr(OffloadingConnector, _EXTENDED, False):
        return
    hooks: list[Callable[..., Any]] = [on_new_request, get_transfer_results, build_connector_worker_meta]
    hooks += [update_connector_output, get_handshake_metadata, set_xfer_handshake_metadata_pp_aware]
    for hook in hooks:
        setattr(OffloadingConnector, hook.__name__, _extended(getattr(OffloadingConnector, hook.__name__), hook))
    setattr(OffloadingConnector, _EXTENDED, True)


def _extended(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(self, functools.partial(original, self), *args, **kwargs)

    return method


def on_new_request(connector: Any, original: Callable[..., Any], request: Any) -> Any:
    """Serve the request without the pool if it has an adapter whose contents are not known."""
    result = original(request)
    manager = manager_of(connector)
    if manager is not None:
        manager.arrived(request)
    return result


def build_connector_worker_meta(connector: Any, original: Callable[..., Any]) -> Any:
    """Add the report on the rank's cache to the first message."""
    meta = original()
    facts = _take_facts(connector)
    if not facts:
        return meta
    told = PoolWorkerMetadata(facts=facts)
    return told if meta is None else told.aggregate(meta)


def update_connector_output(connector: Any, original: Callable[..., Any], connector_output: Any) -> Any:
    """Hand the reports of ranks to the manager, and name the requests whose load failed."""
    _reported(connector, getattr(connector_output.kv_connector_worker_meta, "facts", {}))
    manager = manager_of(connector)
    if manager is not None:
        for name in connector_output.failed_recving or ():
            manager.chunks.load_failed(name)
    return original(connector_output)


def get_handshake_metadata(connector: Any, original: Callable[..., Any]) -> Any:
    """The report on the rank's cache, before the first request."""
    if worker_of(connector) is None or worker_of(connector).nested:
        return original()
    return FactsHandshake(_take_facts(connector))


def set_xfer_handshake_metadata_pp_aware(connector: Any, original: Callable[..., Any], metadata: Any) -> Any:
    """Hand the reports of all ranks to the manager."""
    reports = [one.facts for one in metadata.values() if isinstance(one, FactsHandshake)]
    if not reports:
        return original(metadata)
    for facts in reports:
        _reported(connector, facts)
    return None


def get_transfer_results(connector: Any, original: Callable[..., Any], finished_req_ids: set[str]) -> Any:
    """Name the requests whose load failed."""
    results, worker = original(finished_req_ids), worker_of(connector)
    if worker is not None:
        results.failed_recving |= worker.take_failed() & set(results.finished_recving or ())
    return results


def _take_facts(connector: Any) -> dict[int, RankFacts]:
    """The report of this rank, by rank; empty if it was made before."""
    worker = worker_of(connector)
    if worker is None or worker.told:
        return {}
    worker.told = True
    facts = rank_facts(
        connector._vllm_config, connector._kv_cache_config, worker.rank, worker.shard_bytes, worker.page_bytes
    )
    return {worker.rank: facts}


def _reported(connector: Any, facts: dict[int, RankFacts]) -> None:
    manager = manager_of(connector)
    if manager is not None and facts:
        begin(connector)
        manager.opening.reported(facts, connector._vllm_config.parallel_config.world_size)


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
