"""The dimensions of a model from its Hugging Face `config.json`. Only the text part of a model of several modes is
read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenlake.errors import ConfigurationError
from tokenlake_bench.engine_model.layers import Attention, FeedForward, GroupedAttention, LatentAttention
from tokenlake_bench.engine_model.models import MODELS, PLAIN_BYTES, Model


@dataclass(frozen=True, slots=True)
class Family:
    """What a `model_type` says beside the fields of its file."""

    mixture: bool = False
    """Layers have routed experts."""
    latent: bool = False
    tied: bool = False
    """Whether the output layer is the embedding, where the file does not say so."""
    norms: int = 2
    """Norms of the hidden state in a layer."""
    head_norms: int = 0
    """Norms of a query or key head in a layer."""
    query_bias: bool = False
    """The projections of queries, keys and values have biases."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that files of this type leave out."""


_GEMMA3: Final = Family(
    tied=True,
    norms=4,
    head_norms=2,
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)
FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(mixture=True),
    "qwen2": Family(query_bias=True),
    "qwen2_moe": Family(mixture=True, query_bias=True),
    "qwen3": Family(head_norms=2),
    "qwen3_moe": Family(mixture=True, head_norms=2),
    "gemma": Family(tied=True, defaults={"head_dim": 256}),
    "gemma2": Family(tied=True, norms=4, defaults={"head_dim": 256, "sliding_window_pattern": 2}),
    "gemma3_text": _GEMMA3,
    "phi3": Family(),
    "phimoe": Family(mixture=True, norms=4, query_bias=True),
    "deepseek_v2": Family(mixture=True, latent=True),
    "deepseek_v3": Family(mixture=True, latent=True),
    "kimi_k2": Family(mixture=True, latent=True),
    "glm4_moe": Family(mixture=True),
    "gpt_oss": Family(mixture=True, query_bias=True),
}
"""The model types that are known."""

WHOLE: Final = frozenset({"full_attention"})
WINDOWED: Final = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers in `layer_types`, those with a window with the field of its size."""


def model_named(name: str) -> Model:
    """The model with this name, or of the `config.json` at this path or in this directory. Raises ConfigurationError
    that names what is missing or unknown."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        known = ", ".join(MODELS)
        raise ConfigurationError("model", name, f"{known}, or the path of a Hugging Face config.json or its directory")
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError("model", name, f"a config.json that can be read; {error}") from None
    if not isinstance(found, dict):
        raise ConfigurationError("model", name, "a config.json with an object")
    return model_of(found, path.resolve().parent.name if path.name == "config.json" else path.stem)


def model_of(config: Mapping[str, Any], name: str) -> Model:
    """The model that a `config.json` describes. Raises ConfigurationError."""
    return _Reader(config, name).model()


@dataclass
class _Reader:
    config: Mapping[str, Any]
    name: str
    text: dict[str, Any] = field(init=False)
    family: Family = field(init=False)

    def __post_init__(self) -> None:
        inner = self.config.get("text_config")
        self.text = dict(inner) if isinstance(inner, Mapping) else dict(self.config)
        kind = self.text.get("model_type", self.config.get("model_type"))
        kind = "gemma3_text" if kind == "gemma3" else kind
        if kind not in FAMILIES:
            raise self._error(f"a model_type among {', '.join(FAMILIES)}; it has {kind!r}")
        self.family = FAMILIES[str(kind)]
        self.text = {**self.family.defaults, **{key: value for key, value in self.text.items() if value is not None}}
        self.kind = str(kind)

    def model(self) -> Model:
        """The model."""
        hidden, layers = self._count("hidden_size"), self._count("num_hidden_layers")
        attention = self._attention(hidden, layers)
        feed_forward = self._feed_forward(hidden, layers)
        weight_bytes, expert_bytes, fp8 = self._quantisation()
        return Model(
            name=self.name,
            hidden=hidden,
            vocabulary=self._count("vocab_size"),
            attention=attention,
            feed_forward=feed_forward,
            tied=bool(self.text.get("tie_word_embeddings", self.config.get("tie_word_embeddings", self.family.tied))),
            small_parameters=self._small(hidden, attention, feed_forward),
            weight_bytes=weight_bytes,
            expert_bytes=expert_bytes,
            fp8=fp8,
        )

    # -- layers

    def _attention(self, hidden: int, layers: int) -> tuple[tuple[int, Attention], ...]:
        heads = self._count("num_attention_heads")
        if self.family.latent:
            latent = LatentAttention(
                hidden=hidden,
                heads=heads,
                query_rank=self.text.get("q_lora_rank") or 0,
                latent=self._count("kv_lora_rank"),
                nope_dim=self._count("qk_nope_head_dim"),
                rope_dim=self._count("qk_rope_head_dim"),
                value_dim=self._count("v_head_dim"),
            )
            return ((layers, latent),)
        kv_heads = self._count("num_key_value_heads", heads)
        head_dim = self._count("head_dim", hidden // heads)
        windows = self._windows(layers)
        return tuple(
            (count, GroupedAttention(hidden, heads, kv_heads, head_dim, window)) for window, count in windows.items()
        )

    def _windows(self, layers: int) -> dict[int, int]:
        """Number of layers by the window of their attention, 0 for none."""
        kinds = self.text.get("layer_types")
        if not isinstance(kinds, list):
            window = self.text.get("sliding_window") or 0
            if not window or not self.text.get("use_sliding_window", True):
                return {0: layers}
            pattern = self.text.get("sliding_window_pattern")
            if self.text.get("use_sliding_window"):
                whole = min(layers, self._count("max_window_layers", layers))
            else:
                whole = layers // pattern if pattern else 0
            return {each: count for each, count in ((0, whole), (window, layers - whole)) if count}
        found: dict[int, int] = {}
        for kind in kinds:
            if kind not in WHOLE and kind not in WINDOWED:
                known = ", ".join((*WHOLE, *WINDOWED))
                raise self._error(f"layer_types among {known}; it has {kind!r}, whose cache is not modelled")
            window = 0 if kind in WHOLE else self._count(WINDOWED[kind])
            found[window] = found.get(window, 0) + 1
        if sum(found.values()) != layers:
            raise self._error(f"{layers} layer_types, one per layer; it has {len(kinds)}")
        return found

    def _feed_forward(self, hidden: int, layers: int) -> tuple[tuple[int, FeedForward], ...]:
        if not self.family.mixture:
            return ((layers, FeedForward(hidden, self._count("intermediate_size"))),)
        experts = self._count(self._first("n_routed_experts", "num_experts", "num_local_experts"))
        chosen = self._count(self._first("num_experts_per_tok", "experts_per_token"))
        inner = self._count(self._first("moe_intermediate_size", "intermediate_size"))
        shared = self.text.get("shared_expert_intermediate_size") or inner * (self.text.get("n_shared_experts") or 0)
        plain = self._dense_layers(layers)
        mixture = FeedForward(hidden, shared, experts, chosen, inner)
        parts = [(layers - plain, mixture)]
        if plain:
            parts.append((plain, FeedForward(hidden, self._count("intermediate_size"))))
        return tuple(parts)

    def _dense_layers(self, layers: int) -> int:
        """Number of layers without routed experts."""
        first = self.text.get("first_k_dense_replace") or 0
        step = self.text.get("decoder_sparse_step") or self.text.get("moe_layer_freq") or 1
        plain = set(self.text.get("mlp_only_layers") or ())
        return sum(layer < first or layer in plain or bool((layer + 1) % step and step > 1) for layer in range(layers))

    def _small(
        self,
        hidden: int,
        attention: tuple[tuple[int, Attention], ...],
        feed_forward: tuple[tuple[int, FeedForward], ...],
    ) -> int:
        """Parameters of norms and biases."""
        found = hidden
        for count, part in attention:
            each = self.family.norms * hidden
            if isinstance(part, GroupedAttention):
                head_norms = 2 if self.text.get("use_qk_norm") else self.family.head_norms
                each += head_norms * part.head_dim
                if self.text.get("attention_bias", self.family.query_bias):
                    each += (part.heads + 2 * part.kv_heads) * part.head_dim
            elif isinstance(part, LatentAttention):
                each += part.query_rank + part.latent
            found += count * each
        mixtures = [(count, part) for count, part in feed_forward if part.experts]
        if self.kind in ("deepseek_v3", "kimi_k2", "glm4_moe"):
            # A bias per expert corrects their choice.
            found += sum(count * part.experts for count, part in mixtures)
        if self.kind == "qwen2_moe":
            # A gate of the shared expert.
            found += sum(count * hidden for count, _ in mixtures)
        if self.kind == "gpt_oss":
            # Biases of the output and of the experts, a sink per head.
            found += sum(count * (hidden + self._count("num_attention_heads")) for count, _ in attention)
            found += sum(count * part.experts * (2 * part.inner + hidden + 1) for count, part in mixtures)
        return found

    # -- weights

    def _quantisation(self) -> tuple[float, float | None, bool]:
        """(bytes per parameter of the layers, the same of routed experts or None for no difference, whether products
        run in FP8)."""
        settings = next(
            (
                found
                for holder in (self.text, self.config)
                for key in ("quantization_config", "compression_config")
                if isinstance(found := holder.get(key), Mapping)
            ),
            None,
        )
        if settings is None:
            return PLAIN_BYTES, None, False
        method = str(settings.get("quant_method", "")).lower()
        if method in ("fp8", "fbgemm_fp8"):
            return 1.0, None, True
        if method in ("awq", "gptq", "auto-round"):
            bits, group = settings.get("bits", settings.get("w_bit")), settings.get("group_size", 128)
            if not isinstance(bits, int):
                raise self._error("'bits' in its quantization_config")
            # A group of weights has a scale of 16 bits and a zero point of as many bits as a weight.
            return (bits + (16 + bits) / group if isinstance(group, int) and group > 0 else bits) / 8, None, False
        if method == "mxfp4":
            # Experts alone: 4 bits, and a scale of 8 bits for 32 weights.
            return PLAIN_BYTES, (4 + 8 / 32) / 8, False
        if method == "modelopt" and settings.get("quant_algo") in ("FP8", "NVFP4"):
            return (1.0, None, True) if settings["quant_algo"] == "FP8" else ((4 + 8 / 16) / 8, None, True)
        if method == "bitsandbytes":
            return (1.0 if settings.get("load_in_8bit") else 0.5), None, False
        if method == "compressed-tensors":
            return self._compressed(settings)
        known = "fp8, fbgemm_fp8, awq, gptq, auto-round, mxfp4, modelopt (FP8, NVFP4), bitsandbytes, compressed-tensors"
        raise self._error(f"a quant_method among {known}; it has {method!r}")

    def _compressed(self, settings: Mapping[str, Any]) -> tuple[float, float | None, bool]:
        groups = settings.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
            bits, size = weights.get("num_bits"), weights.get("group_size")
            if isinstance(bits, int):
                scale = 16 / size if isinstance(size, int) and size > 0 else 0
                return (bits + scale) / 8, None, inputs.get("num_bits") == 8
        raise self._error("'weights' with 'num_bits' in the config_groups of its quantization_config")

    # -- fields

    def _first(self, *names: str) -> str:
        """The first of these fields that the file has, or the first of all."""
        return next((name for name in names if name in self.text), names[0])

    def _count(self, name: str, default: int | None = None) -> int:
        value = self.text.get(name, default)
        if value is None:
            raise self._error(f"the field {name!r}, which is missing")
        if type(value) is not int or value < 1:
            raise self._error(f"a number above 0 in the field {name!r}; it has {value!r}")
        return value

    def _error(self, expected: str) -> ConfigurationError:
        return ConfigurationError("model", self.name, f"a config.json with {expected}")
