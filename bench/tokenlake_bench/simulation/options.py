"""Options of a simulated run of the pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenlake.core.context import CoreConfig
from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake_bench.simulation.cold import LATENCY_S, RATE
from tokenlake_bench.simulation.network import Link


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Options of a simulation. Raises `ConfigurationError` for a name in `rules` that is no field of `CoreConfig`."""

    nodes: int
    capacity_tokens: int
    """Number of tokens that the whole pool holds."""
    layout: Layout
    """The layout of the segments."""
    disk_tokens: int = 0
    """Number of tokens that the disks of all nodes hold; 0: no node has a disk."""
    cold_tokens: int = 0
    """Number of tokens that the cold tier of the nodes holds; 0: there is none."""
    cold_latency_s: float = LATENCY_S
    cold_rate: float = RATE
    """Bytes per second between each node and the cold tier, in either direction."""
    seed: int = 0
    link: Link = field(default_factory=Link)
    """The connection of each node, in either direction."""
    rules: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the rules' `CoreConfig` that differ from their defaults."""

    def __post_init__(self) -> None:
        for name in self.rules:
            if name not in CoreConfig.__struct_fields__:
                raise ConfigurationError("rules", name, f"one of {', '.join(CoreConfig.__struct_fields__)}")

    @property
    def segment_tokens(self) -> int:
        """Number of tokens of a segment."""
        return self.layout.segment_tokens
