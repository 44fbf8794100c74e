"""The model configurations that the pool can serve, and their position encodings. Imports no engine.

`UNDERSTOOD` lists the accepted settings about attention. A model with another setting whose name concerns attention is
refused, with the name of the setting, because a cache whose meaning is unknown must not be shared.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenlake.errors import LayoutRefused

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""The supported kinds of rotary position encoding: their rotation depends on a token's position alone. That of
`dynamic` and `longrope` also depends on the length of the sequence, so the cached keys of a prefix would change as the
sequence grows."""

OWN_POSITIONS = {
    "codegen": ("rotary", "rotary_dim"),
    "gpt2": ("learned", "n_positions"),
    "gpt_bigcode": ("learned", "n_positions"),
    "gptj": ("rotary", "rotary_dim"),
    "opt": ("learned", "max_position_embeddings"),
}
"""Model types whose configuration has no rotation parameters: the kind of their position encoding, and the setting that
holds its size."""

ATTENTION_WORDS = re.compile(
    r"attn|attention|window|alibi|kv_|sparse|bidirect|causal|index_|indexer|local|conv|mamba|ssm|recurr|lsh"
    r"|linear|rope|rotary|cross|layer_types|block_type|position_bias|chunk|state_size|compress|latent"
)

# fmt: off
UNDERSTOOD = frozenset((
    "attention_bias", "attention_dropout", "attention_head_dim", "attention_heads",
    "attention_multiplier", "attention_out_bias", "attention_probs_dropout_prob",
    "attention_softmax_in_fp32", "attn_logit_softcapping", "attn_pdrop", "chunk_size_feed_forward",
    "decoder_sparse_step", "is_causal", "layer_types", "max_window_layers", "mlp_layer_types",
    "no_rope_layer_interval", "no_rope_layers", "num_attention_heads", "num_kv_heads",
    "num_ln_in_parallel_attn", "num_local_experts", "original_max_position_embeddings",
    "output_attentions", "parallel_attn", "partial_rotary_factor", "qkv_bias", "query_pre_attn_scalar",
    "reorder_and_upcast_attn", "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim",
    "scale_attention_softmax_in_fp32", "scale_attn_by_inverse_layer_idx", "scale_attn_weights",
    "sliding_window", "use_qkv_bias", "use_sliding_window",
))
# fmt: on
"""Settings about attention that do not exclude a model: those that change the values in a cache but not their meaning
(the weights digest covers the values), and those that `check_config` or the types of the cache's layers check."""


def check_config(config: Any) -> None:
    """Raise `LayoutRefused`, naming field and reason, unless `config` describes a text decoder that caches one key and
    one value per KV head, layer and token, and attends to all tokens before."""
    settings: Mapping[str, object] = config.to_dict()
    if settings.get("is_encoder_decoder"):
        raise _refused("is_encoder_decoder", True, "the decoder's cache depends on the encoder's input")
    for name in sorted(config.sub_configs):
        if getattr(config, name, None) is not None:
            raise _refused(name, "present", "the cache depends on more than token ids")
    if settings.get("kv_lora_rank") is not None:
        raise _refused("kv_lora_rank", settings["kv_lora_rank"], "latent attention is not supported")
    if settings.get("is_causal") is False:
        raise _refused("is_causal", False, "a token's cache depends on tokens after it")
    for name in ("sliding_window", "attention_chunk_size"):
        if settings.get(name) is not None and settings.get("use_sliding_window") is not False:
            raise _refused(name, settings[name], "a layer does not keep the whole prefix")
    for kind in _layer_types(settings):
        if kind != "full_attention":
            raise _refused("layer_types", kind, "supported: full_attention")
    for name, value in settings.items():
        if value and name not in UNDERSTOOD and ATTENTION_WORDS.search(name):
            raise _refused(name, value, "its effect on the cache is not known")


def position_of(config: Any) -> str:
    """Canonical text of the position encoding. Raises `LayoutRefused` for an encoding whose cached keys depend on more
    than token and position."""
    rope = getattr(config, "rope_parameters", None)
    if rope:
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise _refused("rope_parameters", sorted(rope), "one encoding for all layers is supported")
        kind = rope.get("rope_type", "default")
        if kind not in STATIC_ROPE:
            raise _refused("rope_parameters.rope_type", kind, f"supported: {', '.join(STATIC_ROPE)}")
        return _canonical({"kind": "rope", **rope})
    if config.model_type not in OWN_POSITIONS:
        raise _refused("model_type", config.model_type, "its position encoding is not known")
    kind, size = OWN_POSITIONS[config.model_type]
    return _canonical({"kind": kind, size: getattr(config, size)})


def _layer_types(settings: Mapping[str, object]) -> list[object]:
    kinds = settings.get("layer_types")
    return list(kinds) if isinstance(kinds, (list, tuple)) else []


def _canonical(value: Mapping[str, object]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _refused(field: str, value: object, reason: str) -> LayoutRefused:
    return LayoutRefused(f"model configuration field '{field}' is {str(value)[:80]!r}: {reason}")


def directory_in_cache(model: str, revision: str | None, cache: str | None) -> Path:
    """The directory of a model that an engine has downloaded from Hugging Face. `cache`: where; None: the default
    place. Raises `LayoutRefused` where it is not there."""
    try:
        hub = importlib.import_module("huggingface_hub")
        found = hub.snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
    except Exception as error:
        raise LayoutRefused(f"the weights of {model!r} are not in the local cache: {error}") from error
    return Path(found)
