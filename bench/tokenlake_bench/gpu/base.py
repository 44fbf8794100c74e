"""A check on a device: its rows, and the devices that checks run on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch

from tokenlake_client.engines.devices.base import Device
from tokenlake_client.engines.devices.cuda import CudaDevice
from tokenlake_testing.cpu_device import CpuDevice

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
