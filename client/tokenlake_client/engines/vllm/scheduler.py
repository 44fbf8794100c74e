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

import contextlib
import time
from collections.abc import Callable, Sequence

from tokenlake.errors import TokenLakeError
from tokenlake.hints import NO_HINTS, Hints
from tokenlake.planner import Rates
from tokenlake_client.engines.vllm.counters import Counters
from tokenlake_client.engines.vllm.entry import EngineRequest, Entry, Scheduled
from tokenlake_client.engines.vllm.loading import Loading
from tokenlake_client.engines.vllm.lookup import HERE, Desk, Lookup, LookupPool
from tokenlake_client.engines.vllm.patience import Patience
from tokenlake_client.engines.vllm.plan import LoadPlan, SavePlan, StepPlan, StepReport
from tokenlake_client.engines.vllm.saving import Progress
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.engines.vllm.spans import loadable_until, wanted_segments
from tokenlake_client.engines.vllm.storing import Storing
from tokenlake_client.engines.vllm.timing import Prefills
from tokenlake_client.engines.vllm.weighing import Loads

__all__ = ["SchedulerSide"]

EARLY_LOOKUPS = 16
"""Requests that are asked for on arrival; when more wait, the others are asked for when their turn comes, so that
a long queue does not hold leases on what it will read much later."""


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
        segment_bytes: int,
        shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool`: the pool if it is there now; must not wait. `segment_bytes`: what a segment weighs. `shared`: several
        ranks fill one segment."""
        self._pool = pool
        self._settings = settings
        self._segment = settings.segment_tokens
        self._block = block_tokens
        self._counters = counters
        self._report = report
        self.rates = Rates()
        """What this engine measures as it serves."""
        self._prefills = Prefills(self.rates.prefill, clock)
        self._worth = Loads(self.rates, self._segment, segment_bytes, clock)
        self._clock = clock
        self._desk = Desk(settings.match_ms / 1e3, clock)
        self._patience = Patience(self._worth, self._segment, stores=settings.save)
        self._entries: dict[str, Entry] = {}
        self._loading = Loading(self._worth.measured)
        self._storing = Storing(settings, block_tokens, shared=shared)
        self._tails: list[SavePlan] = []
        self._held: list[tuple[str, int]] = []
        self._step = 0
        self._weights: str | None = None
        """Digest of weights that were changed in place, for the keys; None: the layout's."""
        self._stopped = False
        """A rank cannot serve the pool."""

    @property
    def waits(self) -> bool:
        """Do steps wait for their loads?"""
        return self._settings.load == "sync"

    # -- a request on its way in

    def new_request(self, request: EngineRequest, hints: Hints | None = None) -> None:
        """A request that can be served with the pool has arrived. `hints`: what it says of itself."""
        entry = self._entries[request.request_id] = Entry(request, Progress(self._segment), hints, self._weights)
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
        entry.local, entry.skipped = computed, 0
        if entry.lookup is None and not self._ask(entry):
            return 0
        lookup = entry.lookup
        assert lookup is not None
        if not lookup.poll():
            if lookup.waits and self._in_vain(entry, lookup):
                lookup.drop()
                entry.lookup = None
                return None if self._ask(entry, patient=False) else 0
            if not self._desk.late(lookup):
                return None
            self._counters.add(lookups_late=1)
            self._patience.answered(request.request_id)
            entry.lookup, entry.may_load = None, False
            return 0
        self._patience.answered(request.request_id)
        if lookup.hits < len(lookup.keys):
            self._patience.computes(request.request_id, lookup.hits, lookup.keys[lookup.hits])
            if lookup.in_flight_wait_s:
                entry.gap, entry.claim_s = lookup.hits, lookup.missing_s
        return self._weigh(entry, lookup)

    def _in_vain(self, entry: Entry, lookup: Lookup) -> bool:
        """Is what a lookup waits for of no use here any more? A request of this engine computes it, or vLLM itself has
        so much of the prompt by now that computing the rest would have taken less."""
        if self._patience.computed_here(lookup.keys):
            return True
        left_s = self._patience.seconds(entry.request.num_tokens, entry.local)
        return entry.local > 0 and self._clock() - lookup.asked > left_s

    def _weigh(self, entry: Entry, lookup: Lookup) -> int:
        """Tokens to load of what `lookup` found. The others are given back; that they are not worth it is counted when
        the request gets its blocks, since it may be asked for again until then."""
        total, start = entry.request.num_tokens, entry.local
        found = max(start, loadable_until(lookup.hits, total, self._segment, self._block))
        # What was given back when it was asked for before is not there any more.
        until = max(start, min(found, len(lookup.owners) * self._segment))
        stop = self._worth.worth(lookup.owners, start, until, total) if self._settings.weigh_loads else until
        if stop < found:
            lookup.keep(-(-stop // self._segment) if stop > start else 0)
        entry.skipped = found - stop
        return stop - start

    def allocated(self, request: EngineRequest, blocks: Sequence[int], external: int) -> None:
        """`request` has `blocks`, and `external` tokens are to be loaded into them. They were promised to vLLM, so
        whatever goes wrong here the ranks are told of them: without a lease, their blocks are errors."""
        try:
            self._allocated(request, blocks, external)
        except Exception as error:
            self._report("preparing a load", error)
            if external and request.request_id not in self._loading:
                start = self._entries[request.request_id].local
                into = tuple(blocks[start // self._block : (start + external) // self._block])
                self._loading.add(LoadPlan(request.request_id, 0, 0, start, start + external, into, here=False))

    def _allocated(self, request: EngineRequest, blocks: Sequence[int], external: int) -> None:
        entry = self._entries.get(request.request_id)
        if entry is None or entry.placed:
            return
        entry.placed = True
        lookup, entry.lookup = entry.lookup, None
        self._counters.add(requests=1, tokens_asked=request.num_tokens, tokens_local=entry.local)
        if lookup is None:
            return
        self._counters.add(tokens_skipped_by_cost=entry.skipped)
        if not external or lookup.lease is None:
            lookup.drop()
            return
        start, stop = entry.local, entry.local + external
        into = tuple(blocks[start // self._block : stop // self._block])
        lease = lookup.lease
        owners = lookup.owners[start // self._segment : -(-stop // self._segment)]
        here = all(owner == HERE for owner in owners)
        plan = LoadPlan(request.request_id, int(lease.id), lease.incarnation, start, stop, into, here)
        self._loading.add(plan, lease, owners)
        entry.progress.saved = stop // self._segment
        self._counters.add(tokens_hit=external)

    # -- a step

    def step(self, scheduled: Sequence[Scheduled], table: Callable[[str], Sequence[int]]) -> StepPlan:
        """What the ranks do in the next step. `table`: the blocks of a scheduled request."""
        self._step += 1
        loads = self._loading.hand_out(self._step)
        self._prefills.begins(self._step, scheduled)
        sure = not (self.waits and len(self._loading))
        saves, self._tails = self._tails, []
        try:
            reused = self._storing.reading(self._written(scheduled, loads))
        except Exception as error:
            self._report("finding blocks that are handed out again", error)
            reused = self._storing.jobs
        for part in scheduled:
            entry = self._entries.get(part.request)
            if entry is not None:
                computed = part.computed + part.new
                entry.progress.computes(self._step, computed)
                if entry.claim_s and computed < entry.request.num_tokens:
                    self._claim(entry, entry.claim_s)
                    entry.claim_s = 0.0
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
            loads=loads,
            saves=tuple(saves),
            reused=reused,
            held=tuple(held),
        )

    def worker_output(self, report: StepReport | None, received: Sequence[str], invalid: set[int]) -> None:
        """The outcome of a step: `received` requests' asynchronous loads ended; blocks of `invalid` were not filled."""
        if report is not None:
            self._loading.took(report.loaded)
        if invalid:
            self._load_failed(invalid)
        for request in received:
            self._loading.ended(request)
        if report is not None:
            self._steps_ended(report, right=not invalid)
        for entry in self._entries.values():
            # What was found on other nodes takes a second question: the sooner it is asked the better.
            if entry.lookup is not None:
                with contextlib.suppress(TokenLakeError):
                    entry.lookup.poll()

    def _steps_ended(self, report: StepReport, *, right: bool) -> None:
        """All ranks are as far as `report` says. `right`: no load of these steps failed."""
        for step, seconds in report.computed.items():
            self._prefills.took(step, seconds)
        if not report.serves:
            self._stopped = True
        if self.waits:
            self._loading.ended_until(report.step)
        if right:
            for entry in self._entries.values():
                entry.progress.confirm(report.step)
        self._storing.done(report.done)

    # -- a request on its way out

    def finished(
        self,
        request: EngineRequest,
        blocks: Sequence[int],
        *,
        complete: bool,
        stop_reason: str = "",
        output_tokens: int = -1,
    ) -> bool:
        """`request` is done; True: keep its blocks until the ranks say so. `complete`: it was not aborted, so all its
        tokens but the last are computed and right. `stop_reason`: how it ended. `output_tokens`: of its answer."""
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return False
        self._patience.ended(request.request_id)
        if entry.lookup is not None:
            entry.lookup.drop()
        self._hint(entry, (entry.hints or NO_HINTS).ended(stop_reason, output_tokens))
        if not complete:
            self._claim(entry, 0.0)
            return False
        right = min(request.num_computed_tokens, request.num_tokens - 1)
        entry.progress.computes(self._step, right)
        saves = self._saves(entry, right, lambda _: blocks, sure=True)
        self._tails += saves
        self._held += [(request.request_id, save.job) for save in saves]
        return bool(saves)

    # -- weights

    def new_weights(self, digest: str) -> None:
        """The weights may be others from now on: keys are hashed with this digest of theirs. What was handed out to be
        stored was computed before, and is stored under the keys of before. A request that has blocks stores nothing
        more until it loses them; one that waits asks anew."""
        self._weights = digest
        for name, entry in self._entries.items():
            if entry.lookup is not None:
                entry.lookup.drop()
            self._claim(entry, 0.0)
            self._patience.ended(name)
            entry.progress.void()
            entry.progress.restart()
            entry.weights, entry.prefix, entry.lookup, entry.gap, entry.claim_s = digest, None, None, None, 0.0
            entry.may_store = not entry.placed

    def close(self) -> None:
        """Give back all leases."""
        for entry in self._entries.values():
            if entry.lookup is not None:
                entry.lookup.drop()
        self._loading.close()
        self._storing.close()
        self._entries.clear()

    # -- inside

    def _ask(self, entry: Entry, *, patient: bool = True) -> bool:
        """Begin a lookup; False when there is nobody to ask, or nothing to ask for. `patient`: it may wait for somebody
        who computes the prompt."""
        pool = None if self._stopped else self._pool()
        total = entry.request.num_tokens
        count = wanted_segments(total, self._segment, self._block)
        if pool is None or not count:
            return False
        keys = entry.keys(pool, self._settings.salt)[:count]
        name = entry.request.request_id
        self._patience.answered(name)
        waits = self._patience.begin(name, keys, total, entry.local) if patient else (0.0, 0.0)
        entry.lookup = self._desk.begin(pool, keys, name, entry.hints, total, *waits)
        return entry.lookup is not None

    def _claim(self, entry: Entry, seconds: float) -> None:
        """Others wait so long for what the pool lacks of a prompt; 0: not any more, unless another request
        computes it."""
        pool = self._pool()
        if pool is None or self._stopped or entry.gap is None:
            return
        try:
            keys = entry.keys(pool, self._settings.salt)
            if seconds or not self._patience.computed_here(keys):
                pool.claim(keys[entry.gap :], seconds)
        except Exception as error:
            self._report("claiming what is computed", error)

    def _hint(self, entry: Entry, hints: Hints) -> None:
        """What is in the pool of it learns how it ended; what is still to be stored brings that along."""
        pool = self._pool()
        known, entry.hints = entry.hints or NO_HINTS, hints
        if pool is None or self._stopped or entry.prefix is None or hints == known or not entry.progress.saved:
            return
        try:
            pool.hint(entry.keys(pool, self._settings.salt)[: entry.progress.saved], hints)
        except Exception as error:
            self._report("passing a hint on", error)

    def _begin_again(self, entry: Entry) -> None:
        entry.placed = False
        entry.may_store = True
        entry.progress.restart()

    def _saves(self, entry: Entry, known: int, table: Callable[[str], Sequence[int]], *, sure: bool) -> list[SavePlan]:
        """Never raises: a step goes on without what cannot be stored."""
        if not entry.may_store:
            return []
        segments = entry.progress.take(known, sure=sure)
        if not segments or not self._settings.save or self._stopped:
            return []
        try:
            pool = self._pool()
            if pool is None or not pool.connected:
                return []
            return self._storing.plan(pool, entry, segments, table)
        except Exception as error:
            self._report("planning what to store", error)
            # Asked for again with the next step of the request.
            entry.progress.saved = segments.start
            return []

    def _written(self, scheduled: Sequence[Scheduled], loads: Sequence[LoadPlan]) -> set[int]:
        """Blocks that this step may write and that were handed out for it."""
        written: set[int] = set()
        if not self._storing.jobs:
            return written
        for load in loads:
            written.update(load.blocks)
        for part in scheduled:
            entry = self._entries.get(part.request)
            shared = entry.local // self._block if entry is not None and part.whole else 0
            written.update(part.fresh[shared:])
        return written

    def _load_failed(self, invalid: set[int]) -> None:
        for name in self._loading.failed(invalid):
            if name in self._entries:
                # A second try would meet the same segment again.
                self._entries[name].may_load = False
                self._counters.add(loads_failed=1)
        for entry in self._entries.values():
            entry.progress.void()
