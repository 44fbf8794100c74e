"""The class that users name in `--kv-transfer-config`: it makes the connector that fits the model."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger

from tokenlake.errors import ConfigurationError, LayoutRefused
from tokenlake_client.engines.vllm.known.blocks import block_views
from tokenlake_client.engines.vllm.known.connector import KnownLayoutConnector, backend_name
from tokenlake_client.engines.vllm.known.identity import block_tokens_of, layout_of
from tokenlake_client.engines.vllm.settings import read_settings
from tokenlake_client.engines.vllm.stats import TokenLakePromMetrics, TokenLakeStats, find_by_name

logger = init_logger("vllm.tokenlake")


class TokenLakeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Calling this class makes a connector of another class, the one that fits the model. vLLM makes one connector for
    its scheduler and one for each rank; the choice depends on vLLM's configuration only, so all of them choose alike.

    This class itself has only the class methods that vLLM calls before a connector exists. It declares `SupportsHMA`:
    without it vLLM starts no hybrid model with a connector, and turns off its memory manager for sliding windows.
    """

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
        """Raises `ConfigurationError` for an unknown or invalid setting, and for a policy of vLLM under which a lost
        segment would end its request. Raises no other error."""
        refusal = _refusal(vllm_config, kv_cache_config)
        if refusal is not None:
            try:
                from tokenlake_client.engines.vllm.offloading.connector import OpaqueLayoutConnector

                # See the last lines of this module.
                OpaqueLayoutConnector.__name__ = TokenLakeConnector.__name__
                connector = OpaqueLayoutConnector(vllm_config, role, kv_cache_config)
            except ConfigurationError:
                raise
            except Exception as error:
                _log(f"vLLM's OffloadingConnector cannot serve the model: {type(error).__name__}: {error}")
            else:
                _log(f"segments are opaque, and shared with equal vLLM engines only: {refusal}")
                return connector
        return KnownLayoutConnector(vllm_config, role, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See `KnownLayoutConnector`: always False. Also checks the settings."""
        return KnownLayoutConnector.requires_piecewise_for_cudagraph(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The order of dimensions that vLLM's cache must have in memory; None: any."""
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TokenLakeStats:
        """The stats whose `data` a connector of either class has sent."""
        return TokenLakeStats({} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TokenLakePromMetrics | None:
        """The metrics of a connector of either class on vLLM's metrics page. vLLM calls this method in the process that
        serves the page, before any stats arrive. None after an error, which is logged."""
        find_by_name(cls.__name__, "tokenlake_client.engines.vllm")
        try:
            return TokenLakePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        except Exception as error:
            logger.warning("TokenLake: its metrics are missing: %s: %s", type(error).__name__, error)
            return None


def _refusal(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """The reason why the pool does not know the layout of the model's cache; None if it does."""
    settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ)
    try:
        layout = layout_of(vllm_config, _as_the_scheduler_has_it(kv_cache_config), settings)
        backend = _backend_for(vllm_config, layout.key_dim, block_tokens_of(kv_cache_config))
        if backend is not None:
            block_views(backend)
    except LayoutRefused as error:
        return str(error)
    except ConfigurationError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _backend_for(vllm_config: Any, head_dim: int, block_tokens: int) -> str | None:
    """The attention backend, by its name in `block_views`, that vLLM chooses for this configuration; None: not known.
    The layers of a rank may have another one, which vLLM's scheduler does not know; the rank checks it."""
    try:
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.selector import get_attn_backend

        with set_current_vllm_config(vllm_config):
            backend = get_attn_backend(head_dim, vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype)
        return backend_name(vllm_config, backend, block_tokens)
    except Exception:
        return None


def _as_the_scheduler_has_it(kv_cache_config: Any) -> Any:
    """vLLM's description of the cache with one specification for each group. A rank may have one for each layer, and
    makes the same choice as the scheduler's side."""
    config = copy.copy(kv_cache_config)
    config.kv_cache_groups = [copy.copy(group) for group in kv_cache_config.kv_cache_groups]
    for group in config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        if specs:
            group.kv_cache_spec = next(iter(specs.values()))
    return config


@functools.cache
def _log(text: str) -> None:
    """Log `text` once per process: the scheduler's side and a rank in the same process find the same reason."""
    logger.info("TokenLake: %s", text)


# vLLM's `MultiConnector` finds the metrics of a connector by the name of its class, which it also looks up in the class
# that the user named.
KnownLayoutConnector.__name__ = TokenLakeConnector.__name__
