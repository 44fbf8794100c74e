"""vLLM's blocks on the device and a daemon's arena: blocks with random bytes are stored and loaded into other blocks,
for the layouts of FlashAttention and FlashInfer, and as opaque segments of two groups of layers. Every byte is
compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_bench.gpu.base import Rig, Row, device_named
from tokenlake_bench.sizing import layout_of
from tokenlake_client import Deadlines, Pool
from tokenlake_client.engines.devices.base import Device
from tokenlake_client.engines.vllm.copies import DeviceCopy
from tokenlake_client.engines.vllm.known.blocks import BlockCache, block_views, stack_layers
from tokenlake_client.engines.vllm.known.ranks import rank_shards
from tokenlake_client.engines.vllm.offloading.pages import PageCache, PageTable
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_client.match import MatchOptions
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.device_bytes import bytes_of, filled, random_bytes

BLOCK = 16
PATIENT = Deadlines(call_s=10.0, match_s=10.0)
"""The check is about bytes and rates: a busy machine may not run a process for longer than the default deadlines."""
ORDERS = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3)}


@dataclass(frozen=True)
class _Size:
    layers: int
    heads: int
    dim: int
    segment: int
    """Tokens of a segment."""
    segments: int
    memory: str
    region: str

    @property
    def page(self) -> int:
        """Bytes of a page of one layer of an opaque cache."""
        return 2 * self.heads * self.dim * BLOCK * 2

    @property
    def groups(self) -> tuple[int, int]:
        """The number of layers of each group of an opaque cache."""
        return self.layers, self.layers // 2


LLAMA_8B = _Size(32, 8, 128, 256, 32, "3GiB", "256MiB")
"""32 MiB per segment in bfloat16."""
SMALL = _Size(4, 2, 32, 64, 4, "64MiB", "8MiB")


def blocks(rig: Rig) -> Iterator[Row]:
    """A row for each layout: GB/s of storing with checksums, of the first load, which also page-locks the arena, and of
    the second."""
    device, size = device_named(rig.device), SMALL if rig.small else LLAMA_8B
    with Cluster(1, size.memory, size.region) as cluster:
        socket = cluster.nodes[0].socket
        for backend in ("FLASH_ATTN",) if rig.small else ("FLASH_ATTN", "FLASHINFER"):
            for order in ORDERS:
                yield _segments(device, size, socket, backend, order)
        yield _opaque(device, size, socket)


def _segments(device: Device, size: _Size, socket: Path, backend: str, order: str) -> Row:
    per_segment, axes, stream = size.segment // BLOCK, ORDERS[order], device.stream()
    count = size.segments * per_segment
    logical = (count, size.heads, BLOCK, 2 * size.dim)
    shape = (size.layers, *(logical[axis] for axis in axes))
    contents = random_bytes(2 * int(np.prod(shape)), 1)
    layout = layout_of(
        f"gpu {backend} {order}", size.segment, size.dim, layers=size.layers, kv_heads=size.heads, dtype="bfloat16"
    )
    source, target = (filled(stream, shape, torch.bfloat16, each) for each in (contents, np.zeros_like(contents)))

    def copier(whole: Any) -> DeviceCopy:
        layers = [layer.permute(*np.argsort(axes).tolist()) for layer in whole.unbind(0)]
        stacks = stack_layers(layers, count, block_views(backend))
        return DeviceCopy(BlockCache(layout, rank_shards(layout, 0, 1), stacks), device)

    out, into = copier(source), copier(target)

    def part(index: int) -> Part:
        return Part(index, 0, 0, tuple(range(index * per_segment, (index + 1) * per_segment)))

    def fill(index: int, slot: NDArray[np.uint8]) -> None:
        out.to_slot(slot, part(index))

    def load(slots: list[NDArray[np.uint8]]) -> None:
        for index, slot in enumerate(slots):
            into.from_slot(slot, part(index))
        into.finish()

    with Pool.connect(socket, layout, deadlines=PATIENT) as pool:
        keys = pool.prefix(list(range(size.segments * size.segment))).keys
        started = time.perf_counter()
        pool.store_all(keys, fill, patience=30.0)
        seconds = [time.perf_counter() - started]
        with pool.match(keys) as lease:
            for _ in range(2):
                started = time.perf_counter()
                load(list(lease.fetch()))
                seconds.append(time.perf_counter() - started)
    right = np.array_equal(bytes_of(stream, target), contents)
    return _row(f"{backend} {order}", right, size.segments * layout.segment_bytes, seconds)


def _opaque(device: Device, size: _Size, socket: Path) -> Row:
    """Whole chunks, and the last one from its middle on."""
    stream, chunk = device.stream(), size.segment // BLOCK
    shape = (size.layers, size.segments * chunk, size.page)
    contents = random_bytes(int(np.prod(shape)), 2)
    expected = np.zeros(shape, np.uint8)
    source, target = (filled(stream, shape, torch.int8, each) for each in (contents, np.zeros_like(contents)))

    def tables(whole: Any) -> list[list[PageTable]]:
        layers = [PageTable(layer, size.page) for layer in whole.unbind(0)]
        return [layers[:count] for count in size.groups]

    out_cache, into_cache = PageCache(tables(source), chunk), PageCache(tables(target), chunk)
    layout = OpaqueLayout(
        model_id="gpu",
        weights_digest="random",
        engine="gpu",
        cache=f"pages of {size.page} bytes",
        shards=1,
        shard_bytes=out_cache.shard_bytes,
        segment_tokens=size.segment,
    )
    parts = [
        Part(at, at % len(size.groups), 0, tuple(range(at * chunk, (at + 1) * chunk))) for at in range(size.segments)
    ]
    loaded = [*parts[:-1], parts[-1]._replace(skip=chunk // 2, blocks=parts[-1].blocks[chunk // 2 :])]
    for part in loaded:
        for layer in range(size.groups[part.group]):
            expected[layer, part.blocks] = contents.reshape(shape)[layer, part.blocks]
    out, into = DeviceCopy(out_cache, device), DeviceCopy(into_cache, device)

    def fill(index: int, slot: NDArray[np.uint8]) -> None:
        out.to_slot(slot, parts[index])

    with Pool.connect(socket, layout, deadlines=PATIENT) as pool:
        keys = pool.opaque_keys([(part.group, part.segment.to_bytes(32, "big")) for part in parts])
        started = time.perf_counter()
        pool.store_all(keys, fill, patience=30.0)
        seconds = [time.perf_counter() - started]
        with pool.match(keys, MatchOptions(independent=True)) as lease:
            for _ in range(2):
                started = time.perf_counter()
                moved = sum(map(into.from_slot, lease.fetch(), loaded))
                into.finish()
                seconds.append(time.perf_counter() - started)
    right = np.array_equal(bytes_of(stream, target), expected.ravel())
    return _row("opaque, two groups", right, moved, seconds)


def _row(name: str, right: bool, nbytes: int, seconds: list[float]) -> Row:
    figures = ("store_gb_s", "first_load_gb_s", "load_gb_s")
    return Row(name, right, {figure: nbytes / each / 1e9 for figure, each in zip(figures, seconds, strict=True)})
