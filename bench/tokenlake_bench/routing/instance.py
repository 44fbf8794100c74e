"""One engine instance as a queue: prompts are computed first come, first served, in chunks, together with the decoding
batch.

The caller provides the time: it calls `submit` for each request, and `advance` whenever the time is `next_event()`.

    waiting -> (ready, memory) -> prefill, chunk by chunk -> first token -> decoding -> finished

A step computes up to `chunk_tokens` tokens: one for each decoding request, then tokens of prompts, oldest first.
Consecutive steps without prompt tokens are simulated as one event, each with the duration of the middle one; a prompt
that arrives ends such a sequence after the step that is under way.
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

CHUNK_TOKENS: Final = 2048
"""Number of tokens that a forward pass computes at most, unless an option says otherwise."""
BATCH: Final = 256
"""Number of requests that an instance has under way at most, unless an option says otherwise."""
_MAX_STEPS: Final = 64
"""Maximum number of decode steps that are simulated as one event."""


class Steps(Protocol):
    """Computes the duration of an engine's forward passes (steps); `EngineModel` is one implementation."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        """Seconds of one forward pass, above 0 for a batch that is not empty; the arguments are those of
        `EngineModel.step_s`."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One request at one simulated instance. Times are those of the caller's clock; times that are not known yet are
    NaN."""

    number: int
    """Identifier that the caller gave the request."""
    prompt: int
    """Number of tokens of the prompt."""
    output: int
    """Number of tokens of the answer, at least 1, the first token included."""
    chain: tuple[int, ...] = ()
    """The full segments of the prompt; requests under way that have the same segment share its memory."""
    cached: int = 0
    """Number of prompt tokens that are cached and so not computed; the callback `begin` may set it."""
    began_s: float = math.nan
    first_s: float = math.nan
    finished_s: float = math.nan
    computed: int = 0
    """Number of prompt tokens computed so far."""

    @property
    def new(self) -> int:
        """Number of prompt tokens to compute: at least the last one."""
        return max(1, self.prompt - self.cached)


class UnderWay:
    """Memory of the prompts and answers of requests under way, of which the segments that several have count once."""

    def __init__(self, segment_tokens: int) -> None:
        self.tokens = 0
        self._segment_tokens = segment_tokens
        self._users: dict[int, int] = {}
        """Number of requests under way that have each segment."""

    def needs(self, job: Job) -> int:
        """Number of tokens that the request would take now."""
        shared = sum(1 for _ in itertools.takewhile(self._users.__contains__, job.chain))
        return job.prompt + job.output - shared * self._segment_tokens

    def begin(self, job: Job) -> None:
        """Take the memory of a request."""
        self.tokens += self.needs(job)
        for segment in job.chain:
            self._users[segment] = self._users.get(segment, 0) + 1

    def end(self, job: Job) -> None:
        """Give back the memory that no other request has."""
        shared = 0
        for segment in job.chain:
            self._users[segment] -= 1
            shared += bool(self._users[segment])
            if not self._users[segment]:
                del self._users[segment]
        self.tokens -= job.prompt + job.output - shared * self._segment_tokens


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """Limits of a simulated instance. `memory_tokens`: bound on the tokens of prompts and answers under way, of which
    those in the same segment of `segment_tokens` tokens count once, None for no bound; a request that needs more runs
    alone. Raises ConfigurationError for a value out of range."""

    chunk_tokens: int = CHUNK_TOKENS
    batch: int = BATCH
    memory_tokens: int | None = None
    segment_tokens: int = 1

    def __post_init__(self) -> None:
        for field in ("chunk_tokens", "batch"):
            if getattr(self, field) < 1:
                raise ConfigurationError(field, getattr(self, field), "at least 1")
        if self.batch > self.chunk_tokens:
            raise ConfigurationError("batch", self.batch, f"at most chunk_tokens, {self.chunk_tokens}")


class Instance:
    """The queue and the batch of one simulated engine instance. `admits(job)` returns whether a job, for which the
    instance has room, may begin now; it then begins. `begin(job, now)` is called when a job's prefill begins,
    `first(job, now)` at its first token, `ran(from_s, to_s)` at the end of each event of one or more steps; all are
    called within `advance`, `submit` or `resume`, in time order."""

    def __init__(
        self,
        engine: Steps,
        options: InstanceOptions,
        *,
        admits: Callable[[Job], bool] = lambda job: True,
        begin: Callable[[Job, float], None] = lambda job, now: None,
        first: Callable[[Job, float], None] = lambda job, now: None,
        ran: Callable[[float, float], None] = lambda from_s, to_s: None,
    ) -> None:
        self._engine = engine
        self._options = options
        self._admits = admits
        self._begin = begin
        self._first = first
        self._ran = ran
        self._order = itertools.count()
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []
        """A heap of the requests that decode: (number of the decode step that finishes the request, order of
        submission, request)."""
        self._steps = 0
        """Number of decode steps since the beginning."""
        self._context = 0
        """Number of tokens of context that the decoding requests together attend to in the next step."""
        self._under_way = UnderWay(options.segment_tokens)
        self._chunks: list[tuple[Job, int]] = []
        self._started_s = 0.0
        self._each_s = 0.0
        self._taken = 0
        """Number of steps that the event under way simulates: 0 when the instance is idle, 1 if the step has prompt
        tokens."""

    @property
    def pending(self) -> int:
        """Number of requests at the instance that are not finished."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def submit(self, job: Job, now: float) -> None:
        """Add a request. `now` must not decrease, and `advance` must have been called for all events before it."""
        self._waiting.append(job)
        self.resume(now)

    def resume(self, now: float) -> None:
        """Let a waiting request begin that `admits` refused before, after the step under way."""
        self._interrupt(now)
        if not self._taken:
            self._next_step(now)

    def next_event(self) -> float:
        """Time of the instance's next event, at which `advance` must be called; infinity when nothing is under way."""
        return self._started_s + self._taken * self._each_s if self._taken else math.inf

    def advance(self, now: float) -> list[Job]:
        """Process all events of the instance that are due by `now`. Returns the requests that finished, in order."""
        finished: list[Job] = []
        while (due := self.next_event()) <= now:
            self._end_step(due, finished)
            self._taken = 0
            self._next_step(due)
        return finished

    # -- steps

    def _interrupt(self, now: float) -> None:
        """Shorten the sequence of decode steps under way to end with the current step, so that a waiting job can begin
        after it."""
        if self._taken > 1:
            done = math.ceil((now - self._started_s) / self._each_s - 1e-9)
            self._taken = min(self._taken, max(1, done))

    def _next_step(self, now: float) -> None:
        self._chunks = chunks = self._fill(now)
        self._started_s = now
        decoding = len(self._decoding)
        if not chunks and not decoding:
            self._taken = 0
            return
        self._taken = 1 if chunks else min(_MAX_STEPS, self._decoding[0][0] - self._steps)
        # All decode steps of the event take as long as the middle one, whose context is their mean: the context grows
        # by one token per request and step.
        context = self._context + decoding * (self._taken - 1) // 2
        parts = [Chunk(new, job.prompt - job.new + job.computed, job.computed + new == job.new) for job, new in chunks]
        self._each_s = self._engine.step_s(parts, decoding, context)

    def _end_step(self, now: float, finished: list[Job]) -> None:
        self._ran(self._started_s, now)
        self._steps += self._taken
        self._context += self._taken * len(self._decoding)
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
        """Choose the prompt tokens of the next step. A waiting request begins only when it gets tokens of the step, so
        that it finds every segment that earlier prompts left in the cache."""
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
        """Begin the waiting request that is next, if there is one and its tokens fit into the memory."""
        options = self._options
        if not self._waiting or len(self._prefilling) + len(self._decoding) >= options.batch:
            return None
        job = self._waiting[0]
        taken, limit = self._under_way.tokens, options.memory_tokens
        if taken and limit is not None and taken + self._under_way.needs(job) > limit:
            return None
        if not self._admits(job):
            return None
        self._waiting.popleft()
        self._under_way.begin(job)
        job.began_s = now
        self._begin(job, now)
        self._prefilling.append(job)
        return job

    def _decode(self, job: Job, steps: int, now: float, finished: list[Job]) -> None:
        """Add a request to the decoding batch for `steps` more tokens; it is finished if `steps` is 0."""
        if not steps:
            self._finish(job, now, finished)
            return
        heapq.heappush(self._decoding, (self._steps + steps, next(self._order), job))
        self._context += job.prompt + job.output - steps

    def _finish(self, job: Job, now: float, finished: list[Job]) -> None:
        self._under_way.end(job)
        job.finished_s = now
        finished.append(job)
