"""torch's fused attention for CPUs, over segments in place.

The kernel is the one behind `scaled_dot_product_attention`, called by its own name because only so it returns the
log-sum-exp. What it does not check, and this file therefore sees to:

- the last stride of each input is 1, else the result is wrong in silence; other strides are free, 0 too;
- no input is empty, else the process dies of SIGFPE;
- queries, keys and values have as many columns.

Query heads that share a KV head are folded into its rows: nine times faster for one query in bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from tokenlake.attention import AttentionShape, Partial, Place, Stored
from tokenlake.attention.runs import EvenRun, even_runs
from tokenlake.errors import LayoutRefused
from tokenlake.layout import DTYPE_BYTES, Layout
from tokenlake_query.kernels.base import Kernel, Slot
from tokenlake_query.kernels.torch_merge import RunningMerge, Tensor, merge_first

__all__ = ["TorchKernel"]

GATHER_ROWS = 128
"""From so many rows per KV head on, keys and values are first gathered in a scratch buffer: copying a token costs as
much as some twenty rows, while partial results of so many rows outgrow the cache and are merged at the speed of memory.
Measured: docs/results/attention.md."""
SCRATCH_BYTES = 32 << 20
PARTS_BYTES = 4 << 20
"""Partial results of one call; bounds how many segments it reads."""
ONE_THREAD = 1 << 18
"""Results of up to so many elements are merged by one thread: it takes no longer, and does not wait for others, which
on a busy machine takes milliseconds."""

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchKernel(Kernel):
    """Evenly spaced slots are one call, the segments its batch dimension. Holds a scratch buffer of `SCRATCH_BYTES`, or
    of one segment's layer where that is larger, once it was needed."""

    def __init__(self, layout: Layout, shape: AttentionShape) -> None:
        """See `Kernel`."""
        super().__init__(layout, shape)
        self._dtype = _DTYPES[layout.dtype]
        self._size = DTYPE_BYTES[layout.dtype]
        self._width = max(shape.key_dim, shape.value_dim)
        """Columns that the kernel is given; of latent rows all, of which the first are the output."""
        self._padded = shape.key_dim != shape.value_dim and not shape.latent
        self._scratch: tuple[Tensor, Tensor] | None = None
        self._workers = ThreadPoolExecutor(torch.get_num_threads(), "attention", _compute_alone)
        """Started when first needed; they end with the kernel."""

    def _attend(self, queries: Stored, slots: Sequence[Slot], layer: int) -> Partial:
        runs = even_runs([self._address(slot) for slot in slots])
        query = self._fold(queries)
        if self._padded or query.shape[2] >= GATHER_ROWS:
            total = _merged(self._over_gathered(query, runs, layer))
        else:
            total = self._in_place(query, runs, layer)
        return self._unfold(total, len(queries))

    def _address(self, slot: Slot) -> int:
        address = int(slot.__array_interface__["data"][0])
        if address % self._size:
            raise LayoutRefused(f"a slot begins at {address}, between two elements of {self.slots.dtype}")
        return address

    def _fold(self, queries: Stored) -> Tensor:
        """`[query, head, dim]` to `[group, head in group, query x its query heads, width]`, contiguous, a copy."""
        count, shape = len(queries), self.shape
        folded = np.zeros((shape.kv_heads, count, shape.group, self._width), queries.dtype)
        by_head = queries.reshape(count, shape.kv_heads, shape.group, shape.key_dim)
        folded[..., : shape.key_dim] = by_head.swapaxes(0, 1)
        return torch.from_numpy(folded).view(self._dtype).view(self.slots.groups, self.slots.heads, -1, self._width)

    def _unfold(self, total: RunningMerge, count: int) -> Partial:
        shape = self.shape
        out = total.out.reshape(shape.kv_heads, count, shape.group, -1)[..., : shape.value_dim].transpose(0, 1)
        lse = total.lse.reshape(shape.kv_heads, count, shape.group).transpose(0, 1)
        return Partial(
            out.reshape(count, shape.q_heads, -1).numpy(), lse.reshape(count, shape.q_heads).contiguous().numpy()
        )

    def _fuse(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _fused(query, keys, values, 0.0, False, scale=self.shape.scale)
        return out, lse

    def _in_place(self, query: Tensor, runs: Sequence[EvenRun], layer: int) -> RunningMerge:
        """One call is spread over threads by torch. Of several, each thread takes some: they wait for each other once,
        not in every call."""
        pieces = list(_pieces(runs, max(1, PARTS_BYTES // (query.numel() * 4))))
        threads = min(torch.get_num_threads(), len(pieces))
        if threads == 1:
            return _merged(self._parts(query, pieces, layer))
        shares = [pieces[first::threads] for first in range(threads)]
        others = [self._workers.submit(self._share, query, share, layer) for share in shares[1:]]
        with _one_thread():
            total = self._share(query, shares[0], layer)
            for other in others:
                part = other.result()
                total.add(part.out, part.lse)
        return total

    def _share(self, query: Tensor, pieces: Sequence[EvenRun], layer: int) -> RunningMerge:
        return _merged(self._parts(query, pieces, layer))

    def _parts(self, query: Tensor, pieces: Iterable[EvenRun], layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A part per piece of a run: `[group, head, row, width]`."""
        key_place, value_place = self.slots.places(layer)
        for piece in pieces:
            keys = self._tensor(piece, key_place)
            values = keys if self.shape.latent else self._tensor(piece, value_place)
            # Head groups lie apart as segments do, heads in a group otherwise: one call per head of all groups.
            by_head = [
                self._fuse(query[:, head].expand(piece.length, -1, -1, -1), keys[:, :, head], values[:, :, head])
                for head in range(self.slots.heads)
            ]
            with _one_thread():
                merged = [merge_first(out, lse) for out, lse in by_head]
                if len(merged) == 1:
                    out, lse = merged[0]
                    part = out.unsqueeze(1), lse.unsqueeze(1)
                else:
                    part = torch.stack([out for out, _ in merged], 1), torch.stack([lse for _, lse in merged], 1)
            yield part

    def _over_gathered(self, query: Tensor, runs: Sequence[EvenRun], layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A part per filled scratch buffer: `[group, head, row, width]`."""
        key_place, value_place = self.slots.places(layer)
        keys, values = self._buffers()
        tokens, filled = self.slots.tokens, 0

        def part() -> tuple[Tensor, Tensor]:
            upto = filled * tokens
            out, lse = self._fuse(query, keys[:, :, :upto], values[:, :, :upto])
            return out.float(), lse

        room = keys.shape[2] // tokens
        for piece in _pieces(runs, room):
            if filled + piece.length > room:
                yield part()
                filled = 0
            self._gather(keys, filled, self._tensor(piece, key_place))
            if not self.shape.latent:
                self._gather(values, filled, self._tensor(piece, value_place))
            filled += piece.length
        yield part()

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """`[group, head, token, width]` each; columns that no key or value has are 0 and stay so."""
        if self._scratch is None:
            slots = self.slots
            per_segment = 2 * slots.groups * slots.heads * slots.tokens * self._width * self._size
            tokens = max(1, SCRATCH_BYTES // per_segment) * slots.tokens
            keys = torch.zeros(slots.groups, slots.heads, tokens, self._width, dtype=self._dtype)
            self._scratch = keys, keys if self.shape.latent else torch.zeros_like(keys)
        return self._scratch

    def _gather(self, buffer: Tensor, filled: int, segments: Tensor) -> None:
        """`segments` `[segment, group, head, token, dim]` into `buffer`, behind as many as are there."""
        count, tokens, dim = segments.shape[0], segments.shape[3], segments.shape[4]
        into = buffer[:, :, filled * tokens : (filled + count) * tokens, :dim]
        into.unflatten(2, (count, tokens)).copy_(segments.permute(1, 2, 0, 3, 4))

    def _tensor(self, run: EvenRun, place: Place) -> Tensor:
        """`[segment, group, head, token, dim]`. It spans what lies between the slots too, which may be anybody's or not
        even mapped; its strides touch the slots alone. Nothing is written through it."""
        step = run.step // self._size
        elements = (run.length - 1) * step + place.end - place.offset
        memory = (ctypes.c_uint8 * (elements * self._size)).from_address(run.start + place.offset * self._size)
        flat = torch.frombuffer(memory, dtype=self._dtype)
        return flat.as_strided((run.length, *place.shape), (step, *place.strides))


def _merged(parts: Iterator[tuple[Tensor, Tensor]]) -> RunningMerge:
    total = RunningMerge(*next(parts))
    for out, lse in parts:
        with _one_thread(out.numel() <= ONE_THREAD):
            total.add(out, lse)
    return total


def _compute_alone() -> None:
    """In a thread: torch spreads none of its work over others. A thread takes the number set last by any when it first
    asks for it, and keeps its own from then on."""
    torch.get_num_threads()
    torch.set_num_threads(1)


@contextmanager
def _one_thread(alone: bool = True) -> Iterator[None]:
    """What torch does within is not spread over threads; costs under a microsecond."""
    threads = torch.get_num_threads()
    if alone:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _pieces(runs: Iterable[EvenRun], most: int) -> Iterator[EvenRun]:
    """The runs, none longer than `most`."""
    for start, step, length in runs:
        for first in range(0, length, most):
            yield EvenRun(start + first * step, step, min(most, length - first))
