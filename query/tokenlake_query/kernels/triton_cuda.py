"""Attention on a GPU over segments in its memory, read through a table of their addresses.

Flash-decoding: each program takes a block of rows, a KV head and some of the segments, keeps a running softmax, and
writes a partial result. The partial results are then merged. Triton's interpreter runs the same code on a CPU, with
`TRITON_INTERPRET=1` in the environment when this module is imported.
"""

# ruff: noqa: N803  constants of a Triton kernel are upper case

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tokenlake.attention import AttentionShape, Partial, Stored
from tokenlake.attention.torch_merge import Tensor, merge_stacked
from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_query.kernels.base import Kernel, Slot

__all__ = ["TritonKernel"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK_ROWS = 64
SMALLEST = 16
"""Least number of query rows, tokens and columns of a block that Triton's matrix product `tl.dot` accepts."""
PROGRAMS_PER_PROCESSOR = 4
"""Triton programs that are launched per multiprocessor of the GPU; fewer where there are too few segments."""


class TritonKernel(Kernel):
    """The kernel for a GPU. Slots are uint8 tensors on `device`. The partial results are tensors that torch allocates
    for each call."""

    def __init__(self, layout: Layout, shape: AttentionShape, device: str = "cuda") -> None:
        """`layout`: of the segments that the kernel reads; `shape`: of the attention; `device`: the torch device of the
        slots. Raises LayoutRefused where the shape does not fit the layout."""
        super().__init__(layout, shape)
        self._device = torch.device(device)
        self._dtype = _DTYPES[layout.dtype]
        on_gpu = self._device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1

    def attend_there(self, queries: Tensor, slots: Sequence[Slot], layer: int) -> tuple[Tensor, Tensor]:
        """Attention as by `attend`, without its checks, for queries on the device in the layout's dtype. `out` and
        `lse` are on the device too. They are computed asynchronously in the device's stream; the caller must hold the
        leases on the segments until that is done."""
        shape, count = self.shape, len(queries)
        folded = queries.view(count, shape.kv_heads, shape.group, shape.key_dim).transpose(0, 1).contiguous()
        addresses = torch.tensor([slot.data_ptr() for slot in slots], dtype=torch.int64).to(self._device)
        out, lse = merge_stacked(*self._launch(folded.view(shape.kv_heads, -1, shape.key_dim), addresses, layer))
        out = out.view(shape.kv_heads, count, shape.group, shape.value_dim).transpose(0, 1)
        lse = lse.view(shape.kv_heads, count, shape.group).transpose(0, 1)
        return out.reshape(count, shape.q_heads, -1), lse.reshape(count, shape.q_heads)

    def _attend(self, queries: Stored, slots: Sequence[Slot], layer: int) -> Partial:
        there = torch.from_numpy(queries.copy()).view(self._dtype).to(self._device)
        out, lse = self.attend_there(there, slots, layer)
        return Partial(out.cpu().numpy(), lse.cpu().numpy())

    def _check(self, slot: Slot) -> None:
        if (
            slot.dtype != torch.uint8
            or slot.dim() != 1
            or not slot.is_contiguous()
            or len(slot) < self.slots.nbytes
            or slot.device.type != self._device.type
        ):
            raise LayoutRefused(
                f"a slot is {slot.dtype} of {tuple(slot.shape)} on {slot.device}; expected {self.slots.nbytes} "
                f"contiguous uint8 on {self._device}"
            )

    def _launch(self, query: Tensor, addresses: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Compute partial results: each covers a part (split) of the segments. `query`: `[kv head, row, key dim]`;
        `addresses`: those of the slots. Returns `out` `[split, kv head, row, value dim]` and `lse` `[split, kv head,
        row]`."""
        shape, slots = self.shape, self.slots
        rows, segments = query.shape[1], len(addresses)
        block = min(BLOCK_ROWS, max(SMALLEST, triton.next_power_of_2(rows)))
        blocks = triton.cdiv(rows, block)
        wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * self._processors, blocks * shape.kv_heads)
        per_split = triton.cdiv(segments, min(segments, wanted))
        splits = triton.cdiv(segments, per_split)
        out = torch.empty(splits, shape.kv_heads, rows, shape.value_dim, device=self._device)
        lse = torch.empty(splits, shape.kv_heads, rows, device=self._device)
        keys, values = slots.places(layer)
        # The columns of a block are a power of two. Key rows are read as two blocks, `main` and `rest`, so that 576
        # columns take 512 and 64 and not 1,024.
        main = max(SMALLEST, 1 << (shape.key_dim.bit_length() - 1))
        rest = max(0, shape.key_dim - main)
        _attend_split[(blocks, shape.kv_heads, splits)](
            query,
            addresses,
            out,
            lse,
            rows,
            segments,
            per_split,
            shape.scale * math.log2(math.e),
            keys.offset,
            values.offset,
            keys.strides[0],
            keys.strides[1],
            keys.strides[2],
            values.strides[0],
            values.strides[1],
            values.strides[2],
            HEADS=slots.heads,
            TOKENS=slots.tokens,
            KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            MAIN=main,
            REST=max(SMALLEST, triton.next_power_of_2(rest)) if rest else 0,
            VALUES=max(SMALLEST, triton.next_power_of_2(shape.value_dim)),
            BLOCK_ROWS=block,
            # A multiprocessor's fast memory has room for fewer tokens per block where key rows are wide.
            BLOCK_TOKENS=16 if shape.key_dim > 256 else 64,
        )
        return out, lse


@triton.jit  # type: ignore[untyped-decorator]
def _attend_split(  # type: ignore[no-untyped-def]
    query,
    addresses,
    out,
    lse,
    rows,
    segments,
    per_split,
    scale,
    key_offset,
    value_offset,
    key_group,
    key_head,
    key_token,
    value_group,
    value_head,
    value_token,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> Any:
    """One Triton program: attention of a block of query rows over some of the segments. Offsets and strides are in
    elements. `scale` includes the factor log2(e), because the program computes exp(x) as 2 ** (x * log2(e))."""
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    split = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    a_row = row < rows
    main = tl.arange(0, MAIN)
    column = tl.arange(0, VALUES)
    token = tl.arange(0, BLOCK_TOKENS)
    element = query.dtype.element_ty
    query_row = query + (head * rows + row).to(tl.int64)[:, None] * KEY_DIM
    q = tl.load(query_row + main[None, :], mask=a_row[:, None] & (main < KEY_DIM)[None, :], other=0.0)
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        q_rest = tl.load(query_row + rest[None, :], mask=a_row[:, None] & (rest < KEY_DIM)[None, :], other=0.0)
    in_keys = key_offset + (head // HEADS).to(tl.int64) * key_group + (head % HEADS) * key_head
    in_values = value_offset + (head // HEADS).to(tl.int64) * value_group + (head % HEADS) * value_head
    greatest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, VALUES], tl.float32)
    for segment in range(split * per_split, tl.minimum((split + 1) * per_split, segments)):
        slot = tl.load(addresses + segment).to(tl.pointer_type(element))
        for first in range(0, TOKENS, BLOCK_TOKENS):
            a_token = first + token < TOKENS
            key_row = slot + in_keys + (first + token)[None, :] * key_token
            k = tl.load(key_row + main[:, None], mask=a_token[None, :] & (main < KEY_DIM)[:, None], other=0.0)
            logits = tl.dot(q, k, input_precision="ieee")
            if REST > 0:
                k = tl.load(key_row + rest[:, None], mask=a_token[None, :] & (rest < KEY_DIM)[:, None], other=0.0)
                logits += tl.dot(q_rest, k, input_precision="ieee")
            logits = tl.where(a_token[None, :], logits * scale, float("-inf"))
            highest = tl.maximum(greatest, tl.max(logits, 1))
            weights = tl.exp2(logits - highest[:, None])
            fade = tl.exp2(greatest - highest)
            total = total * fade + tl.sum(weights, 1)
            value_row = slot + in_values + (first + token)[:, None] * value_token
            v = tl.load(value_row + column[None, :], mask=a_token[:, None] & (column < VALUE_DIM)[None, :], other=0.0)
            acc = acc * fade[:, None] + tl.dot(weights.to(element), v, input_precision="ieee")
            greatest = highest
    at = (split * kv_heads + head).to(tl.int64) * rows + row
    tl.store(
        out + at[:, None] * VALUE_DIM + column[None, :],
        acc / total[:, None],
        mask=a_row[:, None] & (column < VALUE_DIM)[None, :],
    )
    # The factor ln 2 converts the logarithm to base 2 into the natural one.
    tl.store(lse + at, (greatest + tl.log2(total)) * 0.6931471805599453, mask=a_row)
