"""The rates of GPUs from their data sheets, and constants fitted to published measurements of one request at a time.

`docs/simulation.md` lists these measurements beside the fitted model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenlake.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Gpu:
    """Rates of one type of GPU in bytes and flops per second, and fitted times in seconds. Efficiencies are the share
    of the data sheet's rate that is reached."""

    name: str
    memory_bytes: float
    memory_rate: float
    flops: float
    """Peak rate of matrix products in bfloat16, in flops per second, without sparsity."""
    fp8_flops: float
    """Peak rate of matrix products in FP8, in flops per second, without sparsity; equal to `flops` where the GPU has no
    FP8."""
    link_rate: float
    """Bytes per second over the GPU's NVLinks, in one direction."""
    network_rate: float
    """Bytes per second over the GPU's own network adapter, in one direction."""
    host_rate: float
    """Bytes per second between the GPU and the memory of its host (PCIe), in one direction."""

    compute_efficiency: float
    fp8_efficiency: float
    memory_efficiency: float
    link_efficiency: float = 0.7
    network_efficiency: float = 0.8
    host_efficiency: float = 0.8
    layer_s: float = 47e-6
    """Seconds per layer of a forward pass that neither memory accesses nor arithmetic explain: kernel launches,
    normalisation, sampling."""
    mixture_factor: float = 2.0
    """Factor by which `layer_s` is multiplied for a layer with routed experts."""
    reduce_s: float = 9e-6
    """Seconds of one all-reduce in addition to the transfer of its bytes."""


_HOPPER: Final = {"flops": 989e12, "fp8_flops": 1979e12, "link_rate": 450e9, "network_rate": 50e9, "host_rate": 63e9}

GPUS: Final[dict[str, Gpu]] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100-80g",
            memory_bytes=80e9,
            memory_rate=2.039e12,
            flops=312e12,
            fp8_flops=312e12,
            link_rate=300e9,
            network_rate=25e9,
            host_rate=31.5e9,
            compute_efficiency=0.65,
            fp8_efficiency=0.65,
            memory_efficiency=0.80,
        ),
        Gpu(
            name="h100",
            memory_bytes=80e9,
            memory_rate=3.35e12,
            compute_efficiency=0.62,
            fp8_efficiency=0.52,
            memory_efficiency=0.80,
            **_HOPPER,
        ),
        Gpu(
            name="h200",
            memory_bytes=141e9,
            memory_rate=4.8e12,
            compute_efficiency=0.62,
            fp8_efficiency=0.52,
            memory_efficiency=0.80,
            **_HOPPER,
        ),
        Gpu(
            name="b200",
            memory_bytes=180e9,
            memory_rate=8.0e12,
            flops=2250e12,
            fp8_flops=4500e12,
            link_rate=900e9,
            network_rate=50e9,
            host_rate=63e9,
            compute_efficiency=0.62,
            fp8_efficiency=0.52,
            memory_efficiency=0.80,
        ),
        Gpu(
            name="l40s",
            memory_bytes=48e9,
            memory_rate=0.864e12,
            flops=362e12,
            fp8_flops=733e12,
            link_rate=31.5e9,
            network_rate=25e9,
            host_rate=31.5e9,
            compute_efficiency=0.62,
            fp8_efficiency=0.52,
            memory_efficiency=0.80,
        ),
        Gpu(
            name="mi300x",
            memory_bytes=192e9,
            memory_rate=5.3e12,
            flops=1307e12,
            fp8_flops=2615e12,
            link_rate=448e9,
            network_rate=50e9,
            host_rate=63e9,
            compute_efficiency=0.40,
            fp8_efficiency=0.34,
            memory_efficiency=0.80,
        ),
    )
}
"""The known GPUs by name: SXM or OAM boards, and the L40S, whose GPUs are connected by PCIe alone. Those of which no
measurement was found have the efficiencies of the H100 (`docs/simulation.md`)."""
_SHORT: Final = {"a100": "a100-80g"}


def gpus_named(text: str) -> tuple[Gpu, int | None]:
    """The GPU of a name, and the number of them that it names: `h100`, `H100x4`. Raises ConfigurationError for a name
    that is not in `GPUS`."""
    name, times, number = text.lower().rpartition("x")
    if not (times and number.isdecimal() and int(number)) or text.lower() in GPUS:
        name, number = text.lower(), ""
    gpu = GPUS.get(_SHORT.get(name, name))
    if gpu is None:
        raise ConfigurationError("gpu", text, f"{', '.join(GPUS)}, or several of one as H100x4")
    return gpu, int(number) if number else None
