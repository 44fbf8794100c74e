"""Copies segments between slots of the arena and the cache of a model.

The cache is given per layer as a pair (keys [heads, tokens, key dim], values [heads, tokens, value dim]) of tensors of
the layout's dtype, whose last dimension is contiguous. Layers in host memory are copied in place. A segment for layers
in the memory of a device goes over the bus as a whole, and is copied into the layers there, while the next segment is
on the bus::

    stream 0 | bus: segment 0 | scatter |         | bus: segment 2 | ...
    stream 1 |                | bus: segment 1    | scatter |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.layout import Layout
from tokenlake_client.engines.common.slots import (
    SLOT_DTYPES,
    LayerPair,
    layer_elements,
    sides_of,
    slot_whole,
    stacked,
)
from tokenlake_client.engines.devices.base import Device
from tokenlake_client.engines.devices.cuda import CudaDevice
from tokenlake_client.engines.devices.staging import Staging

__all__ = ["LayerPair", "LayerRun", "SegmentCopier", "SegmentCopy"]


class SegmentCopy:
    """Copies segments between slots and one cache. `write` may be called in several threads at once; on a device each
    has its own stream and buffer."""

    def __init__(self, runs: Sequence[LayerRun], layers: Sequence[LayerPair], segment_tokens: int) -> None:
        self._segment_tokens = segment_tokens
        self._parts = [(run, _stacks(layers[run.layers])) for run in runs]

    def read(self, segments: Sequence[NDArray[np.uint8]], start: int) -> None:
        """Copy `segments`, which may be read-only, into tokens [start, start + len(segments) * segment_tokens). To be
        called in the engine's thread: operations that the engine has queued may still use the memory of the cache, and
        the copies follow them. When the call returns or raises, the copies have ended."""
        with ExitStack() as ending:
            for run, _ in self._parts:
                run.follow_engine(ending)
            for index, segment in enumerate(segments):
                for run, stacks in self._parts:
                    run.read(segment, stacks, start + index * self._segment_tokens, index)

    def write(self, slot: NDArray[np.uint8], start: int) -> None:
        """Fill `slot` with tokens [start, start + segment_tokens). When the call returns or raises, the copy has
        ended."""
        for run, stacks in self._parts:
            run.write(slot, stacks, start)

    def computed(self) -> Callable[[], None]:
        """To be called in the engine's thread. Returns a function that another thread calls before its first `write` of
        tokens that the engine has queued to be computed by now."""
        waits = [staging.computed() for run, _ in self._parts for staging in run.stagings[:1]]

        def wait() -> None:
            for each in waits:
                each()

        return wait


class SegmentCopier:
    """The streams and buffers of an engine's copies. `bind` is for the engine's thread."""

    def __init__(self, device_of: Callable[[Any], Device | None] | None = None) -> None:
        """`device_of`: a function from torch's device of a layer to its driver, None for memory of the host (default:
        a GPU's driver for each GPU)."""
        self._device_of = device_of or _gpu
        self._for: tuple[Layout, list[Any]] | None = None
        """The layout and the layers' devices that `_runs` are for."""
        self._runs: list[LayerRun] = []

    def bind(self, layout: Layout, layers: Sequence[LayerPair]) -> SegmentCopy:
        """The copier of one cache, which keeps references to the tensors of `layers`: those of all layers, or of none,
        with which it copies nothing. Raises ValueError for another number of layers."""
        if not layers:
            return SegmentCopy((), (), layout.segment_tokens)
        if len(layers) != layout.layers:
            raise ValueError(f"a cache of {len(layers)} layers; expected {layout.layers}")
        devices = [keys.device for keys, _ in layers]
        if self._for != (layout, devices):
            self._runs, first = [], 0
            for device, same in groupby(devices):
                stop = first + len(list(same))
                self._runs.append(LayerRun(layout, slice(first, stop), self._device_of(device)))
                first = stop
            self._for = layout, devices
        return SegmentCopy(self._runs, layers, layout.segment_tokens)


_Stacks = tuple[list[Any], list[Any]]
"""The keys and the values of consecutive layers, each as tensors [layer, heads, tokens, dim] that follow each other:
layers that share an allocation are copied by one operation."""


class LayerRun:
    """Consecutive layers in the memory of one device."""

    def __init__(self, layout: Layout, layers: slice, device: Device | None) -> None:
        self.layers = layers
        self._layout = layout
        dtype, elements = SLOT_DTYPES[layout.dtype], layer_elements(layout)
        count = layers.stop - layers.start
        self._range = slice(layers.start * elements * dtype.itemsize, layers.stop * elements * dtype.itemsize)
        """The bytes of these layers in each head group of a slot."""
        self._whole = count == layout.layers
        shape = (layout.shards, count * elements)
        self.stagings = [] if device is None else [Staging(device, shape, dtype) for _ in range(2)]
        """Two streams and buffers for each thread; empty in memory of the host."""

    def follow_engine(self, ending: ExitStack) -> None:
        """Let the copies of this thread that follow begin behind the operations that the engine has queued so far, and
        end before `ending` does."""
        for staging in self.stagings:
            ending.callback(staging.finish)
            staging.computed()()

    def read(self, segment: NDArray[np.uint8], stacks: _Stacks, start: int, turn: int) -> None:
        """Copy the layers of `segment` into `stacks`; on a device the copy is complete after `Staging.finish`. `turn`:
        the number of earlier calls since then."""
        if not self.stagings:
            _scatter(self._sides(segment), stacks, start)
            return
        staging = self.stagings[turn % len(self.stagings)]
        with staging.work() as (stream, buffer):
            for part, target in self._pieces(segment, buffer):
                staging.to_device(target, part)
            stream.run(lambda: _scatter(sides_of(buffer, self._layout), stacks, start))

    def write(self, slot: NDArray[np.uint8], stacks: _Stacks, start: int) -> None:
        """Copy the layers from `stacks` into `slot`. The copy is complete on return."""
        if not self.stagings:
            _gather(self._sides(slot), stacks, start)
            return
        staging = self.stagings[0]
        with staging.work() as (stream, buffer):
            stream.run(lambda: _gather(sides_of(buffer, self._layout), stacks, start))
            for part, source in self._pieces(slot, buffer):
                staging.to_host(part, source)
        staging.finish()

    def _sides(self, slot: NDArray[np.uint8]) -> LayerPair:
        keys, values = slot_whole(slot, self._layout)
        return keys[:, self.layers], values[:, self.layers]

    def _pieces(self, slot: NDArray[np.uint8], buffer: Any) -> list[tuple[NDArray[np.uint8], Any]]:
        """The contiguous parts of `slot` that hold these layers, each with its part of `buffer`: the whole slot where
        these are all layers, else one part for each head group. Raises ValueError for a slot of another size."""
        if slot.nbytes != self._layout.segment_bytes:
            raise ValueError(f"slot has {slot.nbytes} bytes; expected {self._layout.segment_bytes}")
        if self._whole:
            return [(slot, buffer)]
        groups = slot.reshape(self._layout.shards, -1)
        return [(group[self._range], buffer[index]) for index, group in enumerate(groups)]


def _gpu(device: Any) -> Device | None:
    return CudaDevice(device) if device.type == "cuda" else None


def _stacks(layers: Sequence[LayerPair]) -> _Stacks:
    return stacked([keys for keys, _ in layers]), stacked([values for _, values in layers])


def _scatter(sides: LayerPair, stacks: _Stacks, start: int) -> None:
    for mine, theirs in _pairs(sides, stacks, start):
        theirs.copy_(mine)


def _gather(sides: LayerPair, stacks: _Stacks, start: int) -> None:
    for mine, theirs in _pairs(sides, stacks, start):
        mine.copy_(theirs)


def _pairs(sides: LayerPair, stacks: _Stacks, start: int) -> Iterator[tuple[Any, Any]]:
    """The parts of a segment and those of the cache, from its token `start` on: pairs of views [group, layer, head in
    group, token, dim]. `sides`: the segment's keys and values, in this shape."""
    for side, tensors in zip(sides, stacks, strict=True):
        groups, _, heads, tokens, _ = side.shape
        first = 0
        for tensor in tensors:
            stop = first + tensor.shape[0]
            theirs = tensor[:, :, start : start + tokens].unflatten(1, (groups, heads)).transpose(0, 1)
            yield _wide(side[:, first:stop], theirs)
            first = stop


def _wide(mine: Any, theirs: Any) -> tuple[Any, Any]:
    """The same memory as elements of eight bytes, where rows have whole ones: GPUs copy memory that is not contiguous
    element by element."""
    for tensor in (mine, theirs):
        places = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
        if tensor.stride(-1) != 1 or any(place * tensor.element_size() % 8 for place in places):
            return mine, theirs
    return mine.view(torch.int64), theirs.view(torch.int64)
