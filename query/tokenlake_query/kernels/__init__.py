"""Kernels by device."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from tokenlake.attention import AttentionShape
from tokenlake.layout import Layout
from tokenlake_query.kernels.base import Kernel

__all__ = ["Kernel", "kernel_for"]

log = logging.getLogger(__name__)


def kernel_for(layout: Layout, shape: AttentionShape) -> Kernel:
    """The fastest kernel for memory of the host: torch's fused one, or numpy's where torch is not installed.

    (Segments on a GPU: `triton_cuda`.) Raises LayoutRefused where the shape is not of the layout.
    """
    if find_spec("torch") is None:
        from tokenlake_query.kernels.numpy_cpu import NumpyKernel

        log.warning("torch is not installed, numpy computes attention, slowly: pip install 'tokenlake[query]'")
        return NumpyKernel(layout, shape)
    from tokenlake_query.kernels.torch_cpu import TorchKernel

    return TorchKernel(layout, shape)
