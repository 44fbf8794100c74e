"""The kernel for GPUs against the reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.query.test_kernels import ARRANGEMENTS, GROUPED, LAYER, PLACES, Cached, changed, draw_queries
from tokenlake.attention import AttentionShape, Partial, Stored
from tokenlake.errors import LayoutRefused
from tokenlake_query.kernels import Kernel

torch = pytest.importorskip("torch")
triton = find_spec("triton")
pytestmark = pytest.mark.rest
needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed: pip install triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16's bits as whole numbers.
DTYPES = ["float32", "float16", "bfloat16"] if DEVICE == "cuda" else ["float32", "float16"]


class FromHost:
    """Gives the kernel under test the slots as tensors on its device."""

    def __init__(self, kernel: Kernel) -> None:
        self.shape = kernel.shape
        self._kernel = kernel

    def attend(self, queries: Stored, slots: list[NDArray[np.uint8]], layer: int) -> Partial:
        """Attention by the kernel under test over copies of the slots on its device; see `Kernel`."""
        return self._kernel.attend(queries, [torch.from_numpy(slot.copy()).to(DEVICE) for slot in slots], layer)


def kernel_of(layout: Any, heads: int, processors: int = 2) -> Any:
    from tokenlake_query.kernels.triton_cuda import TritonKernel

    kernel = TritonKernel(layout, AttentionShape.of(layout, heads), DEVICE)
    kernel.processors = processors
    return FromHost(kernel)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_arrangement_of_heads(arrangement: str, dtype: str) -> None:
    layout, heads = ARRANGEMENTS[arrangement]
    layout = msgspec.structs.replace(layout, dtype=dtype)
    kernel: Any = kernel_of(layout, heads)
    for places in ("scattered", "one"):
        Cached(layout, PLACES[places]).check(kernel, draw_queries(layout, 3, heads))


@needs_triton
@pytest.mark.parametrize("processors", [1, 2, 100])
def test_any_number_of_splits_and_of_rows(processors: int) -> None:
    """By `processors`, one program takes all segments, or each takes some and the last one fewer, or each takes one.
    The rows fill one block, and a part of a second one."""
    layout = msgspec.structs.replace(GROUPED, kv_heads=1)
    for count in (1, 40):
        Cached(layout, PLACES["scattered"]).check(kernel_of(layout, 2, processors), draw_queries(layout, count, 2))


@needs_triton
@pytest.mark.parametrize("processors", [1, 4, 50])
def test_splits_begin_inside_segments(processors: int) -> None:
    """Segments of several blocks: 150 tokens, of which the last block has 22."""
    layout = changed(kv_heads=1, segment_tokens=150)
    Cached(layout, [3, 0]).check(kernel_of(layout, 4, processors), draw_queries(layout, 2, 4))


@needs_triton
@pytest.mark.parametrize(("queries", "dtype"), [(1, "float32"), (16, "float16")])
def test_the_widths_of_mla(queries: int, dtype: str) -> None:
    layout = changed(kv_heads=1, key_dim=576, value_dim=512, attention="latent", dtype=dtype, segment_tokens=20)
    Cached(layout, [2, 0, 1]).check(kernel_of(layout, 16), draw_queries(layout, queries, 16))


@needs_triton
def test_the_page_table_is_copied_once_per_list_of_slots() -> None:
    from tokenlake_query.kernels.triton_cuda import TritonKernel

    kernel = TritonKernel(GROUPED, AttentionShape.of(GROUPED, 32), DEVICE)
    slots = [torch.from_numpy(slot.copy()).to(DEVICE) for slot in Cached(GROUPED, [0, 1]).slots]
    pages = kernel.page_table(slots)
    assert (pages * 16).tolist() == [slot.data_ptr() for slot in slots]
    assert kernel.page_table(list(slots)) is pages
    assert kernel.page_table(slots[:1]) is not pages


@needs_triton
def test_a_slot_of_the_host_is_refused() -> None:
    from tokenlake_query.kernels.triton_cuda import TritonKernel

    kernel = TritonKernel(GROUPED, AttentionShape.of(GROUPED, 32), DEVICE)
    slot = torch.from_numpy(Cached(GROUPED, [0]).slots[0].copy()).to(DEVICE)
    wrongs = [slot[:-1], slot[::2], slot.view(torch.int16), torch.cat([slot, slot])[8:]]
    if DEVICE == "cuda":
        wrongs.append(slot.cpu())
    for wrong in wrongs:
        with pytest.raises(LayoutRefused, match=f"expected 15360 contiguous uint8 on {DEVICE}"):
            kernel.attend(draw_queries(GROUPED, 1, 32), [wrong], LAYER)
