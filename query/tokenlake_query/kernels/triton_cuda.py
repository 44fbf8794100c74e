"""Attention on a GPU over segments in its memory, read through a page table of their addresses.

Flash-decoding: each program takes a block of rows, a KV head and a split of the tokens, which may begin and end inside
a segment; it keeps a running softmax and writes a partial result. A second launch merges them, where there is more than
one split. `triton_launch` has the sizes and their arithmetic. Triton's interpreter runs the same code on a CPU, with
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
from tokenlake.attention.torch_merge import Tensor
from tokenlake.errors import LayoutRefused
from tokenlake.layout import DTYPE_BYTES, Layout
from tokenlake_query.kernels.base import Kernel, Slot
from tokenlake_query.kernels.triton_launch import SMALLEST, Launch, launch_for, splits_for

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ALIGNMENT = 16
"""Bytes that a thread loads at once. Slots begin at multiples of it, and a page table counts in it."""
MERGED_COLUMNS, MERGED_PARTS = 128, 32
"""Columns of a program that merges, and the partial results that it loads at a time."""


class TritonKernel(Kernel):
    """The kernel for a GPU. Slots are uint8 tensors on `device`. The results are tensors that torch allocates for each
    call."""

    def __init__(self, layout: Layout, shape: AttentionShape, device: str = "cuda") -> None:
        """`layout`: of the segments that the kernel reads; `shape`: of the attention; `device`: the torch device of the
        slots. Raises LayoutRefused where the shape does not fit the layout."""
        super().__init__(layout, shape)
        self._device = torch.device(device)
        self._dtype = _DTYPES[layout.dtype]
        self._size = DTYPE_BYTES[layout.dtype]
        on_gpu = self._device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        self.launch: Launch | None = None
        """The sizes of every launch, in place of those of `launch_for`."""
        self._addresses: list[int] = []
        self._pages: Tensor = None

    def page_table(self, slots: Sequence[Slot]) -> Tensor:
        """The page table of `slots`: their addresses / `ALIGNMENT`, int64, on the device. The host does not wait for
        the copy, which is queued in the current stream. For the same slots as at the last call the same table is
        returned."""
        addresses = [slot.data_ptr() for slot in slots]
        if addresses != self._addresses:
            pages = torch.tensor(addresses, dtype=torch.int64) // ALIGNMENT
            if self._device.type == "cuda":
                # torch does not reuse the page-locked memory before the copy has ended.
                pages = pages.pin_memory().to(self._device, non_blocking=True)
            self._addresses, self._pages = addresses, pages
        return self._pages

    def attend_there(self, queries: Tensor, pages: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Attention as by `attend`, without its checks. `queries`: contiguous, on the device, in the layout's dtype;
        `pages`: the `page_table` of the slots. None of both is empty. `out` and `lse` are on the device. They are
        computed in the current stream, without a copy or a wait, so that a CUDA graph may capture the call. Until that
        is done the caller keeps `pages` and the leases on the segments."""
        shape, heads = self.shape, len(queries) * self.shape.q_heads
        rows = len(queries) * shape.group
        launch = self.launch or launch_for(shape, self._size, rows)
        blocks = len(pages) * triton.cdiv(self.slots.tokens, launch.tokens)
        row_blocks = triton.cdiv(rows, launch.rows)
        splits = splits_for(blocks, row_blocks * shape.kv_heads, launch, self.processors)
        out = torch.empty(splits, heads, shape.value_dim, device=self._device)
        lse = torch.empty(splits, heads, device=self._device)
        keys, values = self.slots.places(layer)
        _attend_split[(row_blocks, shape.kv_heads, splits)](
            queries, pages, out, lse, rows, blocks, keys.offset, values.offset, **self._constants(launch)
        )
        if splits > 1:
            parts, of_parts = out, lse
            out, lse = torch.empty_like(parts[0]), torch.empty_like(of_parts[0])
            columns = min(MERGED_COLUMNS, _width(shape.value_dim))
            _merge[(heads, triton.cdiv(shape.value_dim, columns))](
                parts, of_parts, out, lse, splits, heads, shape.value_dim, COLUMNS=columns, PARTS=MERGED_PARTS
            )
        return out.view(-1, shape.q_heads, shape.value_dim), lse.view(-1, shape.q_heads)

    def _attend(self, queries: Stored, slots: Sequence[Slot], layer: int) -> Partial:
        there = torch.from_numpy(queries.copy()).view(self._dtype).to(self._device)
        out, lse = self.attend_there(there, self.page_table(slots), layer)
        return Partial(out.cpu().numpy(), lse.cpu().numpy())

    def _check(self, slot: Slot) -> None:
        if (
            slot.dtype != torch.uint8
            or slot.dim() != 1
            or not slot.is_contiguous()
            or len(slot) < self.slots.nbytes
            or slot.device.type != self._device.type
            or slot.data_ptr() % ALIGNMENT
        ):
            raise LayoutRefused(
                f"a slot is {slot.dtype} of {tuple(slot.shape)} on {slot.device} at {slot.data_ptr()}; expected "
                f"{self.slots.nbytes} contiguous uint8 on {self._device} at a multiple of {ALIGNMENT}"
            )

    def _constants(self, launch: Launch) -> dict[str, Any]:
        """The constants of the kernel `_attend_split`, and the options of its launch."""
        shape, slots = self.shape, self.slots
        # The columns of a block are a power of two. Key rows are read as two blocks, `main` and `rest`: 576 columns
        # take 512 and 64, and not 1,024. The values of latent attention are `main`.
        main = shape.value_dim if shape.latent else 1 << (shape.key_dim.bit_length() - 1)
        rest = shape.key_dim - main
        return {
            "SCALE": shape.scale * math.log2(math.e),
            "LATENT": shape.latent,
            "GROUP": shape.group,
            "HEADS": slots.heads,
            "SHARD": slots.layers * slots.heads * slots.tokens * slots.row,
            "TOKENS": slots.tokens,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
            "MAIN_DIM": main,
            "MAIN": _width(main),
            "REST": _width(rest) if rest else 0,
            "VALUES": _width(shape.value_dim),
            "ROWS": launch.rows,
            "BLOCK": launch.tokens,
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }


def _width(columns: int) -> int:
    """The columns of a block that has room for `columns`."""
    return max(SMALLEST, int(triton.next_power_of_2(columns)))


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    at,
    row,
    column,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    STOP: tl.constexpr,
    FULL: tl.constexpr,
) -> Any:
    """Load a block of a matrix `[ROWS, DIM]` at `at`: rows `row`, columns FIRST + `column` up to STOP. Elements outside
    are 0. FULL: none is outside; the load has no mask then."""
    places = at + row[:, None] * DIM + (FIRST + column)[None, :]
    if FULL:
        return tl.load(places)
    else:
        return tl.load(places, mask=(row < ROWS)[:, None] & (FIRST + column < STOP)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows", "blocks"])  # type: ignore[untyped-decorator]
def _attend_split(  # type: ignore[no-untyped-def]
    queries,
    pages,
    out,
    lse,
    rows,
    blocks,
    key_offset,
    value_offset,
    SCALE: tl.constexpr,
    LATENT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SHARD: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """One Triton program: attention of ROWS query rows of one KV head over one split of the blocks. Offsets are in
    elements. SCALE includes the factor log2(e), because the program computes exp(x) as 2 ** (x * log2(e))."""
    head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    a_row = row < rows
    # The place of the row in `queries`, and of its result, `[query, query head]`.
    place = (row // GROUP * heads + head * GROUP + row % GROUP).to(tl.int64)
    main = tl.arange(0, MAIN)
    column = tl.arange(0, VALUES)
    element = queries.dtype.element_ty
    query_row = queries + place[:, None] * KEY_DIM
    q = tl.load(query_row + main[None, :], mask=a_row[:, None] & (main < MAIN_DIM)[None, :], other=0.0)
    if REST > 0:
        rest = tl.arange(0, REST)
        in_rest = (MAIN_DIM + rest < KEY_DIM)[None, :]
        q_rest = tl.load(query_row + MAIN_DIM + rest[None, :], mask=a_row[:, None] & in_rest, other=0.0)
    shard = (head // HEADS).to(tl.int64) * SHARD
    in_keys = key_offset + shard + head % HEADS * (TOKENS * KEY_DIM)
    in_values = value_offset + shard + head % HEADS * (TOKENS * VALUE_DIM)
    per_segment: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    even: tl.constexpr = TOKENS % BLOCK == 0
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    # One loop, and not one per segment, so that the loads of a segment begin while the one before is computed.
    start = blocks * split // splits
    page = tl.load(pages + start // per_segment)
    for block in range(start, blocks * (split + 1) // splits):
        # Without the hint the compiler loads two bytes at a time, and not asynchronously.
        slot = tl.multiple_of((page * 16).to(tl.pointer_type(element)), 16)
        # An address that is loaded one block ahead takes no stage of the pipeline.
        page = tl.load(pages + tl.minimum(block + 1, blocks - 1) // per_segment)
        token = block % per_segment * BLOCK + tl.arange(0, BLOCK)
        k = _tile(slot + in_keys, token, main, TOKENS, KEY_DIM, 0, MAIN_DIM, even and MAIN_DIM == MAIN)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = _tile(
                slot + in_keys, token, rest, TOKENS, KEY_DIM, MAIN_DIM, KEY_DIM, even and MAIN_DIM + REST == KEY_DIM
            )
            logits = tl.dot(q_rest, tl.trans(k_rest), logits, input_precision="ieee")
        logits = logits * SCALE
        if not even:
            logits = tl.where((token < TOKENS)[None, :], logits, float("-inf"))
        highest = tl.maximum(greatest, tl.max(logits, 1))
        weights = tl.exp2(logits - highest[:, None])
        fade = tl.exp2(greatest - highest)
        total = total * fade + tl.sum(weights, 1)
        if LATENT:
            v = k
        else:
            v = _tile(slot + in_values, token, column, TOKENS, VALUE_DIM, 0, VALUE_DIM, even and VALUE_DIM == VALUES)
        acc = tl.dot(weights.to(element), v, acc * fade[:, None], input_precision="ieee")
        greatest = highest
    at = split.to(tl.int64) * (rows // GROUP * heads) + place
    tl.store(
        out + at[:, None] * VALUE_DIM + column[None, :],
        acc / total[:, None],
        mask=a_row[:, None] & (column < VALUE_DIM)[None, :],
    )
    # The factor ln 2 converts the logarithm to base 2 into the natural one.
    tl.store(lse + at, (greatest + tl.log2(total)) * 0.6931471805599453, mask=a_row)


@triton.jit(do_not_specialize=["parts", "rows"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    outs, lses, out, lse, parts, rows, DIM: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
) -> Any:
    """One Triton program: merge the `parts` partial results of one row, for COLUMNS columns. `outs`:
    `[part, row, DIM]`; `lses`: `[part, row]`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    greatest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in tl.range(0, parts, PARTS, num_stages=2):
        part = first + tl.arange(0, PARTS)
        at = part * rows + row
        each = tl.load(lses + at, mask=part < parts, other=float("-inf"))
        values = tl.load(
            outs + at[:, None] * DIM + column[None, :],
            mask=(part < parts)[:, None] & (column < DIM)[None, :],
            other=0.0,
        )
        highest = tl.maximum(greatest, tl.max(each, 0))
        weights = tl.exp2((each - highest) * 1.4426950408889634)
        fade = tl.exp2((greatest - highest) * 1.4426950408889634)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade + tl.sum(values * weights[:, None], 0)
        greatest = highest
    tl.store(out + row * DIM + column, acc / total, mask=column < DIM)
    # All programs of the row write the same number.
    tl.store(lse + row, greatest + tl.log2(total) * 0.6931471805599453)
