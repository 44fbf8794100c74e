"""The identity of SGLang's cache: all that gives the bytes of a page their meaning. Imports no engine before
`engine_facts` is called.

Engines share pages only if all of it is equal. The layout is opaque: the pool does not understand the bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenlake.errors import ConfigurationError, LayoutRefused
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.common.model_config import directory_in_cache
from tokenlake_client.engines.common.page_settings import PageSettings
from tokenlake_client.weights import digest_of_changes, digest_of_directory, weight_formats

KV = "kv"
"""SGLang's name of the pool of keys and values."""
MIN_PAGE_TOKENS = 16
"""The smallest page: each page is a segment, and the calls for a segment cost as much as the copy of a small one."""
FORMATS = ("auto", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt")
"""The supported load formats: they read the weight files of the directory unchanged."""

MODEL_SETTINGS = (
    "model_impl",
    "json_model_override_args",
    "quantization",
    "quantize_and_serve",
    "modelopt_quant",
    "rl_quant_profile",
    "kt_method",
    "flashinfer_mxfp4_moe_precision",
    "enable_w4a4_mxfp4_megamoe",
)
"""SGLang's settings that change what the weights compute."""
CACHE_SETTINGS = (
    "dtype",
    "kv_cache_dtype",
    "prefill_kv_cache_dequant_dtype",
    "qsa_indexer_dtype",
    "context_length",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "dsa_prefill_backend",
    "dsa_decode_backend",
    "dsv4_prefill_backend",
    "dsv4_attn_backend",
    "enable_deepseek_v4_fp4_indexer",
    "mamba_backend",
    "mamba_ssm_dtype",
    "mamba_radix_cache_strategy",
    "mamba_track_interval",
    "enable_int8_mamba_checkpoint",
    "enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds",
    "linear_attn_backend",
    "linear_attn_prefill_backend",
    "linear_attn_decode_backend",
    "enable_linear_replayssm",
    "enable_encoder_swa_bounded_replay",
    "enable_decoder_swa_bounded_replay",
    "swa_prefix_tails",
    "speculative_algorithm",
    "speculative_draft_window_size",
    "speculative_draft_sink_size",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
    "speculative_attention_mode",
    "rl_on_policy_target",
    "enable_dp_attention",
    "tp_size",
    "pp_size",
    "attn_cp_size",
    "dcp_size",
    "ep_size",
)
"""SGLang's settings that change the values in a cache, their form, or the parts of a model on each rank."""
REFUSED = {
    "enable_lora": "pages of adapters of one name would be shared, whatever their files",
    "dllm_algorithm": "a token's cache depends on tokens after it",
    "enable_hisparse": "a cache in two places is not supported",
    "forward_hooks": "functions that change the model are not known",
    "custom_weight_loader": "the weights cannot be identified",
    "quantization_param_path": "scales of a file are not supported",
    "decrypted_config_file": "the configuration cannot be identified",
    "uno_lora_path": "the weights cannot be identified",
    "kt_weight_path": "weights in a second place are not supported",
}
"""SGLang's settings with which the pool is not used, and the reasons."""
POOL_FACTS = (
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "override_kv_cache_dim",
    "num_mamba_layers",
    "temporal_dtype",
    "temporal_state_shape",
    "conv_dtype",
    "conv_state_shapes",
    "indexer_dtype",
    "indexer_page_stride_size",
    "storage_format_tag",
    "stores_page_envelope",
    "head_group_num",
)
"""The attributes of SGLang's host pools that say what a page holds, of those that a pool has."""
PER_RANK = ("MambaPoolHost", "MHATokenToKVPoolHost")
"""Classes of host pools of which each rank has its own part, also where the keys and values of all ranks are equal."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What the backend knows of one host pool."""

    name: str
    page_tokens: int
    part_bytes: tuple[int, ...]
    """The bytes of each part of a page."""
    facts: Mapping[str, Any]
    rank: Mapping[str, Any]
    """The place of this rank, as far as the bytes depend on it."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the backend knows of the engine, beside its host pools."""

    engine: str
    model: str
    revision: str | None
    download_dir: str | None
    load_format: str
    multimodal: bool
    draft: str | None
    draft_load_format: str | None
    values: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's resolved settings of the lists above, by name."""


def engine_facts() -> EngineFacts:
    """The facts of the SGLang engine of this process. Raises `LayoutRefused` where this SGLang has no place that names
    them."""
    try:
        import sglang
        from sglang.srt.arg_groups.overrides import resolution_result
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import get_server_args

        arguments = get_server_args()

        def value(name: str) -> Any:
            return resolution_result(arguments, name)

        names = (*MODEL_SETTINGS, *CACHE_SETTINGS, *REFUSED)
        return EngineFacts(
            engine=f"sglang {sglang.__version__}",
            model=str(value("model_path")),
            revision=value("revision"),
            download_dir=value("download_dir"),
            load_format=str(value("load_format")),
            multimodal=bool(ModelConfig.from_server_args(arguments).is_multimodal),
            draft=value("speculative_draft_model_path"),
            draft_load_format=value("speculative_draft_load_format"),
            values={name: value(name) for name in names},
        )
    except Exception as error:
        raise LayoutRefused(f"SGLang's settings cannot be read: {type(error).__name__}: {error}") from error


def pool_facts(name: str, host_pool: Any, config: Any, *, part_bytes: Sequence[int]) -> PoolFacts:
    """The facts of one of SGLang's host pools. `config`: SGLang's `HiCacheStorageConfig`. `part_bytes`: the sizes of
    the parts of its first page. Raises `ConfigurationError` for pages that are too small."""
    tokens = int(host_pool.page_size)
    if name == KV and tokens < MIN_PAGE_TOKENS:
        raise ConfigurationError("page_size", tokens, f"at least {MIN_PAGE_TOKENS} (SGLang's flag --page-size 64)")
    kinds = [each.__name__ for each in type(host_pool).__mro__]
    facts: dict[str, Any] = {"kind": kinds[0], "layout": str(host_pool.layout), "dtype": str(host_pool.dtype)}
    facts |= {each: _plain(getattr(host_pool, each)) for each in POOL_FACTS if hasattr(host_pool, each)}
    equal_on_ranks = config.is_mla_model and not any(kind in PER_RANK for kind in kinds)
    rank = {
        "tp": config.tp_size if equal_on_ranks else [config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "dcp": [config.dcp_rank, config.dcp_size],
        "split_heads": bool(config.should_split_heads),
    }
    return PoolFacts(name, tokens, tuple(part_bytes), facts, rank)


def weights_digest_of(engine: EngineFacts, settings: PageSettings) -> str:
    """The digest of the weights that the engine has loaded. Reads the model's files the first time. Raises
    `LayoutRefused` for weights that cannot be identified."""
    changes = {name: engine.values[name] for name in MODEL_SETTINGS if _given(engine.values.get(name))}
    if settings.weights_digest:
        return digest_of_changes(settings.weights_digest, changes)
    directory = _directory_of(engine.model, engine, engine.load_format)
    if weight_formats(directory) > 1:
        changes["load_format"] = engine.load_format
    return digest_of_changes(digest_of_directory(directory), changes)


def layout_of(engine: EngineFacts, pool: PoolFacts, weights_digest: str, settings: PageSettings) -> OpaqueLayout:
    """The layout of one host pool. Raises `LayoutRefused` for an engine that the pool cannot serve."""
    check_engine(engine)
    cache = {
        "pool": [pool.name, pool.page_tokens, list(pool.part_bytes), dict(pool.facts)],
        "rank": dict(pool.rank),
        "settings": {name: _plain(engine.values[name]) for name in CACHE_SETTINGS if name in engine.values},
        "draft": _digest_of_draft(engine, settings),
    }
    layout = OpaqueLayout(
        model_id=Path(engine.model).name[-200:] or "model",
        weights_digest=weights_digest,
        engine=engine.engine,
        cache=json.dumps(cache, sort_keys=True, separators=(",", ":")),
        shards=1,
        shard_bytes=sum(pool.part_bytes),
        segment_tokens=pool.page_tokens,
    )
    layout.check()
    return layout


def check_engine(engine: EngineFacts) -> None:
    """Raise `LayoutRefused` for an engine that the pool cannot serve, whatever its host pools."""
    for name, reason in REFUSED.items():
        if _given(engine.values.get(name)):
            raise LayoutRefused(f"SGLang's setting '{name}' is {str(engine.values[name])[:80]!r}: {reason}")
    if engine.multimodal:
        raise LayoutRefused("a model of images, sound or video: SGLang names them by hashes of 64 bits")


def group_of(name: str) -> int:
    """The number of a cache pool in the keys: equal in all engines."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def _digest_of_draft(engine: EngineFacts, settings: PageSettings) -> str | None:
    if not engine.draft:
        return None
    if settings.weights_digest and not Path(engine.draft).is_dir():
        return engine.draft
    return digest_of_directory(_directory_of(engine.draft, engine, engine.draft_load_format or engine.load_format))


def _directory_of(model: str, engine: EngineFacts, load_format: str) -> Path:
    """The directory with the weights of `model`. Raises `LayoutRefused` for weights that cannot be identified."""
    if load_format not in FORMATS:
        raise LayoutRefused(
            f"SGLang's setting 'load_format' is {load_format!r}: the weights cannot be identified; supported: "
            f"{', '.join(FORMATS)}"
        )
    if Path(model).is_dir():
        return Path(model)
    return directory_in_cache(model, engine.revision, engine.download_dir)


def _given(value: object) -> bool:
    return value not in (None, False, "", "{}", "auto", [], {})


def _plain(value: object) -> object:
    """A JSON value with the same meaning in all processes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value)
