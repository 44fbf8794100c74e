"""The scheduler's side: which tokens of a request come from the pool, and which segments go there. Imports no engine.

Nothing here waits for the daemon. The way of a request::

    new_request      hash the prompt, begin to ask the pool
    matched          None while the answer is not there; then how many tokens can be loaded
    allocated        the blocks to load into
    step             what the ranks load and store in this step
    worker_output    a step's outcome: leases are given back, or what was loaded is in doubt
    finished         what is left to store
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenlake.keys import Prefix
from tokenlake.wire import Code
from tokenlake_client.engines.vllm.counters import Counters
from tokenlake_client.engines.vllm.lookup import AskedLease, Desk, Lookup, LookupPool, Reserved
from tokenlake_client.engines.vllm.plan import LoadPlan, SavePlan, StepPlan, StepReport
from tokenlake_client.engines.vllm.saving import Progress
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.engines.vllm.spans import loadable_until, wanted_segments

__all__ = ["EngineRequest", "Scheduled", "SchedulerSide"]

EARLY_LOOKUPS = 16
"""Requests that are asked for on arrival; when more wait, the others are asked for when their turn comes, so that
a long queue does not hold leases on what it will read much later."""


class EngineRequest(Protocol):
    """What is used of vLLM's `Request`."""

    request_id: str
    num_computed_tokens: int
    cache_salt: str | None

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was sampled."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """These tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's part in a step."""

    request: str
    computed: int
    """Tokens before this step."""
    new: int
    fresh: Sequence[int]
    """Blocks it was given for this step; `whole`: all its blocks, shared ones first."""
    whole: bool


@dataclass(slots=True)
class _Entry:
    request: EngineRequest
    progress: Progress
    prefix: Prefix | None = None
    incarnation: int = 0
    lookup: Lookup | None = None
    placed: bool = False
    """It has blocks; a later question begins anew, because it lost them."""
    may_load: bool = True
    local: int = 0
    """Tokens that vLLM itself had when it last asked."""


@dataclass(slots=True)
class _Load:
    plan: LoadPlan
    lease: AskedLease | None
    step: int = 0
    """That it was handed out in; 0 before."""


@dataclass(slots=True)
class _Jobs:
    """Saves that are out, and the blocks they read."""

    last: int = 0
    blocks: dict[int, frozenset[int]] = field(default_factory=dict)

    def add(self, blocks: tuple[int, ...]) -> int:
        self.last += 1
        self.blocks[self.last] = frozenset(blocks)
        return self.last

    def done(self, job: int) -> None:
        for number in [number for number in self.blocks if number <= job]:
            del self.blocks[number]

    def reading(self, blocks: set[int]) -> tuple[int, ...]:
        return tuple(job for job, read in self.blocks.items() if not read.isdisjoint(blocks))


class SchedulerSide:
    """One per engine. Not thread-safe: the scheduler calls it."""

    def __init__(
        self,
        pool: Callable[[], LookupPool | None],
        settings: EngineSettings,
        block_tokens: int,
        counters: Counters,
        report: Callable[[str, BaseException], None],
        *,
        shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool`: the pool if it is there now; must not wait. `shared`: several ranks fill one segment, so its slot
        is reserved here; else the rank reserves it behind the step."""
        self._pool = pool
        self._settings = settings
        self._segment = settings.segment_tokens
        self._block = block_tokens
        self._counters = counters
        self._report = report
        self._shared = shared
        self._reservations: dict[int, Reserved] = {}
        """By job."""
        self._desk = Desk(settings.match_ms / 1e3, clock)
        self._entries: dict[str, _Entry] = {}
        self._loads: dict[str, _Load] = {}
        self._jobs = _Jobs()
        self._tails: list[SavePlan] = []
        self._held: list[tuple[str, int]] = []
        self._step = 0
        self._stopped = False
        """A rank cannot serve the pool."""

    @property
    def waits(self) -> bool:
        """Do steps wait for their loads?"""
        return self._settings.load == "sync"

    # -- a request on its way in

    def new_request(self, request: EngineRequest) -> None:
        """A request that can be served with the pool has arrived."""
        entry = self._entries[request.request_id] = _Entry(request, Progress(self._segment))
        waiting = sum(other.lookup is not None and not other.placed for other in self._entries.values())
        if waiting < EARLY_LOOKUPS:
            self._ask(entry)

    def matched(self, request: EngineRequest, computed: int) -> int | None:
        """Tokens beyond `computed` that can be loaded; None: not known yet."""
        entry = self._entries.get(request.request_id)
        if entry is None or not entry.may_load:
            return 0
        if entry.placed:
            self._begin_again(entry)
        entry.local = computed
        if entry.lookup is None and not self._ask(entry):
            return 0
        lookup = entry.lookup
        assert lookup is not None
        if not lookup.poll():
            if not self._desk.late(lookup):
                return None
            self._counters.add(lookups_late=1)
            entry.lookup, entry.may_load = None, False
            return 0
        assert lookup.lease is not None
        until = loadable_until(lookup.lease.hits, request.num_tokens, self._segment, self._block)
        return max(0, until - computed)

    def allocated(self, request: EngineRequest, blocks: Sequence[int], external: int) -> None:
        """`request` has `blocks`, and `external` tokens are to be loaded into them. They were promised to vLLM, so
        whatever goes wrong here the ranks are told of them: without a lease, their blocks are errors."""
        try:
            self._allocated(request, blocks, external)
        except Exception as error:
            self._report("preparing a load", error)
            if external and request.request_id not in self._loads:
                start = self._entries[request.request_id].local
                into = tuple(blocks[start // self._block : (start + external) // self._block])
                plan = LoadPlan(request.request_id, 0, 0, start, start + external, into, here=False)
                self._loads[request.request_id] = _Load(plan, None)

    def _allocated(self, request: EngineRequest, blocks: Sequence[int], external: int) -> None:
        entry = self._entries.get(request.request_id)
        if entry is None or entry.placed:
            return
        entry.placed = True
        lookup, entry.lookup = entry.lookup, None
        self._counters.add(requests=1, tokens_asked=request.num_tokens, tokens_local=entry.local)
        if lookup is None:
            return
        if not external or lookup.lease is None:
            lookup.drop()
            return
        start, stop = entry.local, entry.local + external
        into = tuple(blocks[start // self._block : stop // self._block])
        here = lookup.lease.local_hits == lookup.lease.hits
        lease = lookup.lease
        plan = LoadPlan(request.request_id, int(lease.id), lease.incarnation, start, stop, into, here)
        # A request that lost its blocks in the step that loaded them comes back before that step's outcome.
        self._ended(request.request_id)
        self._loads[request.request_id] = _Load(plan, lookup.lease)
        entry.progress.saved = stop // self._segment
        self._counters.add(tokens_hit=external)

    # -- a step

    def step(self, scheduled: Sequence[Scheduled], table: Callable[[str], Sequence[int]]) -> StepPlan:
        """What the ranks do in the next step. `table`: the blocks of a scheduled request."""
        self._step += 1
        loads = [load for load in self._loads.values() if not load.step]
        for load in loads:
            load.step = self._step
        sure = not (self.waits and self._loads)
        saves, self._tails = self._tails, []
        try:
            reused = self._jobs.reading(self._written(scheduled, loads))
        except Exception as error:
            self._report("finding blocks that are handed out again", error)
            reused = tuple(self._jobs.blocks)
        for part in scheduled:
            entry = self._entries.get(part.request)
            if entry is not None:
                entry.progress.computes(self._step, part.computed + part.new)
                saves += self._saves(entry, entry.request.num_tokens, table, sure=sure)
        held, self._held = self._held, []
        pool = self._pool()
        connected = pool is not None and pool.connected
        return StepPlan(
            step=self._step,
            session=pool.session if pool is not None and connected else 0,
            incarnation=pool.incarnation if pool is not None and connected else 0,
            wait=self.waits,
            idle=not scheduled,
            loads=tuple(load.plan for load in loads),
            saves=tuple(saves),
            reused=reused,
            held=tuple(held),
        )

    def worker_output(self, report: StepReport | None, received: Sequence[str], invalid: set[int]) -> None:
        """The outcome of a step: `received` requests' asynchronous loads ended; blocks of `invalid` were not filled."""
        if invalid:
            self._load_failed(invalid)
        for request in received:
            self._ended(request)
        if report is None:
            return
        if not report.serves:
            self._stopped = True
        if self.waits:
            for request in [name for name, load in self._loads.items() if 0 < load.step <= report.step]:
                self._ended(request)
        if not invalid:
            for entry in self._entries.values():
                entry.progress.confirm(report.step)
        self._jobs.done(report.done)
        for job in [job for job in self._reservations if job <= report.done]:
            # Every rank has filled its part, or given it back.
            self._reservations.pop(job).release()

    # -- a request on its way out

    def finished(self, request: EngineRequest, blocks: Sequence[int], *, complete: bool) -> bool:
        """`request` is done; True: keep its blocks until the ranks say so. `complete`: it was not aborted, so all its
        tokens but the last are computed and right."""
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return False
        if entry.lookup is not None:
            entry.lookup.drop()
        if not complete:
            return False
        right = min(request.num_computed_tokens, request.num_tokens - 1)
        entry.progress.computes(self._step, right)
        saves = self._saves(entry, right, lambda _: blocks, sure=True)
        self._tails += saves
        self._held += [(request.request_id, save.job) for save in saves]
        return bool(saves)

    def close(self) -> None:
        """Give back all leases."""
        for entry in self._entries.values():
            if entry.lookup is not None:
                entry.lookup.drop()
        for name in list(self._loads):
            self._ended(name)
        for reserved in self._reservations.values():
            reserved.release()
        self._entries.clear()
        self._loads.clear()

    # -- inside

    def _ask(self, entry: _Entry) -> bool:
        """Begin a lookup; False when there is nobody to ask, or nothing to ask for."""
        pool = None if self._stopped else self._pool()
        count = wanted_segments(entry.request.num_tokens, self._segment, self._block)
        if pool is None or not count:
            return False
        self._hash(entry, pool)
        assert entry.prefix is not None
        entry.lookup = self._desk.begin(pool, entry.prefix.keys[:count])
        return entry.lookup is not None

    def _hash(self, entry: _Entry, pool: LookupPool) -> None:
        """Bring the key chain up to the known tokens. Another daemon may have another secret."""
        request = entry.request
        if entry.prefix is None or entry.incarnation != pool.incarnation:
            entry.prefix = pool.prefix(salt=_joined(self._settings.salt, request.cache_salt))
            entry.incarnation = pool.incarnation
        known = entry.prefix.tokens
        if known < request.num_tokens:
            entry.prefix.extend(request.all_token_ids[known : request.num_tokens])

    def _begin_again(self, entry: _Entry) -> None:
        entry.placed = False
        entry.progress.restart()

    def _saves(self, entry: _Entry, known: int, table: Callable[[str], Sequence[int]], *, sure: bool) -> list[SavePlan]:
        """Never raises: a step goes on without what cannot be stored."""
        segments = entry.progress.take(known, sure=sure)
        if not segments or not self._settings.save or self._stopped:
            return []
        try:
            return self._plan_saves(entry, segments, table)
        except Exception as error:
            self._report("planning what to store", error)
            # Asked for again with the next step of the request.
            entry.progress.saved = segments.start
            return []

    def _plan_saves(self, entry: _Entry, segments: range, table: Callable[[str], Sequence[int]]) -> list[SavePlan]:
        pool = self._pool()
        if pool is None or not pool.connected:
            return []
        self._hash(entry, pool)
        assert entry.prefix is not None
        keys = entry.prefix.keys[segments.start : segments.stop]
        reserved = None
        if self._shared:
            reserved = pool.reserve(keys, segments.start, deadline_s=self._settings.match_ms / 1e3)
            refused = next((at for at, code in enumerate(reserved.codes) if Code(code).refused), len(keys))
            # What was refused is asked for again with the request's next segment.
            entry.progress.saved = segments.start + refused
            keys = keys[:refused]
            if not reserved.id:
                return []
        per_segment = self._segment // self._block
        first = segments.start * per_segment
        blocks = tuple(table(entry.request.request_id)[first : first + len(keys) * per_segment])
        job = self._jobs.add(blocks)
        if reserved is not None:
            self._reservations[job] = reserved
        if reserved is None:
            return [SavePlan(job, segments.start, tuple(keys), blocks)]
        return [SavePlan(job, segments.start, tuple(keys), blocks, int(reserved.id), reserved.incarnation)]

    def _written(self, scheduled: Sequence[Scheduled], loads: Sequence[_Load]) -> set[int]:
        """Blocks that this step may write and that were handed out for it."""
        written: set[int] = set()
        if not self._jobs.blocks:
            return written
        for load in loads:
            written.update(load.plan.blocks)
        for part in scheduled:
            entry = self._entries.get(part.request)
            shared = entry.local // self._block if entry is not None and part.whole else 0
            written.update(part.fresh[shared:])
        return written

    def _load_failed(self, invalid: set[int]) -> None:
        for name, load in self._loads.items():
            entry = self._entries.get(name)
            if entry is not None and not invalid.isdisjoint(load.plan.blocks):
                # A second try would meet the same segment again.
                entry.may_load = False
                self._counters.add(loads_failed=1)
        for entry in self._entries.values():
            entry.progress.void()

    def _ended(self, request: str) -> None:
        load = self._loads.pop(request, None)
        if load is not None and load.lease is not None:
            load.lease.release()


def _joined(ours: str | None, theirs: str | None) -> str | None:
    """One salt of the engine's and the request's; no two pairs give the same."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return f"{len(ours)}:{ours}{theirs}"
