"""A simulated pool: nodes with the rules of a daemon, and an engine at each node."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial

from tokenlake.core import NodeCore, events
from tokenlake.core.context import CoreConfig
from tokenlake.ring_record import RingRecord
from tokenlake_bench.balance import WINDOW_S
from tokenlake_bench.simulation.arrivals import Arrival
from tokenlake_bench.simulation.engine import RequestOutcome, SimulatedEngine
from tokenlake_bench.simulation.meter import Meter
from tokenlake_bench.simulation.network import Network
from tokenlake_bench.simulation.node import SimNode
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.sizing import pool_size
from tokenlake_bench.turns import ClockedTurns
from tokenlake_testing.clock import Clock

__all__ = ["BEGINS_S", "SETTLE_S", "EngineMaker", "Route", "Send", "SimulatedCluster"]

BEGINS_S = 10.0
"""Time of the simulated clock at which the workload begins; before it the nodes exchange their first messages."""
GOSSIP_S = 1.0
"""Seconds between two gossip messages of a simulated node: four times a daemon's default, because with few requests
these messages would be most of the events."""
SETTLE_S = 60.0
"""Maximum number of simulated seconds for which a run goes on after the last arrival."""
EngineMaker = Callable[[SimNode, SimulationOptions, int, Callable[[RequestOutcome], None]], SimulatedEngine]
"""Function that makes the engine of a node from (node, options, maximum number of segments to read at a time, callback
for each finished request)."""
Send = Callable[[int], None]
"""Function that hands a request to the engine of the node with this index."""
Route = Callable[[int, Arrival, Send], None]
"""Function that chooses the node of a request. Arguments: number in the order of arrival, the request, and `Send`,
which the route calls once, now or later."""


class SimulatedCluster:
    """A simulated pool. Deterministic: equal options and arrivals give equal runs."""

    def __init__(
        self,
        options: SimulationOptions,
        finished: Callable[[RequestOutcome], None],
        engine: EngineMaker = SimulatedEngine,
    ) -> None:
        """`finished` is called with the outcome of each finished request; `engine` makes the engine of each node."""
        self.options = options
        self.size = pool_size(options.nodes, options.capacity_tokens, options.segment_layout)
        self.clock = Clock()
        self.network = Network(options.network, options.nodes)
        names = [f"n{index:04}" for index in range(options.nodes)]
        record = RingRecord.of(dict.fromkeys(names, self.size.memory))
        rules = {"gossip_s": GOSSIP_S, **options.rules}
        cores = [NodeCore(CoreConfig(name, 1, record, 1, self.size.memory, **rules)) for name in names]
        self.meter = Meter([core.store for core in cores], self.size.layout.segment_bytes, BEGINS_S)
        self.nodes = [
            SimNode(index, options.nodes, core, self.clock, self.network, self.meter)
            for index, core in enumerate(cores)
        ]
        for node in self.nodes:
            node.connect(self.nodes)
            node.driver.start()
        for node in self.nodes:
            for other in self.nodes:
                if other is not node:
                    node.deliver(events.PeerUp(other.name, 1))
        share = self.nodes[0].core.config.cached_share
        # Fetched segments become cached copies, so a read takes at most as many segments as a node may keep of these.
        window = int(share * self.size.node_segments)
        self.engines = [engine(node, options, window, finished) for node in self.nodes]
        self.routing = 0
        """Number of requests that have arrived and that no engine has been given yet."""

    def run(
        self,
        arrivals: Iterable[Arrival],
        window_ended: Callable[[], None] = lambda: None,
        route: Route | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        """Serve the requests when they are due, then let those under way end, for `settle_s` after the last arrival at
        the longest.

        `window_ended` is called at the end of each window of the workload. Without a `route`, requests go to the
        nodes in turn.
        """

        def ended(at_s: float) -> None:
            window_ended()
            self.clock.at(BEGINS_S + at_s + WINDOW_S, ended, at_s + WINDOW_S)

        self.clock.at(BEGINS_S + WINDOW_S, ended, WINDOW_S)
        indices = itertools.count()

        def arrive(number: int, request: Arrival, at_s: float) -> None:
            index = next(indices)
            arrival = request if request.follows is None else request.arrived(at_s)
            self.routing += 1

            def send(chosen: int) -> None:
                self.routing -= 1
                self.engines[chosen].serve(arrival, partial(turns.answered, number))

            if route is None:
                send(index % len(self.engines))
            else:
                route(index, arrival, send)

        turns = ClockedTurns(arrivals, self.clock, arrive, BEGINS_S)
        turns.start()
        while self.clock.now < turns.last_s + settle_s and not (turns.over and self.idle()):
            self.clock.run_until(self.clock.now + 1.0)

    def idle(self) -> bool:
        """Whether no request is under way and no node waits for another."""
        under_way = self.routing or any(engine.open for engine in self.engines)
        return not under_way and all(node.core.idle() for node in self.nodes)

    def check_integrity(self) -> None:
        """Check the state of every node's rules. Raises AssertionError when it is inconsistent."""
        for node in self.nodes:
            node.core.check_integrity()
