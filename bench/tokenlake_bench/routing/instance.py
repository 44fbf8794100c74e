"""One engine instance as a queue: prompts first come, first served, in chunks, together with the decoding batch.

Driven from outside, on any clock: `submit`, then whenever the time is `next_event()`, `advance`.

    waiting -> (ready, memory) -> prefill, chunk by chunk -> first token -> decoding -> finished

A step computes up to `chunk_tokens` tokens: one for each decoding request, then of the prompts, oldest first. Steps in
which nothing but decoding happens are taken together, at the length of the one in the middle, and cut short at a step's
end when a prompt arrives.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tokenlake.errors import ConfigurationError
from tokenlake_bench.engine_model import Chunk

__all__ = ["Instance", "InstanceOptions", "Job", "Steps"]

_RUN: Final = 64
"""Decode steps taken together, at most."""


class Steps(Protocol):
    """How long a step takes; `EngineModel` is one."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        """See `EngineModel.step_s`; above 0 for what is not empty."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One request at one instance. Times are the clock's; those not yet known are NaN."""

    number: int
    """The caller's."""
    prompt: int
    """Tokens."""
    output: int
    """Tokens, at least 1, the first one included."""
    cached: int = 0
    """Tokens of the prompt that are not computed; `begin` may set it. With all of them cached and `handed_over`, the
    first token was made elsewhere: `output` are those that are left."""
    ready_s: float = 0.0
    """Not to begin before."""
    handed_over: bool = False
    began_s: float = math.nan
    first_s: float = math.nan
    finished_s: float = math.nan
    computed: int = 0
    """Tokens of the prompt computed so far."""

    @property
    def new(self) -> int:
        """Tokens of the prompt to compute: at least the last one, unless it was handed over."""
        return 0 if self.handed_over else max(1, self.prompt - self.cached)


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """`memory_tokens`: of the prompts and answers under way; None for no bound. A request that needs more than all of
    it runs alone."""

    chunk_tokens: int = 2048
    batch: int = 256
    memory_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in ("chunk_tokens", "batch"):
            if getattr(self, field) < 1:
                raise ConfigurationError(field, getattr(self, field), "at least 1")
        if self.batch > self.chunk_tokens:
            raise ConfigurationError("batch", self.batch, f"at most chunk_tokens, {self.chunk_tokens}")


class Instance:
    """`begin(job, now)` is called when a job's prefill begins, `first(job, now)` with its first token; both before
    `advance` returns, in time order."""

    def __init__(
        self,
        engine: Steps,
        options: InstanceOptions,
        *,
        begin: Callable[[Job, float], None] = lambda job, now: None,
        first: Callable[[Job, float], None] = lambda job, now: None,
    ) -> None:
        self._engine = engine
        self._options = options
        self._begin = begin
        self._first = first
        self._order = itertools.count()
        self._later: list[tuple[float, int, Job]] = []
        """Not ready yet."""
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []
        """By the step with which they finish."""
        self._steps = 0
        """Decode steps done."""
        self._context = 0
        """Tokens that the decoding requests attend to in the next step."""
        self._under_way = 0
        """Tokens of prompts and answers of all that began."""
        self._chunks: list[tuple[Job, int]] = []
        self._started_s = 0.0
        self._each_s = 0.0
        self._run = 0
        """Steps under way, 0 when idle. More than 1 only without chunks."""

    @property
    def pending(self) -> int:
        """Jobs that are not finished."""
        return len(self._later) + len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def submit(self, job: Job, now: float) -> None:
        """`now` does not go back, and what `next_event` says is due was advanced over."""
        if job.ready_s > now:
            heapq.heappush(self._later, (job.ready_s, next(self._order), job))
        else:
            self._waiting.append(job)
            self._interrupt(now)
        if not self._run:
            self._next_step(now)

    def next_event(self) -> float:
        """When `advance` has something to do; infinity when nothing is under way."""
        ends = self._started_s + self._run * self._each_s if self._run else math.inf
        ready = self._later[0][0] if self._later else math.inf
        return min(ends, ready)

    def advance(self, now: float) -> list[Job]:
        """Do what is due by `now`; the jobs that finished, in order."""
        finished: list[Job] = []
        while (due := self.next_event()) <= now:
            while self._later and self._later[0][0] <= due:
                self._waiting.append(heapq.heappop(self._later)[2])
                self._interrupt(due)
            if self._run and self._started_s + self._run * self._each_s <= due:
                self._end_step(due, finished)
                self._run = 0
            if not self._run:
                self._next_step(due)
        return finished

    # -- steps

    def _interrupt(self, now: float) -> None:
        """A run of decode steps ends with the step that is under way, so that what waits can begin."""
        if self._run > 1:
            done = math.ceil((now - self._started_s) / self._each_s - 1e-9)
            self._run = min(self._run, max(1, done))

    def _next_step(self, now: float) -> None:
        self._chunks = chunks = self._fill(now)
        self._started_s = now
        decoding = len(self._decoding)
        if not chunks and not decoding:
            self._run = 0
            return
        self._run = 1 if chunks else min(_RUN, self._decoding[0][0] - self._steps)
        # Over a run the contexts grow by one token per request and step: the middle one is the mean.
        context = self._context + decoding * (self._run - 1) // 2
        parts = [Chunk(new, job.prompt - job.new + job.computed, job.computed + new == job.new) for job, new in chunks]
        self._each_s = self._engine.step_s(parts, decoding, context)

    def _end_step(self, now: float, finished: list[Job]) -> None:
        self._steps += self._run
        self._context += self._run * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._steps:
            job = heapq.heappop(self._decoding)[2]
            self._context -= job.prompt + job.output
            self._finish(job, now, finished)
        for job, new in self._chunks:
            job.computed += new
            if job.computed == job.new:
                self._prefilling.popleft()
                job.first_s = now
                self._first(job, now)
                self._decode(job, job.output - 1, now, finished)

    def _fill(self, now: float) -> list[tuple[Job, int]]:
        """Tokens of prompts for the next step. What waits begins only when it gets some: so it finds all that the
        prompts before it left in the cache."""
        budget = self._options.chunk_tokens - len(self._decoding)
        chunks: list[tuple[Job, int]] = []
        unfinished = iter(tuple(self._prefilling))
        while budget > 0:
            job = next(unfinished, None) or self._admit(now)
            if job is None:
                break
            new = min(budget, job.new - job.computed)
            if new:
                chunks.append((job, new))
            budget -= max(1, new)
        return chunks

    def _admit(self, now: float) -> Job | None:
        """Begin with the next that waits, if there is one and room for it."""
        options = self._options
        if not self._waiting or len(self._prefilling) + len(self._decoding) >= options.batch:
            return None
        job = self._waiting[0]
        needs = job.prompt + job.output
        full = options.memory_tokens is not None and self._under_way + needs > options.memory_tokens
        if full and self._under_way:
            return None
        self._waiting.popleft()
        self._under_way += needs
        job.began_s = now
        self._begin(job, now)
        if job.handed_over:
            self._decode(job, job.output, now, [])
        else:
            self._prefilling.append(job)
        return job

    def _decode(self, job: Job, steps: int, now: float, finished: list[Job]) -> None:
        """Join the batch for so many more tokens."""
        if not steps:
            self._finish(job, now, finished)
            return
        heapq.heappush(self._decoding, (self._steps + steps, next(self._order), job))
        self._context += job.prompt + job.output - steps

    def _finish(self, job: Job, now: float, finished: list[Job]) -> None:
        self._under_way -= job.prompt + job.output
        job.finished_s = now
        finished.append(job)
