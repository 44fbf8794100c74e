"""Options of a simulated run of the pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenlake.core.context import CoreConfig
from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake_bench.simulation.disk import DiskShape
from tokenlake_bench.simulation.network import NetworkShape


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Options of a simulation. Raises `ConfigurationError` for a `prefill_tokens_per_s` that is negative or not finite,
    and for a name in `rules` that is no field of `CoreConfig`."""

    nodes: int
    capacity_tokens: int
    """Number of tokens that the whole pool holds."""
    disk_tokens: int = 0
    """Number of tokens that the disks of all nodes hold; 0: no node has a disk."""
    disk: DiskShape = field(default_factory=DiskShape)
    segment_tokens: int = 512
    layout: Layout | None = None
    """The layout of the segments; None: that of Llama-3-8B (`serving_layout`)."""
    seed: int = 0
    network: NetworkShape = field(default_factory=NetworkShape)
    rules: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the rules' `CoreConfig` that differ from their defaults."""
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens that an engine computes per second; 0: engines compute in no time."""

    def __post_init__(self) -> None:
        if not 0 <= self.prefill_tokens_per_s < float("inf"):
            raise ConfigurationError("prefill_tokens_per_s", self.prefill_tokens_per_s, "a finite number, at least 0")
        for name in self.rules:
            if name not in CoreConfig.__struct_fields__:
                raise ConfigurationError("rules", name, f"one of {', '.join(CoreConfig.__struct_fields__)}")

    @cached_property
    def segment_layout(self) -> Layout:
        """The layout of the segments, with the default filled in."""
        return self.layout or serving_layout(self.segment_tokens)


def serving_layout(segment_tokens: int) -> Layout:
    """The layout of Llama-3-8B in bfloat16: 64 MiB for 512 tokens."""
    return Layout(
        model_id="simulated",
        weights_digest="00",
        dtype="bfloat16",
        layers=32,
        kv_heads=8,
        key_dim=128,
        value_dim=128,
        position="none",
        segment_tokens=segment_tokens,
    )
