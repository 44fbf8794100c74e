"""Measurements of attention over segments in this process's memory, compared with torch's fused kernel over one
contiguous KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.attention import AttentionShape, Partial, SlotMap, Stored, from_float32
from tokenlake.errors import TokenLakeError
from tokenlake.layout import Layout
from tokenlake.memory.region import RegionShape
from tokenlake_query.kernels import Kernel, kernel_for

Q_HEADS: Final = 32
LAYERS: Final = 2
"""Number of layers of the measured KV cache. Successive calls read different layers, so that no call finds its layer in
the processor's cache."""
PATTERN: Final = 1 << 20
"""Number of random elements with which the measured memory is filled, repeatedly."""
TOLERANCE: Final = {"float32": 1e-4, "bfloat16": 3e-2}
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


Clock = Callable[[], float]
"""A clock that returns seconds: wall time or processor time."""


@dataclass(frozen=True, slots=True)
class Cache:
    """KV cache of a model with 32 query heads and 8 KV heads of dimension 128, held twice: in slots, as the pool stores
    segments, and as contiguous tensors for torch's kernel."""

    layout: Layout
    neighbours: Sequence[NDArray[np.uint8]]
    scattered: Sequence[NDArray[np.uint8]]
    """As many slots as `neighbours`, drawn in random order from memory of which one slot in five stays unused."""
    contiguous: Sequence[tuple[Any, Any]]
    """By layer, the keys and the values of the slots `neighbours` as contiguous tensors of shape `[1, KV heads, tokens,
    dimension]`."""


class LocalCase:
    """Measurement of attention of `queries` query tokens over all tokens of a KV cache. Where the slots are in order,
    the result of the pool's kernel is compared once with that of torch's kernel."""

    bytes_formula = 0

    def __init__(self, cache: Cache, kernel: Kernel, queries: int, scattered: bool, clock: Clock) -> None:
        layout = cache.layout
        tokens = cache.contiguous[0][0].shape[2]
        self.name = f"local_{layout.dtype}_{tokens}_q{queries}{'_scattered' if scattered else ''}"
        self._cache = cache
        self._kernel = kernel
        self._clock = clock
        self._slots = cache.scattered if scattered else cache.neighbours
        drawn = np.random.default_rng(queries).standard_normal((queries, Q_HEADS, layout.key_dim), np.float32)
        self._queries = from_float32(drawn, layout.dtype)
        # The query heads that share a KV head become rows of one head, which is the fastest shape for torch's fused
        # kernel.
        folded = np.ascontiguousarray(self._queries.swapaxes(0, 1)).reshape(1, layout.kv_heads, -1, layout.key_dim)
        self._folded = torch.from_numpy(folded).view(_DTYPES[layout.dtype])
        if not scattered:
            self._compare()

    def sample(self, turn: int) -> float:
        """Compute attention once with the query engine's kernel. Returns the seconds that it took; see `Case`."""
        began = self._clock()
        self._attend(turn % LAYERS)
        return self._clock() - began

    def ceiling(self, turn: int) -> float:
        """Compute the same attention once with torch's own kernel over contiguous memory. Returns the seconds; see
        `Case`."""
        began = self._clock()
        self._fuse(turn % LAYERS)
        return self._clock() - began

    def bytes(self) -> int:
        """Returns 0, because attention over local segments sends no bytes over the network."""
        return 0

    def _attend(self, layer: int) -> Partial:
        return self._kernel.attend(self._queries, self._slots, layer)

    def _fuse(self, layer: int) -> tuple[Any, Any]:
        keys, values = self._cache.contiguous[layer]
        out, lse = _fused(self._folded, keys, values, 0.0, False, scale=self._kernel.shape.scale)
        return out, lse

    def _compare(self) -> None:
        found = self._attend(1).out.swapaxes(0, 1)
        expected = self._fuse(1)[0].float().numpy().reshape(found.shape)
        worst = float(np.abs(found - expected).max())
        if not worst <= TOLERANCE[self._cache.layout.dtype]:
            raise TokenLakeError(f"{self.name}: differs by {worst} from attention over the contiguous cache")


def local_cases(
    dtypes: Sequence[str], tokens: Sequence[int], queries: Sequence[int], clock: Clock
) -> Iterator[LocalCase]:
    """Yield a measurement for each combination of data type, cache length and number of queries. Memory holds the cache
    of one data type and length at a time. Slots in random order are measured with at most 16 query tokens, because with
    more the kernel first gathers the segments."""
    for dtype in dtypes:
        for length in tokens:
            cache = _cache(dtype, length)
            kernel = kernel_for(cache.layout, AttentionShape.of(cache.layout, Q_HEADS))
            for count in queries:
                yield LocalCase(cache, kernel, count, scattered=False, clock=clock)
                if count <= 16:
                    yield LocalCase(cache, kernel, count, scattered=True, clock=clock)


def _cache(dtype: str, tokens: int) -> Cache:
    layout = Layout(
        model_id="bench",
        weights_digest="00",
        dtype=dtype,
        layers=LAYERS,
        kv_heads=8,
        key_dim=128,
        value_dim=128,
        position="none",
    )
    segments = tokens // layout.segment_tokens
    stride = RegionShape(0, layout.segment_bytes).stride
    places = segments + -(-segments // 4)
    memory = _filled(places * stride, dtype)
    slots = [memory[place * stride :][: layout.segment_bytes] for place in range(places)]
    neighbours = slots[:segments]
    order = np.random.default_rng(segments).permutation(places)[:segments]
    return Cache(layout, neighbours, [slots[place] for place in order], _contiguous(layout, neighbours))


def _filled(nbytes: int, dtype: str) -> NDArray[np.uint8]:
    pattern: Stored = from_float32(np.random.default_rng(0).standard_normal(PATTERN, np.float32), dtype)
    memory = np.empty(nbytes // pattern.itemsize, pattern.dtype)
    for start in range(0, len(memory), PATTERN):
        part = memory[start : start + PATTERN]
        # Each repetition of the random pattern is shifted: if segments had equal bytes, the comparison would not notice
        # that a kernel read the wrong segment.
        part[:] = np.roll(pattern, start // PATTERN)[: len(part)]
    return memory.view(np.uint8)


def _contiguous(layout: Layout, slots: Sequence[NDArray[np.uint8]]) -> list[tuple[Any, Any]]:
    caches = []
    for layer in range(LAYERS):
        parts = zip(*(SlotMap.of(layout).views(slot, layer) for slot in slots), strict=True)
        joined = [np.concatenate(views, 2).reshape(1, layout.kv_heads, -1, layout.key_dim) for views in parts]
        keys, values = (torch.from_numpy(array).view(_DTYPES[layout.dtype]) for array in joined)
        caches.append((keys, values))
    return caches
