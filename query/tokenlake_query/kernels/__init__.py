"""Attention kernels, and the choice of one by the device on which the segments lie."""

from __future__ import annotations

from importlib.util import find_spec

from tokenlake.attention import AttentionShape
from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake_query.kernels.base import Kernel, Slot

__all__ = ["Kernel", "Slot", "kernel_for"]


def kernel_for(layout: Layout, shape: AttentionShape, device: str = "cpu") -> Kernel:
    """The kernel for segments on `device`: "cpu", or "cuda" with or without a number.

    Raises LayoutRefused where the shape does not fit the layout, ConfigurationError for an unknown device and for
    "cuda" without Triton.
    """
    kind = device.partition(":")[0]
    if kind == "cpu":
        from tokenlake_query.kernels.torch_cpu import TorchKernel

        return TorchKernel(layout, shape)
    if kind != "cuda":
        raise ConfigurationError("device", device, "one of cpu, cuda")
    if find_spec("triton") is None:
        raise ConfigurationError("device", device, "triton: pip install triton")
    from tokenlake_query.kernels.triton_cuda import TritonKernel

    return TritonKernel(layout, shape, device)
