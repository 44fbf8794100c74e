"""The Triton kernel: attention over scattered segments in a GPU's memory.

Per row: the time of a call, the rate at which keys and values are read, its share of the memory's bandwidth, which a
copy on the device in the same run measures, and its time as a multiple of that of torch's fused attention over one
contiguous cache. Calls are timed as CUDA graphs over the layers of a model, so that neither the host nor the L2 cache
takes part. Results are compared with attention in float32, computed in blocks.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenlake.attention import AttentionShape, SlotMap
from tokenlake.layout import Layout
from tokenlake_bench.gpu.base import CPU, NotRun, Rig, Row

COPY_BYTES = 1 << 30
COLD_BYTES = 160 << 20
"""The layers of a row have at least as many bytes: three times an H100's L2 cache."""
TURNS = 9
BLOCK = 4096
"""Tokens that the reference computes at a time."""
TOLERANCE, LSE_TOLERANCE = 2e-2, 1e-3
MODELS: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "GQA": ({"kv_heads": 8, "key_dim": 128, "value_dim": 128}, 32),
    "MLA": ({"kv_heads": 1, "key_dim": 576, "value_dim": 512, "attention": "latent"}, 128),
}
ROWS = (
    *(("GQA", 32768, 1), ("GQA", 131072, 1), ("GQA", 4096, 1), ("GQA", 32768, 16), ("GQA", 32768, 512)),
    *(("MLA", 32768, 1), ("MLA", 131072, 1), ("MLA", 4096, 1), ("MLA", 32768, 16), ("MLA", 32768, 512)),
    *(("GQA", 4096, 16), ("GQA", 131072, 16), ("GQA", 4096, 512), ("GQA", 131072, 512)),
    *(("MLA", 4096, 16), ("MLA", 131072, 16), ("MLA", 4096, 512), ("MLA", 131072, 512)),
)
"""Model, cached tokens, queries; the most important first."""
OTHERS: tuple[dict[str, int], ...] = ({"stages": 3}, {"resident": 4, "stages": 2}, {"warps": 8})
"""Other launches at 32K tokens and 1 query of GQA, of which the fastest is a row."""


def needs_kernel(rig: Rig) -> None:
    """Raises NotRun where the kernel cannot run on the device. On the CPU it runs in Triton's interpreter."""
    if find_spec("triton") is None:
        raise NotRun("no Triton")
    if rig.device == CPU:
        # triton reads this variable when it is imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")


def layout_of(model: str, layers: int, dtype: str = "bfloat16") -> Layout:
    """The layout of the segments of `layers` layers of one of `MODELS`."""
    fields, _ = MODELS[model]
    return Layout(model_id="gpu", weights_digest="00", dtype=dtype, layers=layers, position="none", **fields)


@dataclass(frozen=True)
class Cache:
    """Random segments, scattered over one memory."""

    layout: Layout
    slots: list[Any]

    @classmethod
    def drawn(cls, layout: Layout, tokens: int, device: str) -> Cache:
        """The cache of `tokens` tokens."""
        count, nbytes = tokens // layout.segment_tokens, layout.segment_bytes
        dtype = getattr(torch, layout.dtype)
        arena = torch.empty(count * nbytes // dtype.itemsize, dtype=dtype, device=device).normal_()
        at = torch.randperm(count).tolist()
        return cls(layout, [arena.view(torch.uint8)[place * nbytes :][:nbytes] for place in at])

    def flat(self, layer: int) -> tuple[Any, Any]:
        """Keys and values of `layer`, contiguous, `[KV head, token, dim]`."""
        keys, values = (
            torch.cat([_placed(slot, place, getattr(torch, self.layout.dtype)) for slot in self.slots], 1)
            for place in SlotMap.of(self.layout).places(layer)
        )
        return keys, values


def _placed(slot: Any, place: Any, dtype: Any) -> Any:
    """The keys or values at `place` in `slot`, `[KV head, token, dim]`."""
    typed = slot.view(dtype)
    return typed.as_strided(place.shape, place.strides, typed.storage_offset() + place.offset).flatten(0, 1)


def kernel(rig: Rig) -> Iterator[Row]:
    """A row for each number of cached tokens and of queries. MLA has no figure against torch's fused attention, which
    takes no key rows of 576 columns."""
    if rig.device != CPU and not torch.cuda.is_available():
        raise NotRun("no CUDA device")
    needs_kernel(rig)
    if rig.device == CPU:
        yield _row(rig, "GQA", 512, 1, math.inf)
        yield _row(rig, "MLA", 256, 1, math.inf)
        return
    with torch.cuda.device(rig.device):
        bandwidth = _bandwidth()
        yield Row("a copy on the device, read and written", True, {"gb_s": bandwidth / 1e9})
        first, *others = ROWS
        yield _row(rig, *first, bandwidth)
        yield _fastest_launch(rig, bandwidth)
        for each in others:
            yield _row(rig, *each, bandwidth)


def _row(rig: Rig, model: str, tokens: int, queries: int, bandwidth: float) -> Row:
    torch.manual_seed(0)
    cache, query, chosen = _scene(rig, model, tokens, queries)
    layout, shape = cache.layout, chosen.shape
    pages = chosen.page_table(cache.slots)
    keys, values = cache.flat(layout.layers - 1)
    out, lse = chosen.attend_there(query, pages, layout.layers - 1)
    expected, expected_lse = reference(query, keys, values, shape)
    worst = ((out - expected).abs().max() / expected.abs().max()).item()
    worst_lse = (lse - expected_lse).abs().max().item()
    figures = {"worst_difference": worst, "worst_lse_difference": worst_lse}
    right = worst <= TOLERANCE and worst_lse <= LSE_TOLERANCE
    name = f"{model}, {tokens} tokens, {queries} queries"
    if rig.device == CPU:
        return Row(name, right, figures)
    del keys, values, out, expected
    nbytes = cache_bytes(layout, tokens)
    seconds = graph_s([partial(chosen.attend_there, query, pages, layer) for layer in range(layout.layers)])
    rate = nbytes / seconds
    figures = {"us": seconds * 1e6, "gb_s": rate / 1e9, "of_bandwidth": rate / bandwidth, **figures}
    if not shape.latent:
        figures["of_fused_time"] = seconds / _fused_s(cache, query)
    return Row(name, right, figures)


def _scene(rig: Rig, model: str, tokens: int, queries: int) -> tuple[Cache, Any, Any]:
    """A cache with so many layers that all of them do not fit into the L2 cache, queries, and the kernel."""
    from tokenlake_query.kernels.triton_cuda import TritonKernel

    one = cache_bytes(layout_of(model, 1), tokens)
    # The interpreter has no product of bfloat16.
    layout = layout_of(model, 2 if rig.device == CPU else max(2, -(-COLD_BYTES // one)), _dtype(rig))
    heads = MODELS[model][1]
    cache = Cache.drawn(layout, tokens, rig.device)
    query = torch.randn(queries, heads, layout.key_dim, device=rig.device).to(getattr(torch, layout.dtype))
    return cache, query, TritonKernel(layout, AttentionShape.of(layout, heads), rig.device)


def _dtype(rig: Rig) -> str:
    return "float32" if rig.device == CPU else "bfloat16"


def cache_bytes(layout: Layout, tokens: int) -> int:
    """The bytes of one layer of `tokens` tokens."""
    return layout.segment_bytes * tokens // (layout.segment_tokens * layout.layers)


def reference(query: Any, keys: Any, values: Any, shape: AttentionShape) -> tuple[Any, Any]:
    """`out` `[query, q head, dim]` and `lse` of attention in float32, in blocks of tokens."""
    count = len(query)
    rows = query.float().view(count, shape.kv_heads, -1, shape.key_dim).transpose(0, 1).flatten(1, 2)
    out = lse = None
    for first in range(0, keys.shape[1], BLOCK):
        logits = rows @ keys[:, first : first + BLOCK].float().transpose(1, 2) * shape.scale
        of_part = logits.logsumexp(-1)
        part = (logits - of_part.unsqueeze(-1)).exp_() @ values[:, first : first + BLOCK].float()
        if lse is None:
            out, lse = part, of_part
        else:
            whole = lse.logaddexp(of_part)
            out = out * (lse - whole).exp().unsqueeze(-1) + part * (of_part - whole).exp().unsqueeze(-1)
            lse = whole

    def unfold(each: Any) -> Any:
        return each.unflatten(1, (count, shape.group)).transpose(0, 1).flatten(1, 2)

    return unfold(out), unfold(lse)


def _fastest_launch(rig: Rig, bandwidth: float) -> Row:
    """The fastest of `OTHERS`, by its place in it, against the chosen launch."""
    model, tokens, queries = ROWS[0]
    cache, query, chosen = _scene(rig, model, tokens, queries)
    from tokenlake_query.kernels.triton_launch import launch_for

    usual = launch_for(chosen.shape, 2, queries * chosen.shape.group)
    pages, layers = chosen.page_table(cache.slots), range(cache.layout.layers)
    taken: list[float] = []
    for change in OTHERS:
        chosen.launch = usual._replace(**change)
        taken.append(graph_s([partial(chosen.attend_there, query, pages, layer) for layer in layers]))
    best = min(range(len(taken)), key=taken.__getitem__)
    rate = cache_bytes(cache.layout, tokens) / taken[best]
    changes = ", ".join(f"{name} {value}" for name, value in OTHERS[best].items())
    return Row(
        f"the fastest other launch: {changes}", True, {"us": taken[best] * 1e6, "of_bandwidth": rate / bandwidth}
    )


def _fused_s(cache: Cache, query: Any) -> float:
    """Seconds of torch's fastest fused attention over one contiguous cache."""
    flat = [[each[None] for each in cache.flat(layer)] for layer in range(cache.layout.layers)]
    of_heads = query.transpose(0, 1)[None].contiguous()
    fused = torch.nn.functional.scaled_dot_product_attention
    best = math.inf
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                best = min(best, graph_s([partial(fused, of_heads, *each, enable_gqa=True) for each in flat]))
        except RuntimeError:
            # This backend does not take the shape.
            continue
    return best


def _bandwidth() -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / graph_s([lambda: target.copy_(source)])


def graph_s(calls: Sequence[Callable[[], object]]) -> float:
    """Median seconds of one of `calls` on the GPU, which a CUDA graph runs one after the other."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # Compiles kernels and loads libraries, which a graph may not capture.
        calls[0]()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    taken: list[float] = []
    for _ in range(1 + TURNS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        taken.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(taken[1:]) / len(calls)
