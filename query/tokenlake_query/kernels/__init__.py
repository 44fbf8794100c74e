"""Attention kernels, and the choice of one by the device on which the segments lie."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec

from tokenlake.attention import AttentionShape
from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake_query.kernels.base import Kernel, Slot

__all__ = ["Kernel", "Slot", "kernel_for"]

log = logging.getLogger(__name__)


def kernel_for(layout: Layout, shape: AttentionShape, device: str = "cpu") -> Kernel:
    """The fastest kernel for segments on `device`: "cpu", or "cuda" with or without a number.

    Without torch the numpy kernel serves "cpu". Raises LayoutRefused where the shape does not fit the layout,
    ConfigurationError for an unknown device and for "cuda" without Triton.
    """
    kind = device.partition(":")[0]
    if kind not in _KERNELS:
        raise ConfigurationError("device", device, f"one of {', '.join(_KERNELS)}")
    return _KERNELS[kind](layout, shape, device)


def _for_cpu(layout: Layout, shape: AttentionShape, device: str) -> Kernel:
    if find_spec("torch") is None:
        from tokenlake_query.kernels.numpy_cpu import NumpyKernel

        log.warning("torch is not installed; numpy computes attention, which is slow: pip install 'tokenlake[query]'")
        return NumpyKernel(layout, shape)
    from tokenlake_query.kernels.torch_cpu import TorchKernel

    return TorchKernel(layout, shape)


def _for_cuda(layout: Layout, shape: AttentionShape, device: str) -> Kernel:
    if find_spec("torch") is None or find_spec("triton") is None:
        raise ConfigurationError("device", device, "torch and triton: pip install 'tokenlake[query]' triton")
    from tokenlake_query.kernels.triton_cuda import TritonKernel

    return TritonKernel(layout, shape, device)


_KERNELS: dict[str, Callable[[Layout, AttentionShape, str], Kernel]] = {"cpu": _for_cpu, "cuda": _for_cuda}
