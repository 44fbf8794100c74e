"""Slot order against an element-by-element reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engines.test_layouts import layout
from tokenlake.layout import Layout
from tokenlake_client.engines.common.slots import TORCH_DTYPES, LayerPair
from tokenlake_client.engines.transformers.segment_copy import SegmentCopier

SHAPES = [
    # (layers, kv heads, key dim, value dim, segment tokens)
    (2, 4, 8, 8, 16),
    (3, 1, 4, 4, 8),
    (1, 12, 4, 4, 8),
    (2, 8, 8, 8, 4),
    (2, 6, 4, 6, 8),
    (2, 16, 6, 4, 4),
    (1, 66, 4, 6, 4),
]


def reference(cache: list[LayerPair], shape: Layout, start: int) -> bytes:
    """The bytes of the slot, one head at a time in the documented order."""
    pieces = []
    for group in range(shape.shards):
        for pair in cache:
            for tensor in pair:
                for head in range(group * shape.heads_per_shard, (group + 1) * shape.heads_per_shard):
                    tokens = tensor[head, start : start + shape.segment_tokens]
                    pieces.append(bytes(tokens.contiguous().view(torch.uint8).numpy().tobytes()))
    return b"".join(pieces)


def random_cache(shape: Layout, tokens: int) -> list[LayerPair]:
    """Layers whose tensors are strided views of larger ones, as a batch's rows are."""
    generator = torch.Generator().manual_seed(3)
    dtype = TORCH_DTYPES[shape.dtype]
    return [
        (
            torch.randn((shape.kv_heads, tokens + 5, shape.key_dim), generator=generator).to(dtype)[:, 2:-3],
            torch.randn((shape.kv_heads, tokens + 5, shape.value_dim), generator=generator).to(dtype)[:, 2:-3],
        )
        for _ in range(shape.layers)
    ]


def shaped(numbers: tuple[int, int, int, int, int], dtype: str) -> Layout:
    layers, heads, key_dim, value_dim, tokens = numbers
    return layout(
        layers=layers,
        kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        segment_tokens=tokens,
        dtype=dtype,
    )


@pytest.mark.parametrize("numbers", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_write_and_read_keep_the_documented_order(numbers: tuple[int, int, int, int, int], dtype: str) -> None:
    shape = shaped(numbers, dtype)
    size, copier = shape.segment_tokens, SegmentCopier()
    cache = random_cache(shape, 3 * size + 1)
    segments: list[NDArray[np.uint8]] = []
    for start in (1, 1 + size):
        slot = np.zeros(shape.segment_bytes, np.uint8)
        copier.bind(shape, cache).write(slot, start)
        assert slot.tobytes() == reference(cache, shape, start)
        slot.flags.writeable = False
        segments.append(slot)
    target = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in cache]
    copier.bind(shape, target).read(segments, 1)
    for source, copy in zip(cache, target, strict=True):
        for original, copied in zip(source, copy, strict=True):
            assert torch.equal(original[:, 1 : 1 + 2 * size], copied[:, 1 : 1 + 2 * size])
            assert not copied[:, :1].any()
            assert not copied[:, 1 + 2 * size :].any()


def test_a_slot_of_another_size_is_refused() -> None:
    shape = shaped(SHAPES[0], "float32")
    copy = SegmentCopier().bind(shape, random_cache(shape, 16))
    with pytest.raises(ValueError, match="expected"):
        copy.write(np.zeros(shape.segment_bytes - 4, np.uint8), 0)
