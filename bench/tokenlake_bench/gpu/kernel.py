"""The Triton kernel: attention over scattered segments in a GPU's memory.

Per row: the time of a call, the rate at which keys and values are read, and its share of the memory's bandwidth, which
a copy on the device in the same run measures. Results are compared with torch's attention over one contiguous cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from tokenlake.attention import AttentionShape, SlotMap
from tokenlake.layout import Layout
from tokenlake_bench.gpu.base import CPU, NotRun, Rig, Row
from tokenlake_query.kernels import kernel_for

__all__ = ["kernel"]

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
LAYERS, LAYER = 2, 1
COPY_BYTES = 1 << 30
WARM, TURNS = 5, 50
TOLERANCE = 2e-2
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def kernel(rig: Rig) -> Iterator[Row]:
    """A row for each dtype, number of tokens and number of queries."""
    if rig.device == CPU or not torch.cuda.is_available():
        raise NotRun("no CUDA device")
    if find_spec("triton") is None:
        raise NotRun("no Triton")
    with torch.cuda.device(rig.device):
        bandwidth = _bandwidth()
        yield Row("a copy on the device, read and written", True, {"gb_s": bandwidth / 1e9})
        for dtype in DTYPES:
            for tokens in (4096, 32768):
                for queries in (1, 16, 512):
                    yield _row(dtype, tokens, queries, bandwidth)


def _row(dtype: str, tokens: int, queries: int, bandwidth: float) -> Row:
    layout = Layout(
        model_id="gpu",
        weights_digest="00",
        dtype=dtype,
        layers=LAYERS,
        kv_heads=KV_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        position="none",
    )
    torch.manual_seed(0)
    count, nbytes = tokens // layout.segment_tokens, layout.segment_bytes
    arena = torch.randn(count * nbytes // 2, device="cuda").to(DTYPES[dtype])
    slots = [arena.view(torch.uint8)[place * nbytes :][:nbytes] for place in torch.randperm(count).tolist()]
    chosen: Any = kernel_for(layout, AttentionShape.of(layout, Q_HEADS), "cuda")
    query = torch.randn(queries, Q_HEADS, DIM, device="cuda").to(DTYPES[dtype])
    out, _ = chosen.attend_there(query, slots, LAYER)
    keys, values = (
        torch.cat(
            [
                slot.view(DTYPES[dtype]).as_strided(place.shape, place.strides, _at(slot, place.offset))
                for slot in slots
            ],
            2,
        )
        for place in SlotMap.of(layout).places(LAYER)
    )
    flat = (view.reshape(1, KV_HEADS, tokens, DIM) for view in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(query.transpose(0, 1)[None], *flat, enable_gqa=True)
    worst = (out.transpose(0, 1)[None] - expected.float()).abs().max().item()
    seconds = _time(lambda: chosen.attend_there(query, slots, LAYER))
    rate = 2 * KV_HEADS * tokens * DIM * 2 / seconds
    return Row(
        f"{dtype} {tokens} tokens, {queries} queries",
        worst <= TOLERANCE,
        {"us": seconds * 1e6, "gb_s": rate / 1e9, "of_bandwidth": rate / bandwidth, "worst_difference": worst},
    )


def _at(slot: Any, offset: int) -> int:
    """The index, from the start of the underlying memory, of the element `offset` elements behind the first one of the
    view `slot` (16-bit elements), as torch's `as_strided` takes it."""
    return int(slot.storage_offset()) // 2 + offset


def _bandwidth() -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _time(lambda: target.copy_(source))


def _time(call: Callable[[], object]) -> float:
    """Median seconds of one call on the GPU."""
    taken: list[float] = []
    for turn in range(WARM + TURNS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        if turn >= WARM:
            taken.append(began.elapsed_time(ended) / 1e3)
    return sorted(taken)[TURNS // 2]
