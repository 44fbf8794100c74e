"""torch's fused attention for CPUs, over segments in place.

torch's kernel is the one behind `scaled_dot_product_attention`. This module calls it by its internal name, because only
that call returns the log-sum-exp. It does not check its inputs, so this module ensures that

- the last stride of each input is 1, else the result is wrong without an error; other strides are free, also 0;
- no input is empty, else the process dies of SIGFPE;
- queries, keys and values have the same number of columns.

Query heads that share a KV head are passed as further rows of one head, which is nine times as fast for one query in
bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import zip_longest

import numpy as np
import torch

from tokenlake.attention import AttentionShape, Partial, Place, Stored
from tokenlake.attention.sequences import EvenSequence, even_sequences
from tokenlake.attention.torch_merge import RunningMerge, Tensor, merge_stacked
from tokenlake.errors import LayoutRefused
from tokenlake.layout import DTYPE_BYTES, Layout
from tokenlake_query.kernels.base import Kernel, Slot

GATHER_ROWS = 128
"""From this number of query rows per KV head on, keys and values are first copied into a contiguous scratch buffer.
Copying a token takes as long as computing some twenty rows over it. Without the copy each segment has a partial result,
and those of many rows do not fit into the processor's cache, so that memory bandwidth limits their merging. Measured:
docs/results/attention.md."""
SCRATCH_BYTES = 32 << 20
"""Bytes of keys and values that are copied into contiguous scratch memory for one call of torch's kernel."""
PARTS_BYTES = 4 << 20
"""Maximum bytes of the partial results, one per segment, of one call of torch's kernel; it limits the segments per
call."""
ONE_THREAD = 1 << 18
"""Partial results of up to this many elements are merged by one thread. Several threads would not be faster, and
waiting for them takes milliseconds on a busy machine."""

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchKernel(Kernel):
    """Computes each sequence of evenly spaced slots in one call, with the segments as batch dimension. Allocates on
    first use a scratch buffer of `SCRATCH_BYTES`, or of one segment's layer where that is larger, and keeps it."""

    def __init__(self, layout: Layout, shape: AttentionShape) -> None:
        """`layout`: of the segments that the kernel reads; `shape`: of the attention. Raises LayoutRefused where the
        shape does not fit the layout."""
        super().__init__(layout, shape)
        self._dtype = _DTYPES[layout.dtype]
        self._size = DTYPE_BYTES[layout.dtype]
        self._width = max(shape.key_dim, shape.value_dim)
        """Columns of the inputs of torch's kernel. With latent attention whole key rows are passed as values, and the
        first `value_dim` columns of the output are the result."""
        self._padded = shape.key_dim != shape.value_dim and not shape.latent
        self._scratch: tuple[Tensor, Tensor] | None = None
        self._workers = _threads()
        """The threads for several calls of torch's kernel at a time. They start on first use and end with this
        object."""

    def _attend(self, queries: Stored, slots: Sequence[Slot], layer: int) -> Partial:
        sequences = even_sequences([self._address(slot) for slot in slots])
        query = self._fold(queries)
        if self._padded or query.shape[2] >= GATHER_ROWS:
            total = _merged(self._over_gathered(query, sequences, layer))
        else:
            total = self._in_place(query, sequences, layer)
        return self._unfold(total, len(queries))

    def _address(self, slot: Slot) -> int:
        address = int(slot.__array_interface__["data"][0])
        if address % self._size:
            raise LayoutRefused(
                f"a slot begins at {address}; expected a multiple of the {self._size} bytes of {self.slots.dtype}"
            )
        return address

    def _fold(self, queries: Stored) -> Tensor:
        """Copy `queries` `[query, head, dim]` into a contiguous `[head group, KV head in group, row, width]`. Each KV
        head has one row per query and query head that reads it."""
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

    def _in_place(self, query: Tensor, sequences: Sequence[EvenSequence], layer: int) -> RunningMerge:
        """Attention of `query` over the slots of `sequences`, read where they lie. torch spreads a single call over its
        threads. Several calls are instead distributed over threads of this kernel, which wait for each other once and
        not in every call."""
        pieces = list(_pieces(sequences, max(1, PARTS_BYTES // (query.numel() * 4))))
        threads = min(torch.get_num_threads(), len(pieces))
        if threads == 1:
            return _merged(self._parts(query, pieces, layer))
        shares = [pieces[first::threads] for first in range(threads)]
        others: list[Future[RunningMerge]] = []
        try:
            for share in shares[1:]:
                others.append(self._workers.submit(self._share, query, share, layer))
        except RuntimeError:
            # No further thread can be started. The executor has queued the share all the same.
            self._workers.shutdown(cancel_futures=True)
            self._workers = _threads()
        try:
            with _one_thread():
                total = self._share(query, shares[0], layer)
                for share, other in zip_longest(shares[1:], others):
                    alone = other is None or other.cancelled()
                    part = self._share(query, share, layer) if alone else other.result()
                    total.add(part.out, part.lse)
        finally:
            # After an error too, no thread may read the slots any more.
            wait(others)
        return total

    def _share(self, query: Tensor, pieces: Sequence[EvenSequence], layer: int) -> RunningMerge:
        return _merged(self._parts(query, pieces, layer))

    def _parts(self, query: Tensor, pieces: Iterable[EvenSequence], layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Compute the attention of `query` over each of `pieces` (evenly spaced slots), and yield `out` `[group, head,
        row, width]` and `lse` for each."""
        key_place, value_place = self.slots.places(layer)
        for piece in pieces:
            keys = self._tensor(piece, key_place)
            values = keys if self.shape.latent else self._tensor(piece, value_place)
            # Heads of different groups are not evenly spaced in a slot, so that no array has all heads as one
            # dimension: each call computes one head of every group.
            by_head = [
                self._fuse(query[:, head].expand(piece.length, -1, -1, -1), keys[:, :, head], values[:, :, head])
                for head in range(self.slots.heads)
            ]
            with _one_thread():
                merged = [merge_stacked(out, lse) for out, lse in by_head]
                if len(merged) == 1:
                    out, lse = merged[0]
                    part = out.unsqueeze(1), lse.unsqueeze(1)
                else:
                    part = torch.stack([out for out, _ in merged], 1), torch.stack([lse for _, lse in merged], 1)
            yield part

    def _over_gathered(
        self, query: Tensor, sequences: Sequence[EvenSequence], layer: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Gather segments in the scratch buffer and yield `out` `[group, head, row, width]` and `lse` of the attention
        over them each time that it is full, and at the end."""
        key_place, value_place = self.slots.places(layer)
        keys, values = self._buffers()
        tokens, filled = self.slots.tokens, 0

        def part() -> tuple[Tensor, Tensor]:
            upto = filled * tokens
            out, lse = self._fuse(query, keys[:, :, :upto], values[:, :, :upto])
            return out.float(), lse

        room = keys.shape[2] // tokens
        for piece in _pieces(sequences, room):
            if filled + piece.length > room:
                yield part()
                filled = 0
            self._gather(keys, filled, self._tensor(piece, key_place))
            if not self.shape.latent:
                self._gather(values, filled, self._tensor(piece, value_place))
            filled += piece.length
        yield part()

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """Scratch buffers `[group, head, token, width]` for keys and values. The columns that pad the narrower of both
        to `width` are 0 and are never written."""
        if self._scratch is None:
            slots = self.slots
            per_segment = 2 * slots.groups * slots.heads * slots.tokens * self._width * self._size
            tokens = max(1, SCRATCH_BYTES // per_segment) * slots.tokens
            keys = torch.zeros(slots.groups, slots.heads, tokens, self._width, dtype=self._dtype)
            self._scratch = keys, keys if self.shape.latent else torch.zeros_like(keys)
        return self._scratch

    def _gather(self, buffer: Tensor, filled: int, segments: Tensor) -> None:
        """Copy `segments` `[segment, group, head, token, dim]` into `buffer`, behind the `filled` segments in it."""
        count, tokens, dim = segments.shape[0], segments.shape[3], segments.shape[4]
        into = buffer[:, :, filled * tokens : (filled + count) * tokens, :dim]
        into.unflatten(2, (count, tokens)).copy_(segments.permute(1, 2, 0, 3, 4))

    def _tensor(self, sequence: EvenSequence, place: Place) -> Tensor:
        """A read-only view `[segment, group, head, token, dim]` of the keys or of the values (`place`) in the slots of
        `sequence`. Its memory range includes the bytes between the slots, which may be unmapped; its strides skip
        them."""
        step = sequence.step // self._size
        elements = (sequence.length - 1) * step + place.end - place.offset
        memory = (ctypes.c_uint8 * (elements * self._size)).from_address(sequence.start + place.offset * self._size)
        flat = torch.frombuffer(memory, dtype=self._dtype)
        return flat.as_strided((sequence.length, *place.shape), (step, *place.strides))


def _merged(parts: Iterator[tuple[Tensor, Tensor]]) -> RunningMerge:
    total = RunningMerge(*next(parts))
    for out, lse in parts:
        with _one_thread(out.numel() <= ONE_THREAD):
            total.add(out, lse)
    return total


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "attention", _compute_alone)


def _compute_alone() -> None:
    """Make torch compute in the calling thread alone when this thread calls it. The number of threads is read before it
    is set, because the first read of a thread sets it to the number of the process."""
    torch.get_num_threads()
    torch.set_num_threads(1)


@contextmanager
def _one_thread(alone: bool = True) -> Iterator[None]:
    """Within this block torch computes in the calling thread alone, unless `alone` is False. Takes less than a
    microsecond."""
    threads = torch.get_num_threads()
    if alone:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _pieces(sequences: Iterable[EvenSequence], most: int) -> Iterator[EvenSequence]:
    """Split `sequences` of evenly spaced slots into pieces of at most `most` slots."""
    for start, step, length in sequences:
        for first in range(0, length, most):
            yield EvenSequence(start + first * step, step, min(most, length - first))
