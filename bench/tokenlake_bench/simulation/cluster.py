"""A simulated pool: nodes with the rules of a daemon, and an engine at each node."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from tokenlake.core import NodeCore, events
from tokenlake.core.context import CoreConfig
from tokenlake.directory.ring_record import RingRecord
from tokenlake_bench.balance import WINDOW_S, SendLog
from tokenlake_bench.live_client import WINDOW
from tokenlake_bench.simulation.arrivals import Arrival
from tokenlake_bench.simulation.cold import ColdContent
from tokenlake_bench.simulation.engine import RequestOutcome, SimulatedEngine
from tokenlake_bench.simulation.network import Network
from tokenlake_bench.simulation.node import SimNode
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.sizing import disk_bytes, pool_size
from tokenlake_bench.turns import ClockedTurns
from tokenlake_testing.clock import Clock

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
        joining: int = 0,
        cold: ColdContent | None = None,
    ) -> None:
        """`finished` is called with the outcome of each finished request; `engine` makes the engine of each node;
        `joining`: maximum number of nodes that join later (`add`); `cold`: the content of the cold tier, None for an
        empty one of the size of the options."""
        self.options = options
        self.size = pool_size(options.nodes, options.capacity_tokens, options.layout)
        self.clock = Clock()
        if cold is None and options.cold_tokens:
            nbytes = options.cold_tokens // options.segment_tokens * options.layout.segment_bytes
            cold = ColdContent(nbytes, options.cold_latency_s, options.cold_rate)
        self.cold = cold
        self._most = options.nodes + joining
        self.network = Network(options.link, self._most)
        names = [f"n{index:04}" for index in range(options.nodes)]
        self.record = RingRecord.of(dict.fromkeys(names, self.size.memory))
        """The ring record, as the membership stores it."""
        cores = [self._core(name) for name in names]
        self.sent = SendLog(self._most)
        """Bytes that nodes sent to others, in seconds of the workload."""
        self.nodes = [self._node(index, core) for index, core in enumerate(cores)]
        """All nodes that ever were, by index."""
        self.serving = list(range(options.nodes))
        """Indices of the nodes that are members and do not drain: they get the requests."""
        for node in self.nodes:
            node.connect(self.nodes)
            node.start()
        for node in self.nodes:
            for other in self.nodes:
                if other is not node:
                    node.deliver(events.PeerUp(other.name, 1))
        window = self.size.window(WINDOW)
        self._engine: Callable[[SimNode], SimulatedEngine] = lambda node: engine(node, options, window, finished)
        self.engines = [self._engine(node) for node in self.nodes]
        self.routing = 0
        """Number of requests that have arrived and that no engine has been given yet."""

    def _core(self, name: str) -> NodeCore:
        rules = {"gossip_s": GOSSIP_S, **self.options.rules}
        return NodeCore(CoreConfig(name, 1, self.record, 1, self.size.memory, **rules))

    def _node(self, index: int, core: NodeCore) -> SimNode:
        options, size = self.options, self.size
        disk = disk_bytes(options.disk_tokens // options.nodes, size.layout)
        node = SimNode(index, self._most, core, self.clock, self.network, self._log, disk, self.cold)
        node.drained = lambda: self._leave(node)
        node.read_ring = lambda: self._follow(node)
        return node

    def _log(self, node: int, segments: int) -> None:
        self.sent.add(self.clock.now - BEGINS_S, node, segments * self.size.layout.segment_bytes)

    # -- changes of the ring

    def add(self, spread_s: float = 1.0) -> int:
        """Start another node, which joins. The others hear of it one after the other within `spread_s`. Returns its
        index."""
        index = len(self.nodes)
        name = f"n{index:04}"
        self._change(self.record.with_member(name, self.size.memory), spread_s)
        node = self._node(index, self._core(name))
        self.nodes.append(node)
        for each in self.nodes:
            each.connect(self.nodes)
        node.start()
        self.engines.append(self._engine(node))
        self.serving.append(index)
        return index

    def drain(self, index: int, spread_s: float = 1.0) -> None:
        """A node gets no more requests and begins to drain; it leaves when it has drained."""
        self.serving.remove(index)
        self._change(self.record.draining(self.nodes[index].name), spread_s)

    def _change(self, record: RingRecord, spread_s: float) -> None:
        self.record = record
        present = [node for node in self.nodes if not node.driver.stopped]
        for place, node in enumerate(present):
            self.clock.after(spread_s * place / len(present), self._follow, node)

    def _follow(self, node: SimNode) -> None:
        """`node` reads the membership: its rules follow, then its connections."""
        if node.driver.stopped or node.core.record.epoch >= self.record.epoch:
            return
        before = node.core.record.members
        node.deliver(events.RingChanged(self.record))
        for other in self.nodes:
            if other is node:
                continue
            if other.name in before and not node.knows(other.name) and other.knows(node.name):
                other.deliver(events.PeerDown(node.name, 1))
            if other.name not in before and node.knows(other.name) and other.knows(node.name):
                node.deliver(events.PeerUp(other.name, 1))
                other.deliver(events.PeerUp(node.name, 1))

    def _leave(self, node: SimNode) -> None:
        """A node that has drained leaves the record, and ends when its last request has."""
        if self.engines[node.index].open:
            self.clock.after(1.0, self._leave, node)
            return
        self._change(self.record.without(node.name), 1.0)
        node.driver.stop()
        for other in self.nodes:
            if other.knows(node.name):
                other.deliver(events.PeerDown(node.name, 1))

    def run(
        self,
        arrivals: Sequence[Arrival],
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
                send(self.serving[index % len(self.serving)])
            else:
                route(index, arrival, send)

        turns = ClockedTurns(arrivals, self.clock, arrive, BEGINS_S)
        turns.start()
        while self.clock.now < turns.last_s + settle_s and not (turns.over and self.idle()):
            self.clock.run_until(self.clock.now + 1.0)

    def idle(self) -> bool:
        """Whether no request is under way and no node waits for another."""
        under_way = self.routing or any(engine.open for engine in self.engines)
        return not under_way and all(node.core.idle() for node in self.nodes if not node.driver.stopped)

    def check_integrity(self) -> None:
        """Check the state of every node's rules. Raises AssertionError when it is inconsistent."""
        for node in self.nodes:
            node.core.check_integrity()
