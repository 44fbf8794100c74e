"""The kernel for GPUs against the reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.query.test_kernels import ARRANGEMENTS, GROUPED, LAYER, PLACES, Cached, draw_queries
from tokenlake.attention import AttentionShape, Partial, Stored
from tokenlake.errors import ConfigurationError, LayoutRefused
from tokenlake_query.kernels import Kernel, kernel_for

torch = pytest.importorskip("torch")
triton = find_spec("triton")
needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed: pip install triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16's bits as whole numbers.
DTYPES = ["float32", "float16", "bfloat16"] if DEVICE == "cuda" else ["float32", "float16"]

if triton is not None and DEVICE == "cpu":
    # triton reads this variable when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"


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
def test_a_slot_of_the_host_is_refused() -> None:
    from tokenlake_query.kernels.triton_cuda import TritonKernel

    kernel = TritonKernel(GROUPED, AttentionShape.of(GROUPED, 32), DEVICE)
    slot = torch.from_numpy(Cached(GROUPED, [0]).slots[0].copy()).to(DEVICE)
    wrongs = [slot[:-1], slot[::2], slot.view(torch.int16)]
    if DEVICE == "cuda":
        wrongs.append(slot.cpu())
    for wrong in wrongs:
        with pytest.raises(LayoutRefused, match=f"expected 15360 contiguous uint8 on {DEVICE}"):
            kernel.attend(draw_queries(GROUPED, 1, 32), [wrong], LAYER)


def test_unknown_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape.of(GROUPED, 32)
    with pytest.raises(ConfigurationError, match="setting 'device' is 'tpu'; expected one of cpu, cuda"):
        kernel_for(GROUPED, shape, "tpu")
    monkeypatch.setattr("tokenlake_query.kernels.find_spec", lambda name: None if name == "triton" else True)
    with pytest.raises(ConfigurationError, match="'cuda:1'.*pip install 'tokenlake\\[query\\]' triton"):
        kernel_for(GROUPED, shape, "cuda:1")
