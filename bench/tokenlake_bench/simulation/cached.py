"""Simulated engines with a GPU cache of their own in front of the pool, which act as vLLM with `TokenLakeConnector`.

::

    arrives -> queues -> looked up in the GPU cache, then in the pool -> instance: prefill ..... decode -> finished
               (one at a time is read and copied to the GPU)             takes GPU memory `- segments are stored

- The pool is asked for the whole prompt. The segments in the GPU cache are leased and given back unread, which counts
  as a read of those that lie at this node. The segments behind them are fetched to this node's memory, window by
  window, and copied to the GPU.
- No request waits for another engine while a request of this engine computes a segment of its prompt.
- A request that loads nothing offers all computed segments of its prompt to the pool, those in the GPU cache included:
  the pool takes those that this node lacks. A request that loads offers those behind the load.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenlake.errors import ConfigurationError
from tokenlake.keys import KEY_BYTES
from tokenlake_bench.routing.engine_cache import EngineCache, further_segments
from tokenlake_bench.routing.instance import Job
from tokenlake_bench.simulation.engine import RequestOutcome, Steps
from tokenlake_bench.simulation.node import SimNode
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.simulation.pooled import PooledEngine, PooledRequest, PooledRun


class CachedEngine(PooledEngine):
    """A simulated engine with a GPU cache of `engine_cache_tokens`, at one node of the pool. Raises ConfigurationError
    where not one segment fits."""

    def __init__(
        self,
        node: SimNode,
        options: SimulationOptions,
        window: int,
        finished: Callable[[RequestOutcome], None],
        run: PooledRun,
        *,
        engine_cache_tokens: int,
    ) -> None:
        segments = engine_cache_tokens // options.segment_tokens
        if segments < 1:
            raise ConfigurationError("engine_cache_tokens", engine_cache_tokens, f"at least {options.segment_tokens}")
        super().__init__(node, options, window, finished, run, engine_cache_tokens)
        self.cache = EngineCache(segments)
        self._computing: dict[int, tuple[int, int]] = {}
        """By number of each request under way that computes a segment which the pool lacked: the index of the first
        such segment in its prompt, and the segment."""

    def restart(self) -> None:
        self.cache.clear()

    def _fetch_and_submit(self, number: int, request: PooledRequest) -> Steps:
        chain = _chain(request)
        request.served.engine = self.cache.match(chain)
        yield from super()._fetch_and_submit(number, request)
        if (found := request.served.found) < len(chain):
            self._computing[number] = found, chain[found]

    def _in_flight_wait_s(self, served: RequestOutcome, keys: bytes) -> float:
        chain = served.arrival.chain
        if any(index < len(chain) and chain[index] == segment for index, segment in self._computing.values()):
            return 0.0
        local, tokens = served.engine * self._options.segment_tokens, len(chain) * self._options.segment_tokens
        return 1.5 * self._run.engine.prefill_s(tokens - local, local)

    def _load_s(self, segments: int) -> float:
        return self._run.engine.host_copy_s(segments * self._options.segment_tokens)

    def _compute_s(self, segments: int) -> float:
        return self._run.engine.host_copy_s(segments * self._options.segment_tokens)

    def _store_computed(self, number: int, request: PooledRequest) -> Steps:
        served = request.served
        first = served.hits if served.hits > served.engine else 0
        if first * KEY_BYTES < len(request.keys):
            yield from self._store(served, request.keys, first)
        request.stored = True
        self._close(number, request)

    def _take_memory(self, job: Job, request: PooledRequest) -> None:
        chain = _chain(request)
        counted = self._run.counts_memory
        further = further_segments(job, len(chain), self._options.segment_tokens) if counted else 0
        self.cache.begin(job.number, chain, further)

    def _give_back_memory(self, job: Job) -> None:
        self.cache.end(job.number)
        self._computing.pop(job.number, None)


def _chain(request: PooledRequest) -> tuple[int, ...]:
    return tuple(request.served.arrival.chain.tolist())
