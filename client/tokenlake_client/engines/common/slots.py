"""A slot of the arena as tensors: one segment in the order of `tokenlake.layout.Layout`.

::

    [head group][layer][K, V][head in group][token][head dim]

Where the key and value dimensions differ, K and V of a layer are two blocks of unequal size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.layout import QUANTISED_DTYPES, Layout

TORCH_DTYPES: dict[str, Any] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SLOT_DTYPES: dict[str, Any] = TORCH_DTYPES | dict.fromkeys(QUANTISED_DTYPES, torch.uint8)
"""By the layout's dtype, the dtype of the tensors over a slot. Quantised elements are bytes, as in vLLM's own cache."""

LayerPair = tuple[Any, Any]
"""Two tensors (keys, values) of a cache; of one layer unless a docstring says otherwise."""


def slot_whole(slot: NDArray[np.uint8], layout: Layout) -> LayerPair:
    """Views (K, V) of all layers of the slot, each [group, layer, head in group, token, dim]. The views do not own the
    memory: the caller must keep `slot` alive. They are writable even if `slot` is read-only, and must not be written
    then."""
    return sides_of(slot_flat(slot, layout).view(layout.shards, -1), layout)


def sides_of(elements: Any, layout: Layout) -> LayerPair:
    """Views (K, V) of a tensor [group, elements of consecutive layers] in the order of a slot, on any device, each
    [group, layer, head in group, token, dim]."""
    layers = elements.unflatten(1, (-1, layer_elements(layout)))
    keys_size = layout.heads_per_shard * layout.segment_tokens * layout.key_dim
    shape = (layout.heads_per_shard, layout.segment_tokens)
    keys = layers[:, :, :keys_size].unflatten(2, (*shape, layout.key_dim))
    return keys, layers[:, :, keys_size:].unflatten(2, (*shape, layout.value_dim))


def layer_elements(layout: Layout) -> int:
    """The number of elements of one layer in one head group of a slot."""
    return layout.heads_per_shard * layout.segment_tokens * (layout.key_dim + layout.value_dim)


def slot_flat(slot: NDArray[np.uint8], layout: Layout) -> Any:
    """The slot's memory as a flat tensor, of the dtype in `SLOT_DTYPES`. It does not own the memory, and must not be
    written if `slot` is read-only. Raises ValueError for a slot of another size."""
    if slot.nbytes != layout.segment_bytes or not slot.flags.c_contiguous:
        raise ValueError(f"slot has {slot.nbytes} bytes; expected {layout.segment_bytes} contiguous")
    return host_tensor(slot).view(SLOT_DTYPES[layout.dtype])


def host_tensor(array: NDArray[np.uint8]) -> Any:
    """The bytes of `array`, which is contiguous, as a flat tensor over the same memory. It does not own the memory, and
    must not be written if `array` is read-only."""
    # The memory is passed to torch by its address: torch would warn about a read-only array, because it has no
    # read-only tensors.
    return torch.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8)


def stacked(tensors: Sequence[Any]) -> list[Any]:
    """Views [tensor, ...] of consecutive `tensors`, in their order: tensors at equal distances in one allocation become
    one view, so that one operation copies all of them."""
    stacks: list[list[Any]] = []
    for tensor in tensors:
        stack = stacks[-1] if stacks else None
        if stack is not None and _continues(stack, tensor):
            stack.append(tensor)
        else:
            stacks.append([tensor])
    views = []
    for stack in stacks:
        head = stack[0]
        distance = stack[1].storage_offset() - head.storage_offset() if len(stack) > 1 else 0
        views.append(head.as_strided((len(stack), *head.shape), (distance, *head.stride()), head.storage_offset()))
    return views


def _continues(stack: list[Any], tensor: Any) -> bool:
    last = stack[-1]
    if tensor.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return False
    if tensor.shape != last.shape or tensor.stride() != last.stride():
        return False
    distance = tensor.storage_offset() - last.storage_offset()
    return distance > 0 and (len(stack) == 1 or distance == last.storage_offset() - stack[-2].storage_offset())
