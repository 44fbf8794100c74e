"""A check on a device: its rows, and the devices that checks run on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake_client.engines.devices.base import Device, Stream
from tokenlake_client.engines.devices.cuda import CudaDevice
from tokenlake_testing.cpu_device import CpuDevice

__all__ = ["CPU", "NotRun", "Rig", "Row", "bytes_of", "device_named", "filled", "random_bytes"]

CPU: Final = "cpu"
"""The name of the device of tests, on which the checks of copies run without a GPU."""


class NotRun(Exception):
    """The check cannot run here; the message is the reason."""


class Row(msgspec.Struct, frozen=True):
    """One measurement: whether all compared bytes, values or tokens were right, and its figures."""

    name: str
    right: bool
    figures: dict[str, float] = {}


@dataclass(frozen=True)
class Rig:
    """The arguments of the checks. `small`: sizes for tests of the checks. `model`: the folder of a model for vLLM."""

    device: str
    small: bool = False
    model: Path | None = None


def device_named(name: str) -> Device:
    """The device `cpu` or `cuda:N`. Raises NotRun where there is none."""
    if name == CPU:
        return CpuDevice()
    if not torch.cuda.is_available():
        raise NotRun("no CUDA device")
    return CudaDevice(name)


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


Rows = Iterator[Row]
