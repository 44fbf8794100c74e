"""The identity of a cache that the pool does not understand: all that gives its bytes their meaning.

The scheduler's side knows the model, the weights and vLLM's configuration; each rank reports what only it knows, above
all the attention backends and the pages of its layers. Engines share segments only if all of this is equal.

vLLM's names are imported in the functions that use them, because an engine whose version of vLLM lacks one of them runs
without the pool.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenlake.errors import LayoutRefused
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.common.model_config import STATIC_ROPE
from tokenlake_client.engines.vllm.checkpoint import check_machines, digest_of_draft, weights_digest_of
from tokenlake_client.engines.vllm.offloading.pages import PageCache
from tokenlake_client.engines.vllm.settings import EngineSettings

HASHES = ("sha256", "sha256_cbor")
"""The hash algorithms of vLLM's blocks that tell prompts apart reliably."""
KINDS: tuple[str, ...] = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MLAAttentionSpec",
    "MambaSpec",
)
"""The kinds of caches, by vLLM's names, whose chunks hold all that their tokens need to be continued. Others keep more
elsewhere, drop tokens in the middle, or belong to attention that chooses its tokens by an index."""


@dataclass(frozen=True)
class RankFacts:
    """The report of one rank on its cache."""

    rank: int
    shard_bytes: int
    """The bytes of the largest chunk on the rank."""
    cache: str
    """Digest of the properties that give the rank's pages their meaning."""
    refusal: str = ""
    """The reason why the rank cannot read and write its cache; empty if it can."""


@dataclass(frozen=True)
class EngineIdentity:
    """The parts of the layout that the scheduler's side knows."""

    model_id: str
    weights_digest: str
    engine: str
    segment_tokens: int
    ranks: int
    replicated: bool
    """All ranks hold the same bytes, and one of them stores them."""
    cache: Mapping[str, Any] = field(default_factory=dict)


def identity_of(
    vllm_config: Any, kv_cache_config: Any, settings: EngineSettings, *, chunk_blocks: int, replicated: bool
) -> EngineIdentity:
    """The layout, as the scheduler's side knows it. Reads the model's files the first time. Raises `LayoutRefused` for
    an engine that the pool cannot serve."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.version import __version__

    model, parallel, cached = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    check_machines(parallel)
    if cached.prefix_caching_hash_algo not in HASHES:
        raise LayoutRefused(
            f"vLLM setting 'prefix_caching_hash_algo' is {cached.prefix_caching_hash_algo!r}: its hashes do not tell "
            f"prompts apart reliably; supported: {', '.join(HASHES)}"
        )
    if getattr(cached, "calculate_kv_scales", False):
        raise LayoutRefused(
            "vLLM setting 'calculate_kv_scales' is True: the scales of the cache differ from engine to engine"
        )
    if _inexact_behind_a_prefix(vllm_config) and not settings.serve_inexact:
        raise LayoutRefused(
            "latent attention on vLLM's CPU kernels, for which vLLM switches its own prefix cache off: they compute "
            "other tokens behind a cached prefix than in a whole prefill; with the setting 'serve_inexact' the pool "
            "serves the model nevertheless"
        )
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise LayoutRefused("vLLM setting 'hisparse_config' is set: a cache in two places is not supported")
    groups = kv_cache_config.kv_cache_groups
    if hasattr(model.hf_text_config, "index_topk"):
        raise LayoutRefused("sparse attention, whose index is a cache of its own, is not supported")
    if unknown := unknown_cache(kv_cache_config):
        raise LayoutRefused(unknown)
    if any(getattr(group.kv_cache_spec, "non_causal", False) for group in groups):
        raise LayoutRefused("a token's cache depends on tokens after it")
    weights = weights_digest_of(vllm_config, settings)
    architectures = model.hf_config.architectures or [type(model.hf_config).__name__]
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    tokens = max(group.kv_cache_spec.block_size for group in groups) * chunk_blocks
    cache = {
        "dtype": [str(model.dtype), str(cached.cache_dtype)],
        "quantization": str(model.quantization),
        "groups": [[type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size] for group in groups],
        "chunk": [chunk_blocks, hash_tokens],
        "hash": [cached.prefix_caching_hash_algo, hash_seed()],
        "parallel": {
            name: getattr(parallel, name, 1)
            for name in (
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
                "decode_context_parallel_size",
            )
        },
        "position": _position(model),
        "draft": digest_of_draft(vllm_config),
    }
    ranks = int(parallel.world_size)
    return EngineIdentity(str(architectures[0]), weights, f"vllm {__version__}", tokens, ranks, replicated, cache)


def unknown_cache(kv_cache_config: Any) -> str:
    """The reason why a cache has parts that the pool does not know; empty if it has none. vLLM tells the kinds of all
    layers to the ranks, and of one layer of each group to its scheduler."""
    for spec in _layer_specs(kv_cache_config):
        kind, role = type(spec).__name__, getattr(spec, "cache_role", None)
        if kind not in KINDS:
            return f"a cache of the kind {kind} is not supported; supported: {', '.join(KINDS)}"
        if role is not None and role.name != "SPARSE":
            return f"a cache of the kind {kind} for the role {role.name}: sparse attention is not supported"
        if getattr(spec, "model_version", None) or getattr(spec, "tokens_per_state", 1) > 1:
            return f"a cache of the kind {kind} that holds several tokens in one state is not supported"
    return ""


def counted_group(kv_cache_config: Any) -> int:
    """The number of the cache group whose chunks stand for the tokens of a prompt: one with the largest blocks, as a
    segment of the layout has the tokens of its chunks, and with full attention if there is one, since all chunks of
    such a group are loaded."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    largest = max(spec.block_size for spec in specs)
    groups = [number for number, spec in enumerate(specs) if spec.block_size == largest]
    return next((number for number in groups if isinstance(specs[number], FullAttentionSpec)), groups[0])


def has_recurrent_states(kv_cache_config: Any) -> bool:
    """True if some layers have a state in place of keys and values."""
    return any(type(spec).__name__ == "MambaSpec" for spec in _layer_specs(kv_cache_config))


def some_groups_forget(kv_cache_config: Any) -> bool:
    """True if the counted group has full attention, and others keep the end of a prompt only."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    full = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in kv_cache_config.kv_cache_groups]
    return full[counted_group(kv_cache_config)] and not all(full)


def opaque_layout(identity: EngineIdentity, facts: Sequence[RankFacts]) -> OpaqueLayout:
    """The layout of an engine whose ranks have all reported. Raises `LayoutRefused` with the reason of a rank, and for
    sizes that the pool does not have."""
    for one in facts:
        if one.refusal:
            raise LayoutRefused(one.refusal)
    ordered = sorted(facts, key=lambda one: one.rank)
    caches = [one.cache for one in ordered]
    if identity.replicated:
        if len(set(caches)) > 1:
            raise LayoutRefused("the ranks hold different caches, and vLLM stores that of the first rank only")
        caches = caches[:1]
    layout = OpaqueLayout(
        model_id=identity.model_id,
        weights_digest=identity.weights_digest,
        engine=identity.engine,
        cache=json.dumps({**identity.cache, "ranks": caches}, sort_keys=True, separators=(",", ":")),
        shards=len(caches),
        shard_bytes=max(one.shard_bytes for one in ordered),
        segment_tokens=identity.segment_tokens,
    )
    layout.check()
    return layout


def rank_facts(vllm_config: Any, kv_cache_config: Any, rank: int, cache: PageCache) -> RankFacts:
    """The report of a rank. Never raises: an error is the report's refusal."""
    shard_bytes = cache.shard_bytes
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        name = vllm_config.cache_config.kv_cache_layout
        if unknown := unknown_cache(kv_cache_config):
            return RankFacts(rank, shard_bytes, "", unknown)
        if name is None or not KVCacheLayout[name].is_block_compact:
            return RankFacts(rank, shard_bytes, "", f"a page of vLLM's cache layout {name} is not contiguous")
        groups = [
            [type(group.kv_cache_spec).__name__, repr(group.kv_cache_spec), list(group.layer_names)]
            for group in kv_cache_config.kv_cache_groups
        ]
        pages = [[table.nbytes for table in group] for group in cache.groups]
        facts = [name, groups, pages, _backends(vllm_config)]
    except Exception as error:
        return RankFacts(rank, shard_bytes, "", f"the cache cannot be identified: {type(error).__name__}: {error}")
    return RankFacts(rank, shard_bytes, hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest())


def _layer_specs(kv_cache_config: Any) -> Iterator[Any]:
    """vLLM's description of the cache of each layer, where a group has one for each, or else of each group."""
    for group in kv_cache_config.kv_cache_groups:
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        yield from of_layers.values() if of_layers else (group.kv_cache_spec,)


def _inexact_behind_a_prefix(vllm_config: Any) -> bool:
    """True if this build of vLLM computes other tokens behind a cached prefix of this model than in a whole prefill."""
    from vllm.platforms import current_platform

    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    # vLLM turns chunked prefill off for its reference kernels of latent attention, but not for those that need AMX.
    return bool(vllm_config.model_config.use_mla and current_platform.is_cpu() and not chunked)


def hash_seed() -> str | None:
    """The seed of vLLM's block hashes that the environment sets; None: vLLM's fixed seed for SHA-256."""
    return os.environ.get("PYTHONHASHSEED")


def _backends(vllm_config: Any) -> list[str]:
    """The names of the attention backends, with the instruction set where the memory layout depends on it."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    names = sorted({".".join(one.full_cls_name()) for one in get_current_attn_backends(vllm_config)})
    if any("cpu" in name.lower() for name in names):
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        cache, model = vllm_config.cache_config, vllm_config.model_config
        # The set does not depend on the block size where that is a multiple of 32, as all block sizes of vLLM's CPU
        # kernels are.
        names.append(str(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)))
    return names


def _position(model: Any) -> object:
    """vLLM's limit of the length of a sequence, if the rotation of the keys depends on it; None if the rotation depends
    on a token's position alone."""
    rope = getattr(model.hf_text_config, "rope_parameters", None)
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))] if rope else []
    static = all(kind.get("rope_type", "default") in STATIC_ROPE for kind in kinds)
    return None if static else model.max_model_len
