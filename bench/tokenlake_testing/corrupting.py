"""A transformers engine that reads wrong bytes from the pool: the control of a comparison of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.layout import Layout
from tokenlake_client.engines.transformers.segment_copy import LayerPair, SegmentCopier, SegmentCopy


def corrupting(copier: SegmentCopier) -> SegmentCopier:
    """The same copier, whose caches get segments of which some bits are flipped; the numbers stay finite in the 16-bit
    types and in float32."""
    bind = copier.bind

    def bind_corrupting(layout: Layout, layers: Sequence[LayerPair]) -> SegmentCopy:
        copy: Any = bind(layout, layers)
        read = copy.read

        def read_flipped(segments: Sequence[NDArray[np.uint8]], start: int) -> None:
            read([(each.view(np.uint16) ^ np.uint16(0x0180)).view(np.uint8) for each in segments], start)

        copy.read = read_flipped
        return copy  # type: ignore[no-any-return]

    copier.bind = bind_corrupting  # type: ignore[method-assign]
    return copier
