"""The copies of a transformers engine through a `CpuDevice`, for models that compute in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.layout import Layout
from tokenlake_client.engines.transformers.segment_copy import LayerPair, SegmentCopier, SegmentCopy
from tokenlake_testing.cpu_device import CpuDevice


class CpuCopier(SegmentCopier):
    """Copies as if the layers of each cache lay in the memory of `device`. The model's own operations are no operations
    of the device's streams: they have ended when they return."""

    def __init__(self, device: CpuDevice) -> None:
        super().__init__(lambda _: device)
        self._device = device

    def bind(self, layout: Layout, layers: Sequence[LayerPair]) -> SegmentCopy:
        there = self._device.tensor
        return super().bind(layout, [(there(keys), there(values)) for keys, values in layers])
