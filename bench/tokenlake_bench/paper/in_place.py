"""A model of the TokenLake paper's system (arXiv 2508.17219): attention where the segments are, over one pool.

::

    arrives -> global queue -> instance with the least to compute: prefill, decode
                 (memory of      |        `- instances without work share its step (elastic group)
                  the whole pool) `- queries go to the segments' instances, partial results come back, layer by layer

- Segments are hashed to instances, one copy each; a segment that more than `HOT_SHARE` of the latest `WINDOW` requests
  read has a copy at every instance, which takes memory. The pool evicts the least recently used segment of all.
- A prefix lies in runs of `run_tokens`, the length over which a query is attended in the time in which it is sent and
  its output comes back; each run is hashed to an instance. So h of the n - 1 other instances hold parts of a prefix:
  (n - 1) (1 - (1 - 1 / n) ^ runs) on average. Hits count by segments.
- A prompt's new tokens attend to each other where they are computed; to the cached prefix, and in each decode step to
  the whole context, the h + 1 instances attend together. While a of n instances compute, attention over cached segments
  takes a / n of the time that one instance would take alone, and at least 1 / (h + 1).
- The queries of a step go to the h instances, and their outputs come back, beside that attention: the longer of both
  counts. Each layer waits for two messages of `LATENCY_S`. Requests whose segments are all hot ship nothing.
- A request goes to the instance with the fewest prompt tokens to compute. While no request waits, instances without
  work take equal parts of the tokens of a step that computes prompts.

The paper describes no rule in more detail. Its groups are chosen by dynamic programming over all batches, and its
batches are of one phase; here a step mixes both as in the compared systems. The scheduler knows the pool exactly, its
own messages take no time, and a group exchanges nothing for the attention among its new tokens: the model favours the
paper's system where it is not exact.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from tokenlake_bench.baselines import Accesses
from tokenlake_bench.engine_model import Chunk
from tokenlake_bench.engine_model.models import CACHE_BYTES
from tokenlake_bench.routing.base import Fleet, RoutedRequest
from tokenlake_bench.routing.fleet_run import FleetOptions, FleetRun
from tokenlake_bench.routing.instance import Job, Steps, UnderWay
from tokenlake_bench.routing.knowledge import TrackedCaches
from tokenlake_bench.routing.outcome import Answered
from tokenlake_bench.routing.systems import System

HOT_SHARE: Final = 0.1
WINDOW: Final = 200
LATENCY_S: Final = 10e-6
"""Seconds of one message between two GPUs, over NVLink or a network adapter: our assumption; an all-reduce takes 9 us
in addition to its bytes (`Gpu.reduce_s`)."""


class _OnePool:
    """A router that knows one cache, of which every instance is a part."""

    def __init__(self, fleet: Fleet) -> None:
        """Takes nothing of the fleet."""

    def choose(self, request: RoutedRequest, now: float) -> int:
        return 0

    def finished(self, instance: int, answered: Answered) -> None:
        """Does nothing, because the rule does not depend on answers."""


IN_PLACE: Final = System("in-place", _OnePool, perfect=True)


class _Step:
    """The durations of the forward passes of one instance."""

    def __init__(self, run: InPlaceRun, instance: int) -> None:
        self._run = run
        self._instance = instance

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        return self._run.step_s(self._instance, chunks, decoding, context)


class InPlaceRun(FleetRun):
    """One run of all requests through the modelled system."""

    def __init__(self, accesses: Accesses, options: FleetOptions) -> None:
        super().__init__(accesses, IN_PLACE, options)
        self._size = options.instances
        self._pool_tokens = self._size * self._capacity * self._segment
        self._caches = TrackedCaches([self._size * self._capacity])
        self._under_way = UnderWay(self._segment)
        self._queue: deque[Job] = deque()
        """Requests that no instance has yet."""
        self._new = [0] * self._size
        """By instance, prompt tokens of the requests that have no first token."""
        self._open = [0] * self._size
        self._shipping = [0] * self._size
        """By instance, number of its requests, and of those with a segment that is not hot."""
        self._prefills: list[list[Job]] = [[] for _ in range(self._size)]
        """By instance, the requests that have begun and have no first token, in this order."""
        self._ahead = [False] * self._size
        """By instance, whether it has a request that has not begun."""
        self._until_s = [0.0] * self._size
        """By instance, time until which it computes, for itself or in a group."""
        engine, gpu = options.engine, options.engine.gpu
        flops = engine.gpus * gpu.flops * gpu.compute_efficiency
        self._run_tokens = flops / engine.network_rate(nvlink=options.nvlink)
        self._recent: deque[tuple[int, ...]] = deque()
        self._reads: Counter[int] = Counter()
        """The prompts of the latest requests, and the number of these that have each segment."""
        self._hot: set[int] = set()

    def _steps(self, instance: int) -> Steps:
        return _Step(self, instance)

    # -- the scheduler

    def _submit(self, instance: int, job: Job) -> None:
        self._queue.append(job)
        self._read(job.chain)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give requests, oldest first, to instances, while the pool has room for them."""
        while self._queue:
            free = [i for i in range(self._size) if not self._ahead[i] and (self._open[i] or self._idle(i))]
            job, taken = self._queue[0], self._under_way.tokens
            if not free or (taken and taken + self._under_way.needs(job) > self._pool_tokens):
                return
            self._queue.popleft()
            chosen = min(free, key=lambda i: (self._new[i], self._open[i]))
            self._under_way.begin(job)
            self._ahead[chosen] = True
            self._new[chosen] += job.prompt
            self._open[chosen] += 1
            self._shipping[chosen] += self._cold(job)
            super()._submit(chosen, job)

    def _idle(self, instance: int) -> bool:
        return not self._open[instance] and self._until_s[instance] <= self._clock.now

    def _begin(self, instance: int, job: Job, now: float) -> None:
        super()._begin(0, job, now)
        self._prefills[instance].append(job)
        self._new[instance] -= job.cached
        self._ahead[instance] = False
        self._clock.after(0.0, self._dispatch)

    def _first(self, instance: int, job: Job, now: float) -> None:
        super()._first(0, job, now)
        self._prefills[instance].remove(job)
        self._new[instance] -= job.prompt - job.cached
        put = job.new * self._engine.model.cache_bytes * (self._size - 1) // self._size
        self._sent.add(now, instance, put + self._queries(job, job.new, job.cached))

    def _finish(self, instance: int, job: Job, now: float) -> None:
        self._open[instance] -= 1
        # A segment may have become hot or cold meanwhile; the number is an estimate.
        self._shipping[instance] = min(max(0, self._shipping[instance] - self._cold(job)), self._open[instance])
        self._under_way.end(job)
        self._sent.add(now, instance, self._queries(job, job.output, job.prompt))
        super()._finish(0, job, now)
        self._dispatch()

    # -- hot segments and memory

    def _cold(self, job: Job) -> bool:
        return not self._hot.issuperset(job.chain)

    def _read(self, chain: tuple[int, ...]) -> None:
        self._recent.append(chain)
        self._reads.update(chain)
        gone = self._recent.popleft() if len(self._recent) > WINDOW else ()
        self._reads.subtract(gone)
        least = HOT_SHARE * WINDOW
        self._hot |= {segment for segment in chain if self._reads[segment] >= least}
        self._hot -= {segment for segment in gone if self._reads[segment] < least / 2}
        for segment in gone:
            if not self._reads[segment]:
                del self._reads[segment]

    def _hold(self, instance: int, tokens: int) -> None:
        self._held[0] += tokens
        copies = (self._size - 1) * len(self._hot) * self._segment
        self._caches.resize(0, max(0, (self._pool_tokens - self._held[0] - copies) // self._segment))

    # -- one step

    def step_s(self, instance: int, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        """Seconds of a forward pass of an instance, and of those that join it, which then compute until its end."""
        now, engine = self._clock.now, self._engine
        others = [i for i in range(self._size) if i != instance]
        joining = [i for i in others if self._idle(i)] if chunks and not self._queue else []
        parts = 1 + len(joining)
        # A group splits the new tokens, and each part attends to as many pairs.
        found = [job.cached for job in self._prefills[instance]]
        shared = [_part(chunk, parts, cached) for chunk, cached in zip(chunks, found, strict=False)]
        own_s = engine.step_s([Chunk(new, own, last) for new, own, _, last in shared], decoding, 0)
        all_s = engine.step_s([Chunk(new, own + cached, last) for new, own, cached, last in shared], decoding, context)
        active = parts + sum(i not in joining and not self._idle(i) for i in others)
        # What each token of the step ships: its context decides to how many instances.
        held = [(new, self._holders(cached)) for new, _, cached, _ in shared]
        held.append((decoding, self._holders(context / max(1, decoding))))
        reach = sum(tokens * holders for tokens, holders in held)
        mean = reach / max(1, sum(tokens for tokens, _ in held))
        attending_s = (all_s - own_s) * max(active / self._size, 1 / (1 + mean))
        step_s = own_s + max(attending_s, self._ship_s(instance, reach, active))
        for each in joining:
            self._busy.add(each, now, now + step_s)
            self._until_s[each] = now + step_s
        if joining:
            self._clock.at(now + step_s, self._dispatch)
        self._until_s[instance] = now + step_s
        return step_s

    def _holders(self, context: float) -> float:
        """Expected number of other instances that hold a part of so many cached tokens."""
        others = self._size - 1
        return others * (1 - (1 - 1 / self._size) ** max(1.0, context / self._run_tokens)) if context else 0.0

    def _ship_s(self, instance: int, reach: float, active: int) -> float:
        """Seconds in which the queries of a step reach other instances and the outputs come back; `reach`: tokens times
        instances. A link sends the queries of its own instance, and outputs for the other active ones."""
        if not reach or not self._shipping[instance]:
            return 0.0
        nbytes = reach * self._token_bytes() * self._shipping[instance] / max(1, self._open[instance])
        both = (1 + (active - 1) / (self._size - 1)) / 2
        rate = self._engine.network_rate(nvlink=self._options.nvlink)
        return both * nbytes / rate + 2 * self._engine.model.layers * LATENCY_S

    def _queries(self, job: Job, tokens: int, context: int) -> int:
        """Bytes of the queries and outputs of so many tokens of a request, over so much context."""
        return round(self._cold(job) * tokens * self._holders(context) * self._token_bytes())

    def _token_bytes(self) -> int:
        """Bytes of the queries of one token to one instance, and of their outputs."""
        return 2 * self._engine.model.query_elements * CACHE_BYTES


def _part(chunk: Chunk, parts: int, found: int) -> tuple[int, int, int, bool]:
    """(new tokens, further tokens of the prompt to which they attend where they are computed, tokens of the prefix that
    was found in the pool, whether it ends the prompt) of each of several equal parts of a chunk."""
    new = -(-chunk.new // parts)
    return new, (chunk.new - new) // 2 + max(0, chunk.cached - found), min(found, chunk.cached), chunk.last
