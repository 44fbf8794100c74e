"""The contents of a device's memory, for checks on any `Device`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake_client.engines.devices.base import Stream


def random_bytes(nbytes: int, seed: int) -> NDArray[np.uint8]:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def filled(stream: Stream, shape: tuple[int, ...], dtype: Any, contents: NDArray[np.uint8]) -> Any:
    """A tensor of the device with these bytes."""
    tensor = stream.empty(shape, dtype)
    stream.to_device(tensor, contents)
    stream.synchronize()
    return tensor


def bytes_of(stream: Stream, tensor: Any) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor of the device."""
    contents = np.empty(tensor.numel() * tensor.element_size(), np.uint8)
    stream.to_host(contents, tensor)
    stream.synchronize()
    return contents
