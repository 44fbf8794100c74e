"""vLLM's memory layouts: the contents of each block, and the slots that are copied from and to them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_client.engines.common.slots import slot_whole
from tokenlake_client.engines.vllm.copies import DeviceCopy, HostCopy
from tokenlake_client.engines.vllm.known.blocks import BLOCK_VIEWS, BlockCache, block_views, check_tensors, stack_layers
from tokenlake_client.engines.vllm.known.ranks import RankShards, rank_shards
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_testing.cpu_device import CpuDevice

LAYERS, HEADS, DIM, SEGMENT, BLOCK, BLOCKS = 3, 4, 8, 16, 8, 6
LAYOUT = Layout(
    model_id="m",
    weights_digest="d",
    dtype="float32",
    layers=LAYERS,
    kv_heads=HEADS,
    key_dim=DIM,
    value_dim=DIM,
    position="p",
    segment_tokens=SEGMENT,
)
ORDERS = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3)}
CASES = [
    (backend, order, together, parts)
    for backend, order, together, parts in itertools.product(BLOCK_VIEWS, ORDERS, (True, False), (1, 2))
    # vLLM's CPU kernels support one order of blocks only.
    if order == "HND" or not backend.startswith("CPU")
]


def caches(heads: int, order: str, parts: int, *, together: bool) -> list[Any]:
    """One tensor per layer, as vLLM gives them: logical [kernel blocks, heads, tokens, 2 * dim] of any strides."""
    logical = (BLOCKS * parts, heads, BLOCK // parts, 2 * DIM)
    axes = ORDERS[order]
    physical = tuple(logical[axis] for axis in axes)
    count = int(np.prod(physical))
    whole = torch.zeros(LAYERS * count)
    flat = whole.view(LAYERS, count).unbind(0) if together else [torch.zeros(count) for _ in range(LAYERS)]
    return [layer.view(physical).permute(*np.argsort(axes).tolist()) for layer in flat]


def kernel_write(backend: str, cache: Any, at: int, keys: Any, values: Any) -> None:
    """Write keys and values [heads, tokens, dim] of a whole kernel block, as a kernel does."""
    if not backend.startswith("CPU"):
        cache[at, :, :, :DIM], cache[at, :, :, DIM:] = keys, values
        return
    heads, tokens, _ = keys.shape
    packed = torch.cat([keys.transpose(1, 2).reshape(heads, -1), values.reshape(heads, -1)], dim=1)
    cache[at] = packed.view(heads, tokens, 2 * DIM)


def layers_of(slot: Any) -> list[Any]:
    """For each layer of the slot, its keys and values."""
    keys, values = slot_whole(slot, LAYOUT)
    return list(zip(keys.unbind(1), values.unbind(1), strict=True))


@pytest.mark.parametrize(("backend", "order", "together", "parts"), CASES)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (3, 4), (5, 8)])
def test_a_segment_goes_out_in_canonical_order_and_comes_back(
    backend: str, order: str, together: bool, parts: int, rank: int, size: int
) -> None:
    torch.manual_seed(0)
    shards = rank_shards(LAYOUT, rank, size)
    heads = max(1, HEADS // size)
    tensors = caches(heads, order, parts, together=together)
    tokens = torch.randn(2, LAYERS, heads, SEGMENT, DIM)
    blocks = [4, 1]
    step = BLOCK // parts
    for layer, (number, part) in itertools.product(range(LAYERS), itertools.product(range(2), range(parts))):
        start = number * BLOCK + part * step
        piece = tokens[:, layer, :, start : start + step]
        kernel_write(backend, tensors[layer], blocks[number] * parts + part, piece[0], piece[1])
    stacks = stack_layers(tensors, BLOCKS, block_views(backend))
    assert len(stacks) == (1 if together else LAYERS)
    copy = HostCopy(BlockCache(LAYOUT, shards, stacks))
    slot = np.zeros(LAYOUT.segment_bytes, np.uint8)
    copy.to_slot(slot, Part(0, 0, 0, tuple(blocks)))
    for layer, sides in enumerate(layers_of(slot)):
        for side, written in enumerate(sides):
            mine = written[shards.first : shards.stop].flatten(0, 1)
            assert torch.equal(mine, tokens[side, layer])
            assert torch.count_nonzero(written) == torch.count_nonzero(mine), "shards of other ranks were written"
    other = caches(heads, order, parts, together=together)
    back = HostCopy(BlockCache(LAYOUT, shards, stack_layers(other, BLOCKS, block_views(backend))))
    back.from_slot(slot, Part(0, 0, 1, tuple(blocks[1:])))
    back.from_slot(slot, Part(0, 0, 0, tuple(blocks[:1])))
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(other, tensors, strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_a_segment_goes_through_a_device_and_back(size: int) -> None:
    """`DeviceCopy` fills a slot as `HostCopy` does, and its blocks from such a slot."""
    torch.manual_seed(1)
    device, shards = CpuDevice(), rank_shards(LAYOUT, size - 1, size)
    tensors, loaded = (caches(HEADS // size, "NHD", 1, together=True) for _ in range(2))
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    for blocks in ([3, 0], [3]):
        slot, there = (np.full(LAYOUT.segment_bytes, 0xFF, np.uint8) for _ in range(2))
        host_copy(tensors, shards).to_slot(slot, Part(0, 0, 0, tuple(blocks)))
        device_copy(device, tensors, shards).to_slot(there, Part(0, 0, 0, tuple(blocks)))
        assert np.array_equal(slot, there)
    copy = device_copy(device, loaded, shards)
    device_copy(device, tensors, shards).to_slot(slot, Part(0, 0, 0, (3, 0)))
    copy.from_slot(slot, Part(0, 0, 1, (0,)))
    copy.from_slot(slot, Part(0, 0, 0, (3,)))
    copy.finish()
    for mine, theirs in zip(loaded, tensors, strict=True):
        assert torch.equal(mine[[0, 3]], theirs[[0, 3]])
        assert not mine[[1, 2]].any()


def host_copy(tensors: list[torch.Tensor], shards: RankShards) -> HostCopy:
    return HostCopy(BlockCache(LAYOUT, shards, stack_layers(tensors, BLOCKS, block_views("FLASH_ATTN"))))


def device_copy(device: CpuDevice, tensors: list[torch.Tensor], shards: RankShards) -> DeviceCopy:
    there = [device.tensor(tensor) for tensor in tensors]
    return DeviceCopy(BlockCache(LAYOUT, shards, stack_layers(there, BLOCKS, block_views("FLASH_ATTN"))), device)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_a_slot_has_zeros_behind_the_tail_of_a_prompt(parts: int, size: int) -> None:
    """An engine with larger blocks reads them, and must not multiply zeros with what an earlier segment left there."""
    shards = rank_shards(LAYOUT, size - 1, size)
    tensors = caches(HEADS // size, "NHD", parts, together=True)
    for tensor in tensors:
        tensor.fill_(1.0)
    slot = np.full(LAYOUT.segment_bytes, 0xFF, np.uint8)
    host_copy(tensors, shards).to_slot(slot, Part(0, 0, 0, (3,)))
    for sides in layers_of(slot):
        for side in sides:
            mine = side[shards.first : shards.stop]
            assert (mine[..., :BLOCK, :] == 1).all()
            assert (mine[..., BLOCK:, :] == 0).all()
            others = torch.cat([side[: shards.first], side[shards.stop :]])
            assert others.isnan().all(), "shards of other ranks were written"


def test_an_unknown_layout_is_refused_by_name() -> None:
    with pytest.raises(LayoutRefused, match="'CPU_ATTN/amx'"):
        block_views("CPU_ATTN/amx")
    with pytest.raises(LayoutRefused, match=r"cache of layer\.0 is \(6, 4, 8, 16\)"):
        check_tensors({"layer.0": torch.zeros(6, 4, 8, 16)}, 2, 16, torch.float32, 6)
