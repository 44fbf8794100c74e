"""Simulation of the pool with engines that take time to compute: the rules of the nodes (`NodeCore`) and the engine
instances that the compared systems have, too, on one clock.

::

    arrives -> queues -> match, fetch -> instance: prefill ............. decode -> finished
           (at most `AHEAD`   (links)     takes memory   `- stores the computed segments
            read ahead)

The router knows the load of each instance and nothing of the caches.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any

from tokenlake.core import events
from tokenlake.errors import ConfigurationError
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.keys import KEY_BYTES
from tokenlake.layout import Layout
from tokenlake.memory import Kind, Segment, State
from tokenlake_bench.balance import BusyLog
from tokenlake_bench.engine_model import EngineModel
from tokenlake_bench.engine_model.models import CACHE_BYTES
from tokenlake_bench.routing.clocked import ClockedInstance
from tokenlake_bench.routing.instance import CHUNK_TOKENS, InstanceOptions, Job
from tokenlake_bench.routing.outcome import Answered, SystemRow, row_of
from tokenlake_bench.simulation.arrivals import Arrival, keys_of
from tokenlake_bench.simulation.cluster import BEGINS_S, Route, Send
from tokenlake_bench.simulation.cold import LATENCY_S, RATE, ColdContent
from tokenlake_bench.simulation.engine import TENANT, RequestOutcome, SimulatedEngine, Steps
from tokenlake_bench.simulation.network import Link
from tokenlake_bench.simulation.node import SimNode
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.simulation.run import Simulation
from tokenlake_bench.sizing import layout_of

POOL, POOL_REAL = "pool", "pool-real"
"""Names of two simulated forms of the pool. `pool`: requests under way take no memory from the pool, as in the
`-perfect` systems. `pool-real`: they take memory."""
AHEAD = 1
"""Number of requests of an instance that may have read their prefix and not begun to compute. If more read early, they
would miss segments that the requests before them are about to store."""
DRAIN_S = 86_400.0
"""Maximum number of simulated seconds for which a run goes on after the last arrival."""


def engine_layout(engine: EngineModel, segment_tokens: int) -> Layout:
    """A layout whose segments have as many bytes as those of the engine's model; its other fields have no effect."""
    model, layers = engine.model, engine.model.cache_layers
    elements = model.cache_bytes // (layers * CACHE_BYTES)
    key_dim = elements // 2
    return layout_of(model.name, segment_tokens, key_dim, elements - key_dim, layers=layers, dtype="bfloat16")


def pool_options(
    engine: EngineModel,
    *,
    nodes: int,
    capacity_tokens: int,
    segment_tokens: int,
    seed: int,
    rules: Mapping[str, Any] = MappingProxyType({}),
    disk_tokens: int = 0,
    cold_tokens: int = 0,
    cold_latency_s: float = LATENCY_S,
    cold_rate: float = RATE,
    nvlink: bool = False,
) -> SimulationOptions:
    """Options of a simulated pool with one node per engine instance, whose network adapters together, or NVLinks, are
    one connection. A node's memory is one region, so it has as many slots as an instance of the compared systems has
    cache segments."""
    return SimulationOptions(
        nodes=nodes,
        capacity_tokens=capacity_tokens,
        disk_tokens=disk_tokens,
        cold_tokens=cold_tokens,
        cold_latency_s=cold_latency_s,
        cold_rate=cold_rate,
        layout=engine_layout(engine, segment_tokens),
        seed=seed,
        link=Link(bandwidth=engine.network_rate(nvlink=nvlink)),
        rules=rules,
    )


@dataclass(slots=True, eq=False)
class _Memory:
    """The slots of the pool that one request under way takes for prompt and answer: `slots` slots, or fewer where the
    store has no more."""

    slots: int
    shared: list[Segment] = field(default_factory=list)
    """Segments of the prompt in the pool that the request has pinned."""
    own: list[Segment] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PooledRequest:
    """A request at its instance, from the beginning of its read until it is answered and stored."""

    served: RequestOutcome
    keys: bytes
    first_s: float = 0.0
    answered: bool = False
    stored: bool = False


class PooledEngine(SimulatedEngine):
    """A simulated engine at one node of the pool: each request first reads its prefix, then passes through an engine
    instance, which takes time, and then stores its segments."""

    def __init__(
        self,
        node: SimNode,
        options: SimulationOptions,
        window: int,
        finished: Callable[[RequestOutcome], None],
        run: PooledRun,
        memory_tokens: int | None = None,
    ) -> None:
        """`memory_tokens`: limit of the tokens of prompts and answers under way, if they take memory; None: those of
        the node."""
        super().__init__(node, options, window, finished)
        self._run = run
        self._requests: dict[int, PooledRequest] = {}
        """Requests that are reading or are at the instance, by number."""
        self._queue: deque[PooledRequest] = deque()
        self._ahead = 0
        """Number of requests that are reading or have read their prefix, and have not begun to compute."""
        self._memory: dict[int, _Memory] = {}
        """Slots of the pool that each request under way takes, by number of the request."""
        self.backlog = 0
        """Number of prompt tokens of the requests that have not produced their first token."""
        memory = run.node_tokens if memory_tokens is None else memory_tokens
        self._instance = ClockedInstance(
            node.clock,
            run.engine,
            InstanceOptions(
                chunk_tokens=run.chunk_tokens,
                memory_tokens=memory if run.counts_memory else None,
                segment_tokens=options.segment_tokens,
            ),
            begin=self._begin,
            first=self._first,
            finished=self._answered_all,
            ran=self._ran,
        )

    def serve(self, arrival: Arrival, answered: Callable[[], None] = lambda: None) -> None:
        self.open += 1
        self.backlog += arrival.tokens
        served = RequestOutcome(arrival, self._node.index, answered)
        self._queue.append(PooledRequest(served, keys_of(arrival.chain, self._options.seed)))
        self._read_ahead()

    def restart(self) -> None:
        """Restart the engine. The memory of the node is its daemon's and stays; requests under way go on."""

    def _in_flight_wait_s(self, served: RequestOutcome, keys: bytes) -> float:
        return 1.5 * self._run.engine.prefill_s(len(keys) // KEY_BYTES * self._options.segment_tokens)

    def _saved_s(self, served: RequestOutcome, first: int, last: int) -> float:
        size, tokens, engine = self._options.segment_tokens, served.arrival.tokens, self._run.engine
        first, last = first * size, min(last * size, tokens)
        return max(0.0, engine.prefill_s(tokens - first, first) - engine.prefill_s(max(1, tokens - last), last))

    def _read_ahead(self) -> None:
        while self._queue and self._ahead < AHEAD:
            self._ahead += 1
            request = self._queue.popleft()
            number = self._run.next_number()
            self._requests[number] = request
            self._advance(self._fetch_and_submit(number, request), None)

    def _fetch_and_submit(self, number: int, request: PooledRequest) -> Steps:
        served, began = request.served, self._clock.now
        if request.keys:
            yield from self._read(served, request.keys)
        served.read_s = self._clock.now - began
        arrival = served.arrival
        hit = served.hits * self._options.segment_tokens
        self._instance.submit(
            Job(number, arrival.tokens, max(1, arrival.output_tokens), tuple(arrival.chain.tolist()), hit)
        )

    def _begin(self, job: Job, now: float) -> None:
        self._ahead -= 1
        self._take_memory(job, self._requests[job.number])
        # The next request must not read within this call of the instance, because reading calls the node, which may
        # call back.
        self._clock.after(0.0, self._read_ahead)

    def _ran(self, from_s: float, to_s: float) -> None:
        self._run.busy.add(self._node.index, from_s - BEGINS_S, to_s - BEGINS_S)

    def _first(self, job: Job, now: float) -> None:
        request = self._requests[job.number]
        request.first_s = now
        self.backlog -= job.prompt
        self._run.first_token(request.served.arrival)
        self._clock.after(0.0, self._advance, self._store_computed(job.number, request), None)

    def _store_computed(self, number: int, request: PooledRequest) -> Steps:
        new = request.keys[request.served.hits * KEY_BYTES :]
        memory = self._memory.get(number)
        if memory is not None:
            # The computed segments now take slots of the pool as segments, so the request gives back as many slots.
            self._release(memory.own, len(new) // KEY_BYTES)
        if new:
            yield from self._store(request.served, request.keys, request.served.hits)
        if memory is not None and not request.answered:
            self._share(memory, new)
            self._hold(memory)
        request.stored = True
        self._close(number, request)

    def _answered_all(self, job: Job, now: float) -> None:
        request = self._requests[job.number]
        arrival = request.served.arrival
        self._run.answers.append(
            Answered(
                at_s=arrival.at_s,
                prompt_tokens=arrival.tokens,
                output_tokens=job.output,
                hit_tokens=request.served.hits * self._options.segment_tokens,
                remote_tokens=request.served.remote * self._options.segment_tokens,
                first_s=request.first_s - BEGINS_S,
                finished_s=now - BEGINS_S,
                engine_tokens=request.served.engine * self._options.segment_tokens,
            )
        )
        self._give_back_memory(job)
        self._run.done.append(arrival)
        self._run.answered(arrival)
        request.answered = True
        request.served.answered()
        self._close(job.number, request)

    def _close(self, number: int, request: PooledRequest) -> None:
        if request.answered and request.stored:
            del self._requests[number]
            self.open -= 1
            self._finished(request.served)

    # -- memory of requests under way

    def _take_memory(self, job: Job, request: PooledRequest) -> None:
        """Take the memory of a request that begins to compute."""
        if not self._run.counts_memory:
            return
        memory = self._memory[job.number] = _Memory(-(-(job.prompt + job.output) // self._options.segment_tokens))
        self._share(memory, request.keys[: request.served.hits * KEY_BYTES])
        self._hold(memory)

    def _give_back_memory(self, job: Job) -> None:
        """Give back the memory of a request that is answered."""
        memory = self._memory.pop(job.number, None)
        if memory is not None:
            self._release(memory.own, len(memory.own))
            self._release(memory.shared, len(memory.shared))

    def _share(self, memory: _Memory, keys: bytes) -> None:
        """Pin those of the segments that this node has, because the request computes with them."""
        index = self._node.store.index(TenantId(TENANT))
        for at in range(0, len(keys), KEY_BYTES):
            segment = index.get(SegmentKey(keys[at : at + KEY_BYTES]))
            if segment is not None and segment.state is State.READY:
                self._node.store.pin(segment)
                memory.shared.append(segment)

    def _hold(self, memory: _Memory) -> None:
        """Take slots of the pool for the part of the request that is in no segment, as many as the store gives. Each
        slot is reserved and its segment discarded at once: it is then in no index, like the slot of an evicted segment
        that a reader still pins."""
        store, now = self._node.store, self._clock.now
        slot_bytes = self._options.layout.segment_bytes
        self._release(memory.own, len(memory.own) + len(memory.shared) - memory.slots)
        while len(memory.own) + len(memory.shared) < memory.slots:
            key = SegmentKey(self._run.next_number().to_bytes(KEY_BYTES, "big"))
            segment = store.reserve(TenantId(TENANT), slot_bytes, key, Kind.CACHED, 0, now)
            if not isinstance(segment, Segment):
                break
            store.discard(segment, now)
            memory.own.append(segment)
        # The rules report evicted segments to peers when they handle their next event, whichever it is.
        self._node.deliver(events.Tick())

    def _release(self, segments: list[Segment], most: int) -> None:
        for _ in range(min(most, len(segments))):
            self._node.store.unpin(segments.pop())


class PooledRun:
    """One run of a workload through a simulated pool. Deterministic: equal arguments give equal runs."""

    def __init__(
        self,
        options: SimulationOptions,
        engine: EngineModel,
        *,
        counts_memory: bool,
        instance: Callable[..., PooledEngine] = PooledEngine,
        chunk_tokens: int = CHUNK_TOKENS,
        cold: ColdContent | None = None,
    ) -> None:
        """`counts_memory`: requests under way take memory. `instance`: makes the engine of each node from the arguments
        of `PooledEngine`. `chunk_tokens`: number of tokens that a forward pass computes at most. `cold`: as of
        `SimulatedCluster`."""
        self.engine = engine
        self.counts_memory = counts_memory
        self.chunk_tokens = chunk_tokens
        self.answers: list[Answered] = []
        self.busy = BusyLog(options.nodes)
        self.done: list[Arrival] = []
        """The answered requests, in the order in which their answers ended."""
        self.first_token: Callable[[Arrival], None] = lambda arrival: None
        self.answered: Callable[[Arrival], None] = lambda arrival: None
        """Functions that are called with the request at the first token (`first_token`) and at the last token
        (`answered`) of each answer."""
        self.restart_every_s: float | None = None
        """Seconds from the restart of one engine to that of the next, in turn; None: none restarts."""
        self.route: Route = self.least_loaded
        """Chooses the node of each request."""
        self.node_tokens = options.capacity_tokens // options.nodes // options.segment_tokens * options.segment_tokens
        self._instance = instance
        self._closed_loop = False
        self._numbers = count(1)
        self._draw = random.Random(options.seed)
        self._engines: list[PooledEngine] = []
        self.simulation = Simulation(options, self._make, cold)

    def next_number(self) -> int:
        """A number that this run has not used before."""
        return next(self._numbers)

    def _make(
        self, node: SimNode, options: SimulationOptions, window: int, finished: Callable[[RequestOutcome], None]
    ) -> SimulatedEngine:
        engine = self._instance(node, options, window, finished, self)
        self._engines.append(engine)
        return engine

    def least_loaded(self, number: int, arrival: Arrival, send: Send) -> None:
        """A route, the default: sends each request to the node whose requests have the fewest prompt tokens left to
        compute; of those, to the one with the fewest requests; of those, to one that the seed draws."""
        loads = [(each.backlog, each.open) for each in self._engines]
        least = min(loads)
        send(self._draw.choice([node for node, load in enumerate(loads) if load == least]))

    def round_robin(self, number: int, arrival: Arrival, send: Send) -> None:
        """A route that sends requests to the nodes in turn."""
        send(number % len(self._engines))

    def run(self, arrivals: Sequence[Arrival], progress: Callable[[int], None] = lambda done: None) -> None:
        """Serve all requests to their last token. Raises ConfigurationError where there are no requests."""
        if not arrivals:
            raise ConfigurationError("requests", 0, "at least one")
        self._closed_loop = any(arrival.follows is not None for arrival in arrivals)
        if self.restart_every_s is not None:
            self.simulation.cluster.clock.at(
                BEGINS_S + self.restart_every_s, self._restart_next, 0, self.restart_every_s
            )
        self.simulation.run(arrivals, progress, self.route, DRAIN_S)

    def _restart_next(self, instance: int, every_s: float) -> None:
        self._engines[instance].restart()
        following = (instance + 1) % len(self._engines)
        self.simulation.cluster.clock.after(every_s, self._restart_next, following, every_s)

    def row(self) -> SystemRow:
        """The row of the pool in the comparison, from all answered requests; there must be at least one."""
        simulation, seconds = self.simulation, max(answer.at_s for answer in self.answers)
        return row_of(
            self.answers,
            simulation.cluster.sent,
            self.busy,
            self.engine,
            duplication=simulation.figures().duplication,
            node_tokens=self.node_tokens,
            closed_loop=self._closed_loop,
            disk=simulation.disk_use(seconds),
            cold=simulation.cold_use(seconds),
        )
