"""Pools that use the memory of the GPUs, for the study of a GPU tier (`engine_cache_study`). None of them is built.

::

    gpu-added      | memory of the nodes + as much again as all GPU caches |   GPU caches as they are
    gpu-given      | memory of the nodes + a part of each GPU |                smaller GPU caches
    gpu-read       | memory of the nodes |   <- a read may also come from the GPU cache of another instance
    gpu-exclusive  | memory of the nodes |   <- the same; a segment is stored when it leaves a GPU cache, not before
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.keys import KEY_BYTES
from tokenlake.store.segment import State
from tokenlake.wire import engine
from tokenlake_bench.routing.engine_cache import EngineCache
from tokenlake_bench.simulation.arrivals import Arrival, keys_of
from tokenlake_bench.simulation.cached import CachedEngine
from tokenlake_bench.simulation.cluster import Send
from tokenlake_bench.simulation.disk import CHECKSUM
from tokenlake_bench.simulation.engine import TENANT, RequestOutcome, Steps
from tokenlake_bench.simulation.node import SimNode
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.simulation.planned import PlannedRoute
from tokenlake_bench.simulation.pooled import PooledRequest, PooledRun

__all__ = ["GIVEN", "GpuExclusive", "GpuRead", "GpuRoute", "gpu_sizes"]

GIVEN: Final = {"gpu-given-1/8": 1 / 8, "gpu-given-1/4": 1 / 4}
"""The part of each GPU cache that the variant takes from the engine and gives to the pool."""


def gpu_sizes(variant: str, nodes: int, capacity_tokens: int, engine_cache_tokens: int) -> tuple[int, int]:
    """(tokens of the pool's memory, tokens of each GPU cache) of a variant. A read of the pool's part of the same GPU
    costs the copy over the bus in the simulation, which it would not: this copy is made while the request before is
    computed."""
    if variant == "gpu-added":
        return capacity_tokens + nodes * engine_cache_tokens, engine_cache_tokens
    given = int(GIVEN.get(variant, 0.0) * engine_cache_tokens)
    return capacity_tokens + nodes * given, engine_cache_tokens - given


class _Cache(EngineCache):
    """A GPU cache that tells which segments leave it."""

    def __init__(self, capacity: int, left: Callable[[list[int]], None]) -> None:
        super().__init__(capacity)
        self._left = left

    def _shrink(self) -> list[int]:
        evicted = super()._shrink()
        if evicted:
            self._left(evicted)
        return evicted


class GpuRead(CachedEngine):
    """An engine that reads segments behind those of the pool from the memory of nodes and the GPU caches of other
    instances, whichever has them. It knows them exactly and at once, they wait for no other transfer, and none is
    evicted before it is read, which favours it."""

    def __init__(
        self,
        node: SimNode,
        options: SimulationOptions,
        window: int,
        finished: Callable[[RequestOutcome], None],
        run: PooledRun,
        *,
        engine_cache_tokens: int,
        fleet: list[GpuRead],
    ) -> None:
        """`fleet`: the engines of all nodes, to which this one adds itself."""
        super().__init__(node, options, window, finished, run, engine_cache_tokens=engine_cache_tokens)
        self.cache = _Cache(self.cache.capacity, self._evicted)
        self.computed: set[int] = set()
        """The segments in the GPU cache that are computed; those of requests in their prefill are not."""
        self._fleet = fleet
        fleet.append(self)

    def _read(self, served: RequestOutcome, keys: bytes) -> Steps:
        yield from super()._read(served, keys)
        further = 0
        for index in range(served.hits, len(served.arrival.chain)):
            if not self._anywhere(int(served.arrival.chain[index]), keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]):
                break
            further += 1
        if further:
            nbytes = further * self._options.segment_layout.segment_bytes
            yield nbytes / self._options.network.usual.bandwidth + self._load_s(further)
            served.hits += further
            served.remote += further
            served.found = max(served.found, served.hits)

    def _anywhere(self, segment: int, key: bytes) -> bool:
        return any(segment in each.computed or each.has(SegmentKey(key)) for each in self._fleet)

    def has(self, key: SegmentKey) -> bool:
        """Whether the memory of this engine's node has the segment."""
        segment = self._node.store.index(TenantId(TENANT)).get(key)
        return segment is not None and segment.state is State.READY

    def _store_computed(self, number: int, request: PooledRequest) -> Steps:
        self.computed.update(request.served.arrival.chain.tolist())
        yield from super()._store_computed(number, request)

    def _evicted(self, segments: list[int]) -> None:
        self.computed.difference_update(segments)


class GpuExclusive(GpuRead):
    """A `GpuRead` engine that stores a segment when it leaves the GPU cache, so that the memory of the nodes has other
    segments than the GPU caches. The copy out of the GPU delays no request."""

    def __init__(
        self,
        node: SimNode,
        options: SimulationOptions,
        window: int,
        finished: Callable[[RequestOutcome], None],
        run: PooledRun,
        *,
        engine_cache_tokens: int,
        fleet: list[GpuRead],
    ) -> None:
        super().__init__(node, options, window, finished, run, engine_cache_tokens=engine_cache_tokens, fleet=fleet)
        self._names: dict[int, tuple[bytes, int]] = {}
        """By segment in the GPU cache: its key, and its index in the prompt."""
        self._leaving: OrderedDict[int, tuple[bytes, int]] = OrderedDict()
        self._storing = False

    def _store_computed(self, number: int, request: PooledRequest) -> Steps:
        chain = request.served.arrival.chain.tolist()
        self.computed.update(chain)
        for at, segment in enumerate(chain):
            self._names[segment] = request.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], at
        request.stored = True
        self._close(number, request)
        yield from ()

    def _evicted(self, segments: list[int]) -> None:
        for segment in segments:
            if segment in self.computed and not any(
                segment in each.computed for each in self._fleet if each is not self
            ):
                self._leaving[segment] = self._names[segment]
            self._names.pop(segment, None)
        super()._evicted(segments)
        if self._leaving and not self._storing:
            self._storing = True
            self._clock.after(0.0, self._advance, self._store_leaving(), None)

    def _store_leaving(self) -> Steps:
        while self._leaving:
            _, (key, index) = self._leaving.popitem(last=False)
            prepared = yield engine.Prepare(next(self._numbers), key, index)
            assert isinstance(prepared, engine.Prepared)
            if prepared.write:
                yield engine.Commit(next(self._numbers), prepared.write, (0,), 1, CHECKSUM)
        self._storing = False


class GpuRoute(PlannedRoute):
    """A route whose lookup also names the nodes whose GPU caches have a segment."""

    def __init__(self, run: PooledRun, fleet: Sequence[GpuRead]) -> None:
        super().__init__(run)
        self._fleet = fleet
        self._segments: dict[SegmentKey, int] = {}
        self._key_seed = run.simulation.options.seed

    def __call__(self, number: int, arrival: Arrival, send: Send) -> None:
        keys = keys_of(arrival.chain, self._key_seed)
        for at, segment in enumerate(arrival.chain.tolist()):
            self._segments[SegmentKey(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])] = segment
        super().__call__(number, arrival, send)

    def _owners(self, keys: Sequence[SegmentKey]) -> dict[SegmentKey, list[NodeId]]:
        owners = super()._owners(keys)
        for key in keys:
            segment = self._segments[key]
            for node, each in zip(self._nodes, self._fleet, strict=True):
                if segment in each.computed and node not in owners.get(key, ()):
                    owners.setdefault(key, []).append(node)
        return owners
