"""The parts that both connectors have, on the scheduler's side and on the ranks: settings, counts, connections, and the
hooks of vLLM that do not depend on the layout."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from msgspec import structs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import init_logger

from tokenlake.errors import ConfigurationError
from tokenlake.hints import NO_HINTS
from tokenlake_client.engines.common.kv_hints import OBEYED, REFUSED, Acts, Bring, acts_of, envelope_of
from tokenlake_client.engines.common.reports import Reports
from tokenlake_client.engines.common.status import PoolStatus
from tokenlake_client.engines.vllm.adapters import Adapters, LoadedAdapters, RequestAdapter, options_of
from tokenlake_client.engines.vllm.counters import Counts, EngineCounters
from tokenlake_client.engines.vllm.epoch import WeightsEpoch, version_refused
from tokenlake_client.engines.vllm.patches import ADAPTERS, apply
from tokenlake_client.engines.vllm.served_request import hints_of, unnamed_media
from tokenlake_client.engines.vllm.settings import read_settings
from tokenlake_client.engines.vllm.stats import TokenLakeStats, stats_of
from tokenlake_client.salts import account_of

# The logger's name lies below "vllm", because vLLM formats and prints only the lines of its own logger and of those
# below it.
logger = init_logger("vllm.tokenlake")

Hook = TypeVar("Hook", bound=Callable[..., Any])


def hook(default: Callable[[], Any] | None) -> Callable[[Hook], Hook]:
    """A decorator for hooks of connectors: after an error, which is reported, the hook returns `default()`. None: the
    error is raised, for hooks of vLLM's own connector. The hook's time is added to the counts."""

    def decorate(function: Hook) -> Hook:
        @functools.wraps(function)
        def call(self: PoolHooks, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(self, *args, **kwargs)
            except Exception as error:
                if default is None:
                    raise
                self.hook_failed(function.__name__, error)
                return default()
            finally:
                self.counters.add(hook_seconds=time.perf_counter() - started)

        return cast(Hook, call)

    return decorate


class Admitted(NamedTuple):
    """A request that the pool serves."""

    acts: Acts
    adapter: RequestAdapter | None


class Planner(Protocol):
    """The part of a connector that plans loads and saves, in vLLM's scheduler."""

    def cache_emptied(self) -> None:
        """vLLM's own cache was emptied."""

    def new_weights(self, digest: str) -> None:
        """The weights may have changed: `digest` is part of all keys from now on."""


class OnRank(Protocol):
    """The part of a connector that loads and saves, on a rank."""

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all segments are stored; False when `timeout` seconds were not enough."""

    def sleep(self) -> None:
        """vLLM is about to give up the memory of its cache."""

    def wake(self) -> None:
        """The cache has memory again, at the same addresses."""


class Side:
    """The settings, counts, log and connections of one side of a connector: vLLM's scheduler, or a rank."""

    def __init__(self, extra: Mapping[str, object]) -> None:
        """`extra`: vLLM's `kv_connector_extra_config`. Raises `ConfigurationError` for an unknown or invalid
        setting."""
        self.settings = read_settings(extra, os.environ)
        self.counters = EngineCounters()
        self.reports = Reports(logger, self.counters, prefix="TokenLake: ")
        self.status = PoolStatus(logger)
        self._adapters: Adapters | None = None
        _send_client_log_to_vllm()

    def refuse(self, reason: str) -> None:
        """Log why the pool does not serve the engine or a request."""
        self.reports.warn(f"served without the pool: {reason}")

    def acts(self, request: Any) -> Acts:
        """The hints in a request's `kv_transfer_params`, and the acts that routers want. What is not valid is logged,
        and acts are counted, but those that bring a prompt: see `brought`."""
        name, hints = request.request_id[:100], None
        try:
            hints = hints_of(request.kv_transfer_params)
        except ValueError as error:
            self.reports.warn(f"request {name!r} is served without its hints: {error}", kind="hints")
        account = account_of(request.cache_salt)
        if account:
            hints = structs.replace(hints or NO_HINTS, account=account)
        acts = acts_of(envelope_of(request), hints)
        for (act, outcome), count in Counter(acts.counted).items():
            self.counters.add(**{f"hints_{act or 'other'}_{outcome}": count})
        for problem in acts.problems:
            self.reports.warn(f"kv_hints: {problem}", kind="kv hints")
        return acts

    def brought(self, bring: Bring, done: bool) -> None:
        """Count an act that brings a prompt. `done`: it was asked of the daemon."""
        self.counters.add(**{f"hints_{bring.act}_{OBEYED if done else REFUSED}": 1})

    def serve_adapters(self, lora_config: Any, dtype: Any) -> None:
        """Serve requests with LoRA adapters, if the engine has any and the ranks can tell which ones vLLM has loaded.
        `dtype`: that of the model."""
        if lora_config is not None and apply(ADAPTERS):
            self._adapters = Adapters(options_of(lora_config, dtype), self._warn_of_adapter)

    def admit(self, request: Any, reason: str | None = None) -> Admitted | None:
        """What the connector needs to serve a request that has arrived. None: the pool cannot serve it, for `reason` or
        for another one, which is counted and logged."""
        lora = request.lora_request
        if reason is None and lora is not None and self._adapters is None:
            reason = "requests with LoRA adapters, whose loads this version of vLLM does not show"
        reason = reason or unnamed_media(request.mm_features)
        if reason is not None:
            self.counters.add(requests_not_served=1)
            self.refuse(reason)
            return None
        adapter = self._adapters.find(lora) if lora is not None and self._adapters is not None else None
        return Admitted(self.acts(request), adapter)

    def close(self) -> None:
        """End the threads that digest adapters."""
        adapters, self._adapters = self._adapters, None
        if adapters is not None:
            adapters.close()

    def loaded_adapters(self) -> LoadedAdapters:
        """The adapters that vLLM loads on this rank from now on."""
        apply(ADAPTERS)
        return LoadedAdapters(self._warn_of_adapter)

    def _warn_of_adapter(self, line: str) -> None:
        self.reports.warn(line, kind="adapters")


class PoolHooks:
    """The hooks of vLLM that both connectors implement alike. They never raise."""

    side: Side
    role: KVConnectorRole
    _gpu_blocks: Any = None

    @property
    def counters(self) -> EngineCounters:
        """The counts of this side of the connector (the scheduler's, or a rank's)."""
        return self.side.counters

    @property
    def counts(self) -> Counts:
        """A copy of these counts."""
        return self.counters.read()

    @hook(lambda: None)
    def get_kv_connector_stats(self) -> TokenLakeStats | None:
        """vLLM's hook after a step: returns the growth of the counts of this side; None: they have not grown."""
        return stats_of(self.counters, self.role)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keep a reference to the block pool of vLLM's own cache: `reset_cache` counts its used blocks."""
        self._gpu_blocks = gpu_block_pool

    def cache_is_empty(self) -> bool:
        """True if vLLM's own cache is empty: only the null block is in use. vLLM tries to empty it before it calls
        `reset_cache`. Never raises."""
        blocks = self._gpu_blocks
        try:
            return blocks is not None and blocks.num_gpu_blocks - blocks.get_num_free_blocks() == 1
        except Exception as error:
            self.hook_failed("reset_cache", error)
            return False

    def planner(self) -> tuple[WeightsEpoch, Planner] | None:
        """The epoch of the weights, and the part that plans loads and saves; None on a rank, and without the pool."""
        raise NotImplementedError

    def on_rank(self) -> OnRank | None:
        """The part that loads and saves; None in vLLM's scheduler, and before vLLM has allocated its cache."""
        raise NotImplementedError

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all computed segments are stored; False when `timeout` seconds were not enough."""
        part = self.on_rank()
        return part is None or part.flush(timeout)

    @hook(lambda: None)
    def unregister_kv_caches(self) -> None:
        """vLLM's hook before sleep: the rank does not use the cache any more, and releases its page locks."""
        part = self.on_rank()
        if part is not None:
            part.sleep()

    @hook(lambda: None)
    def restore_kv_caches(self) -> None:
        """vLLM's hook after sleep, with the cache at the same addresses."""
        part = self.on_rank()
        if part is not None:
            part.wake()

    @hook(lambda: False)
    def reset_cache(self) -> bool:
        """vLLM's hook for a reset of the caches, after which the weights may have changed: segments that were stored
        before are not loaded any more (a new epoch of the weights). False: some requests still have blocks, whose cache
        vLLM continues to use."""
        found = self.planner()
        if found is None:
            return True
        epoch, planner = found
        empty = self.cache_is_empty()
        if empty:
            planner.cache_emptied()
        planner.new_weights(epoch.reset(empty=empty))
        return empty

    @hook(lambda: None)
    def new_weights(self, version: str) -> None:
        """To be called when the weights were changed in place to the trainer's `version`, in vLLM's scheduler, after a
        reset and before anything is computed: from now on segments are shared with engines that started from the same
        weights and have the same version."""
        found = self.planner()
        if found is None:
            return
        epoch, planner = found
        digest = epoch.named(version)
        if digest is None:
            self.side.reports.warn(version_refused(version))
            digest = epoch.reset(empty=False)
        planner.new_weights(digest)

    def hook_failed(self, name: str, error: Exception) -> None:
        """Count and log an error of vLLM's hook `name`, so that vLLM goes on without the pool's help."""
        self.side.reports.failure(f"hook {name}", error)


def check_failure_policy() -> None:
    """Raise `ConfigurationError` where vLLM's scheduler would end a request whose segment is lost.

    A connector within another one, such as `MultiConnector`, gets a configuration of its own, but the scheduler reads
    the policy in the outer one. vLLM's current configuration is the outer one while a rank makes its connector. A rank
    can therefore check the policy, but not set it, because it may run in another process than the scheduler. The
    scheduler's side does not see the outer configuration.
    """
    outer = get_current_vllm_config_or_none()
    transfer = outer.kv_transfer_config if outer is not None else None
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        raise ConfigurationError(
            "kv_load_failure_policy",
            transfer.kv_load_failure_policy,
            "'recompute': a lost segment would end its request with an error. Add "
            f'"kv_load_failure_policy": "recompute" to --kv-transfer-config, beside "kv_connector": '
            f'"{transfer.kv_connector}" (vLLM does not read it within "connectors")',
        )


def _send_client_log_to_vllm() -> None:
    """Give the client's logger the handlers of vLLM's logger, because a logger without handlers prints its warnings
    without time and level."""
    client, vllm = logging.getLogger("tokenlake_client"), logging.getLogger("vllm")
    if not client.hasHandlers():
        for handler in vllm.handlers:
            client.addHandler(handler)
