"""The caches of known models, and the segments that they make: how much a node's memory holds of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenlake.layout import QUANTISED_DTYPES, Layout, static_quantisation
from tokenlake.memory.region import RegionShape
from tokenlake.opaque_layout import AnyLayout, OpaqueLayout

GIB: Final = 1 << 30
MIB: Final = 1 << 20
RANKS: Final = (1, 2, 4, 8, 16)
"""The tensor-parallel sizes of the table."""
COLUMNS: Final = ("model", "MiB", *(f"TP {ranks}" for ranks in RANKS[1:]), "tokens/GiB", "/prompt", "used")


@dataclass(frozen=True, slots=True)
class ModelCache:
    """What a model caches of each token. The numbers are those of the model's published `config.json`."""

    name: str
    layers: int
    """The layers that attend to the whole prefix."""
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    latent: int = 0
    """The dimensions of a latent row that are its value (`kv_lora_rank`), of MLA; 0 for other attention."""
    windows: int = 0
    """The layers that attend to a sliding window."""
    window: int = 0
    """The tokens of such a window."""

    @property
    def groups(self) -> int:
        """The groups of layers that vLLM caches apart: one of `layers`, and those with windows in groups of at most as
        many. Each group has segments of its own."""
        return 1 + -(-self.windows // self.layers)

    @property
    def prompt_segments(self) -> int:
        """The most segments that a prompt adds to those of `layers`: of each group with windows, those of the last
        window."""
        return (self.groups - 1) * -(-self.window // self.layout().segment_tokens)

    def layout(self, ranks: int = 1) -> AnyLayout:
        """The layout of an engine with `ranks` tensor-parallel ranks. A model with windows is opaque to the pool, and
        a segment has room for the largest group of layers on each rank; the layout of all others is the same for any
        `ranks`."""
        known = Layout(
            model_id=self.name,
            weights_digest="0",
            dtype=self.dtype,
            layers=self.layers,
            kv_heads=self.kv_heads,
            key_dim=self.head_dim,
            value_dim=self.latent or self.head_dim,
            position="rope",
            attention="latent" if self.latent else "full",
            quantisation=static_quantisation("bfloat16") if self.dtype in QUANTISED_DTYPES else "none",
        )
        if not self.windows:
            return known
        return OpaqueLayout(
            model_id=self.name,
            weights_digest="0",
            engine="vllm",
            cache=f"{self.groups} groups of layers",
            shards=ranks,
            shard_bytes=known.segment_bytes // min(ranks, self.kv_heads),
            segment_tokens=known.segment_tokens,
        )

    def rank_bytes(self, ranks: int) -> int:
        """The bytes of a segment that each of `ranks` ranks reads: its own shards, or one that it shares with others
        where there are more ranks than shards."""
        layout = self.layout(ranks)
        return layout.shard_bytes * max(1, layout.shards // ranks)


MODELS: Final = (
    ModelCache("Llama-3.2-1B", 16, 8, 64),
    ModelCache("Llama-3.1-8B", 32, 8, 128),
    ModelCache("Llama-3.1-8B fp8", 32, 8, 128, dtype="float8_e4m3fn"),
    ModelCache("Llama-3-70B", 80, 8, 128),
    ModelCache("Llama-2-7B", 32, 32, 128),
    ModelCache("Qwen3-8B", 36, 8, 128),
    ModelCache("Qwen3-14B", 40, 8, 128),
    ModelCache("Qwen3-32B", 64, 8, 128),
    ModelCache("Qwen3-30B-A3B", 48, 4, 128),
    ModelCache("Qwen3-235B-A22B", 94, 4, 128),
    ModelCache("Mistral-Small-24B", 40, 8, 128),
    ModelCache("Gemma-3-27B", 10, 16, 128, windows=52, window=1024),
    ModelCache("gpt-oss-20b", 12, 8, 64, windows=12, window=128),
    ModelCache("gpt-oss-120b", 18, 8, 64, windows=18, window=128),
    ModelCache("GLM-4.5-Air", 46, 8, 128),
    ModelCache("DeepSeek-V3", 61, 1, 576, latent=512),
)


def title(memory: int) -> str:
    """The line above the table."""
    return (
        f"segments of {MODELS[0].layout().segment_tokens} tokens, and the share of {memory / GIB:g} GiB that they use"
    )


def rows(memory: int) -> list[tuple[str, ...]]:
    """For each model the cells of `COLUMNS`: the MiB of a segment, those of it that each rank reads, the tokens that
    1 GiB holds, the MiB that each prompt takes besides, and the share of `memory` bytes that holds segments when no
    further one fits."""
    return [_row(model, memory) for model in MODELS]


def _row(model: ModelCache, memory: int) -> tuple[str, ...]:
    layout = model.layout()
    shape = RegionShape(memory, layout.segment_bytes)
    parts = [f"{model.rank_bytes(ranks) / MIB:.1f}" for ranks in RANKS]
    tokens = GIB * layout.segment_tokens // shape.stride
    besides = model.prompt_segments * layout.segment_bytes / MIB
    return (model.name, *parts, f"{tokens:,}", f"{besides:.0f}", f"{shape.slots * layout.segment_bytes / memory:.1%}")
