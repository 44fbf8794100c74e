"""N simulated nodes with an engine each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenlake.core import NodeCore, events
from tokenlake.core.context import CoreConfig
from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake.wire import peer
from tokenlake_bench.balance import WINDOW_S
from tokenlake_bench.simulation.arrivals import Arrival
from tokenlake_bench.simulation.clock import Clock
from tokenlake_bench.simulation.engine import Engine, Served
from tokenlake_bench.simulation.late_load import LateLoad
from tokenlake_bench.simulation.meter import Meter
from tokenlake_bench.simulation.network import Network, NetworkShape
from tokenlake_bench.simulation.node import SimNode
from tokenlake_bench.sizing import pool_size

__all__ = ["SETTLE_S", "Cluster", "EngineMaker", "Route", "SimulationOptions", "serving_layout"]

BEGINS_S = 10.0
"""Of the clock, when the workload begins: the nodes know each other by then."""
GOSSIP_S = 1.0
"""Four times that of a daemon: where requests are few, reports would be most of what happens."""
SETTLE_S = 60.0
"""At most, for what is still under way after the last request."""
EngineMaker = Callable[[SimNode, int, Callable[[Served], None]], Engine]
"""Of a node, with how many segments it may read at a time, and what is called with each request that is done."""
Route = Callable[[int, Arrival], int]
"""(number of a request, request) to a node."""


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """`capacity_tokens` is that of the whole pool. `rules`: fields of `CoreConfig`. `load_delay_s`: how old the load is
    that nodes report to each other; 0: as it is. `prefill_tokens_per_s`: 0: engines compute in no time. `layout`: that
    of the segments, None for that of `serving_layout`."""

    nodes: int
    capacity_tokens: int
    segment_tokens: int = 512
    layout: Layout | None = None
    seed: int = 0
    network: NetworkShape = field(default_factory=NetworkShape)
    rules: Mapping[str, Any] = field(default_factory=dict)
    load_delay_s: float = 0.0
    prefill_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("load_delay_s", "prefill_tokens_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigurationError(name, getattr(self, name), "a finite number, at least 0")
        for name in self.rules:
            if name not in CoreConfig.__struct_fields__:
                raise ConfigurationError("rules", name, f"one of {', '.join(CoreConfig.__struct_fields__)}")


def serving_layout(segment_tokens: int) -> Layout:
    """That of Llama-3-8B in bfloat16: 64 MiB for 512 tokens."""
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


class Cluster:
    """Deterministic: equal options and arrivals give equal runs."""

    def __init__(
        self,
        options: SimulationOptions,
        finished: Callable[[Served], None],
        engine: EngineMaker = Engine,
    ) -> None:
        """`finished` is called with each request that is done. `engine` makes that of a node."""
        self.options = options
        layout = options.layout or serving_layout(options.segment_tokens)
        self.size = pool_size(options.nodes, options.capacity_tokens, layout)
        self.clock = Clock()
        self.network = Network(options.network, options.nodes)
        self.meter = Meter(options.nodes, self.size.layout.segment_bytes, BEGINS_S)
        self.messages: Counter[type] = Counter()
        """Between nodes, so far, by type."""
        self._late = LateLoad(options.load_delay_s, options.nodes) if options.load_delay_s else None
        names = [f"n{index:04}" for index in range(options.nodes)]
        members = dict.fromkeys(names, self.size.memory)
        rules = {"gossip_s": GOSSIP_S, **options.rules}
        self.nodes = [
            SimNode(self, index, NodeCore(CoreConfig(name, 1, members, 1, self.size.memory, **rules)))
            for index, name in enumerate(names)
        ]
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            for other in self.nodes:
                if other is not node:
                    node.deliver(events.PeerUp(other.name, 1))
        share = self.nodes[0].core.config.cached_share
        # What is fetched has to fit among the cached copies.
        window = int(share * self.size.node_segments)
        self.engines = [engine(node, window, finished) for node in self.nodes]

    @property
    def now_s(self) -> float:
        """Time of the workload."""
        return self.clock.now - BEGINS_S

    def on_the_wire(self, sender: int, message: peer.PeerMessage) -> peer.PeerMessage:
        """A frame as it arrives."""
        self.messages[type(message)] += 1
        return message if self._late is None else self._late.pass_on(self.clock.now, sender, message)

    def run(
        self,
        arrivals: Iterable[Arrival],
        look: Callable[[], None] = lambda: None,
        route: Route | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        """Serve the requests at their times; then let what is under way end, at most for `settle_s`.

        `look` is called at the end of each window of the workload. `route`: in turn at each node without it.
        """

        def closed(at_s: float) -> None:
            look()
            self.clock.at(BEGINS_S + at_s + WINDOW_S, closed, at_s + WINDOW_S)

        self.clock.at(BEGINS_S + WINDOW_S, closed, WINDOW_S)
        for index, arrival in enumerate(arrivals):
            self.clock.run_until(BEGINS_S + arrival.at_s)
            chosen = index % len(self.engines) if route is None else route(index, arrival)
            self.engines[chosen].serve(arrival)
        until = self.clock.now + settle_s
        while self.clock.now < until and not self.idle():
            self.clock.run_until(self.clock.now + 1.0)

    def idle(self) -> bool:
        """Nobody waits for anything."""
        return not any(engine.open for engine in self.engines) and all(node.core.idle() for node in self.nodes)

    def check_integrity(self) -> None:
        """AssertionError when some core's state does not add up."""
        for node in self.nodes:
            node.core.check_integrity()
