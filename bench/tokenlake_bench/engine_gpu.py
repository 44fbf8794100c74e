"""Checks vLLM's CUDA path on a machine with a GPU: `python -m tokenlake_bench.engine_gpu`.

Blocks on the GPU, filled with random numbers, go into a real daemon's arena and back into other blocks: for each of
the layouts of FlashAttention and FlashInfer, and as opaque segments of two groups of layers. Every byte is compared,
and the rates are printed. With `--model` and vLLM's build for CUDA in this environment, the greedy tokens of a model
with and without the pool are compared too, for each of the two connectors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_bench.engine_workload import prompt
from tokenlake_bench.environment import check_interpreter
from tokenlake_client import Pool
from tokenlake_client.engines.vllm.blocks import block_views, stack_layers
from tokenlake_client.engines.vllm.cuda_copy import CudaCopy
from tokenlake_client.engines.vllm.offloading.chunks import ChunkPart
from tokenlake_client.engines.vllm.offloading.pages import CudaPages, HostPages, PageTable, chunk_bytes
from tokenlake_client.engines.vllm.ranks import rank_shards
from tokenlake_client.match import MatchOptions
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

LAYERS, HEADS, DIM, BLOCK, SEGMENT = 32, 8, 128, 16, 256
"""Dimensions of a Llama model with 8B parameters, and tokens of an engine block and of a segment: 32 MiB per segment in
bfloat16."""
SEGMENTS = 32
ORDERS = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3)}
PAGE = 2 * HEADS * DIM * BLOCK * 2
"""Bytes of a page of one layer."""
GROUPS = (LAYERS, LAYERS // 2)
"""The number of layers of each group of an opaque cache."""
GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
"""Speculation, with which vLLM's cache is opaque."""


def main() -> int:
    """The main function. Returns the exit status: 0 when all compared bytes and tokens were equal, 1 when some
    differed, 2 without a CUDA device or (with `--model`) without vLLM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: not run")
        return 2
    if arguments.model is not None:
        try:
            check_interpreter(sys.executable, "vllm")
        except ConfigurationError as error:
            print(error, file=sys.stderr)
            return 2
    equal = True
    with Cluster(1, "3GiB", "256MiB") as cluster:
        for backend in ("FLASH_ATTN", "FLASHINFER"):
            for order in ORDERS:
                layout = Layout(
                    model_id="gpu",
                    weights_digest=f"{backend} {order}",
                    dtype="bfloat16",
                    layers=LAYERS,
                    kv_heads=HEADS,
                    key_dim=DIM,
                    value_dim=DIM,
                    position="none",
                    segment_tokens=SEGMENT,
                )
                with Pool.connect(cluster.nodes[0].socket, layout) as pool:
                    equal &= _there_and_back(pool, backend, order)
        equal &= opaque_there_and_back(cluster.nodes[0].socket, "cuda")
        if arguments.model is not None:
            equal &= _tokens(arguments.model, str(cluster.nodes[0].socket))
            equal &= _tokens(arguments.model, str(cluster.nodes[0].socket), speculative_config=GUESSING)
    return 0 if equal else 1


def _cache(order: str, blocks: int) -> list[Any]:
    axes = ORDERS[order]
    logical = (blocks, HEADS, BLOCK, 2 * DIM)
    physical = tuple(logical[axis] for axis in axes)
    whole = torch.zeros((LAYERS, *physical), dtype=torch.bfloat16, device="cuda")
    return [layer.permute(*np.argsort(axes).tolist()) for layer in whole.unbind(0)]


def _there_and_back(pool: Pool, backend: str, order: str) -> bool:
    per_segment = SEGMENT // BLOCK
    count = SEGMENTS * per_segment
    source, target = _cache(order, count), _cache(order, count)
    for tensor in source:
        tensor.normal_()
    shards = rank_shards(pool.layout, 0, 1)
    out = CudaCopy(pool.layout, shards, stack_layers(source, count, block_views(backend)))
    into = CudaCopy(pool.layout, shards, stack_layers(target, count, block_views(backend)))
    keys = pool.prefix(list(range(SEGMENTS * SEGMENT))).keys
    gigabytes = SEGMENTS * pool.layout.segment_bytes / 1e9

    def fill(index: int, slot: NDArray[np.uint8]) -> None:
        out.to_slot(slot, range(index * per_segment, (index + 1) * per_segment))

    out.computed()()
    started = time.perf_counter()
    pool.store_all(keys, fill, patience=30.0)
    stored = time.perf_counter() - started
    with pool.match(keys) as lease:
        rates = []
        for _ in range(2):
            # The first load of segments into GPU blocks is timed apart from the later ones, because it also locks the
            # arena's pages for the GPU.
            started = time.perf_counter()
            for index, slot in enumerate(lease.fetch()):
                into.from_slot(slot, range(index * per_segment, (index + 1) * per_segment), 0)
            into.finish()
            rates.append(gigabytes / (time.perf_counter() - started))
    equal = all(torch.equal(ours, theirs) for ours, theirs in zip(source, target, strict=True))
    print(
        f"{backend} {order}: equal={equal}  store, checksums included {gigabytes / stored:.1f} GB/s  "
        f"load first {rates[0]:.1f} GB/s, then {rates[1]:.1f} GB/s"
    )
    return equal


def opaque_there_and_back(socket: Path, device: str, page: int = PAGE) -> bool:
    """Store blocks on `device` ("cuda" or "cpu") with random numbers as opaque segments, and load them into other
    blocks: whole chunks, and the last one from its middle on. `page`: bytes of a page of one layer. Prints the rates;
    returns whether every byte was equal."""
    size = SEGMENT // BLOCK
    kind = CudaPages if device == "cuda" else HostPages
    source, target = _page_tables(device, page), _page_tables(device, page)
    for table in target[0]:
        table.pages.zero_()
    out, into = kind(source, size), kind(target, size)
    layout = OpaqueLayout(
        model_id="gpu",
        weights_digest="random",
        engine="engine_gpu",
        cache=f"pages of {page} bytes",
        shards=1,
        shard_bytes=chunk_bytes(source, size),
        segment_tokens=SEGMENT,
    )
    parts = [ChunkPart(at, at % len(GROUPS), 0, tuple(range(at * size, (at + 1) * size))) for at in range(SEGMENTS)]
    loaded = [*parts[:-1], parts[-1]._replace(skip=size // 2, blocks=parts[-1].blocks[size // 2 :])]
    with Pool.connect(socket, layout) as pool:
        keys = pool.opaque_keys([(part.group, part.chunk.to_bytes(32, "big")) for part in parts])
        out.computed()()
        started = time.perf_counter()
        moved = 0

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            nonlocal moved
            moved += out.to_slot(slot, parts[index])

        pool.store_all(keys, fill, patience=30.0)
        rates = [moved / 1e9 / (time.perf_counter() - started)]
        with pool.match(keys, MatchOptions(independent=True)) as lease:
            into.computed()()
            for _ in range(2):
                started = time.perf_counter()
                moved = sum(into.from_slot(slot, part) for part, slot in zip(loaded, lease.fetch(), strict=True))
                rates.append(moved / 1e9 / (time.perf_counter() - started))
    equal = not any(table.pages[list(parts[-1].blocks[: size // 2])].any() for table in target[0])
    for part in loaded:
        for ours, theirs in zip(source[part.group], target[part.group], strict=True):
            equal &= torch.equal(ours.pages[list(part.blocks)], theirs.pages[list(part.blocks)])
    print(
        f"opaque, {device}: equal={equal}  store, checksums included {rates[0]:.1f} GB/s  "
        f"load first {rates[1]:.1f} GB/s, then {rates[2]:.1f} GB/s"
    )
    return equal


def _page_tables(device: str, page: int) -> list[list[PageTable]]:
    """The pages of the layers, filled with random numbers, as two groups that share them: a block belongs to one
    group at a time."""
    blocks = SEGMENTS * SEGMENT // BLOCK
    whole = torch.randint(-128, 128, (LAYERS, blocks, page), dtype=torch.int8, device=device)
    tables = [PageTable(layer, page) for layer in whole.unbind(0)]
    return [tables[:layers] for layers in GROUPS]


def _tokens(model: Path, socket: str, **arguments: Any) -> bool:
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, "kv_cache_memory_bytes": 4 << 30}
    options |= arguments
    prompts = [prompt(length, length) for length in (300, 1024, 4000)]
    with tempfile.TemporaryDirectory() as directory:
        plain = Engine(model, Path(directory, "plain.log"), **options)
        expected = plain.generate(prompts)
        plain.close()
        pooled = Engine(model, Path(directory, "pooled.log"), {"socket": socket}, **options)
        cold = pooled.generate(prompts)
        # vLLM's own connector hands the last blocks of a request to its backend in a later step.
        pooled.generate([prompt(40, 40)])
        pooled.call("flush")
        pooled.call("forget")
        warm = pooled.generate(prompts)
        hits, door = pooled.call("counts")["tokens_hit"], pooled.call("door")
        pooled.close()
    print(f"tokens, {door}: cold equal={cold == expected}  warm equal={warm == expected}  tokens from the pool {hits}")
    return cold == warm == expected and hits > 0


if __name__ == "__main__":
    sys.exit(main())
