"""The scheduler's side: chooses the tokens that are loaded from the pool and the segments that are stored there.
Imports no engine.

No method waits for the daemon. vLLM calls the methods for a request in this order::

    new_request      hash the prompt, begin a lookup
    matched          None until the answer arrives; then the number of tokens to load
    allocated        the blocks to load into
    step             the loads and saves of the ranks in this step
    worker_output    the outcome of a step: leases are released, or loaded tokens turn out to be missing
    finished         the last segments to store, and the segments that another engine is to wait for
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenlake.errors import TokenLakeError
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.planner import Rates
from tokenlake_client.engines.common.in_flight import LONGEST_S, NO_WAIT, InFlightWait
from tokenlake_client.engines.common.kv_hints import Bring
from tokenlake_client.engines.vllm.adapters import CachedAdapters, RequestAdapter
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.known.disaggregated import NOT_SPLIT, READ, Offer, RemotePrefill, Split, TailRoom
from tokenlake_client.engines.vllm.known.in_flight_waits import InFlightMarkers, InFlightWaits
from tokenlake_client.engines.vllm.known.load_cost import LoadCosts, Owner, PrefillSteps, all_local, remote_tokens
from tokenlake_client.engines.vllm.known.load_scheduler import ScheduledLoads
from tokenlake_client.engines.vllm.known.lookup import Lookup, Lookups
from tokenlake_client.engines.vllm.known.request import (
    RequestEnd,
    RequestState,
    ScheduledPart,
    loadable_segments,
    loadable_until,
)
from tokenlake_client.engines.vllm.known.save_scheduler import ScheduledSaves
from tokenlake_client.engines.vllm.known.step_plan import LoadPlan, SavePlan, StepPlan, StepReport
from tokenlake_client.engines.vllm.load_worker import LoadTime
from tokenlake_client.engines.vllm.served_request import traceparent_of
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.pool import Pool

EARLY_LOOKUPS = 16
"""Limit of the waiting requests whose lookup begins on arrival. The lookup of each further request begins when vLLM
asks for its matched tokens, so that a long queue does not lease segments long before they are loaded."""


class SchedulerSide:
    """The side of the connector in vLLM's scheduler: it looks up prompts, plans the loads and saves of the ranks, and
    takes their reports. One per engine. Not thread-safe."""

    def __init__(
        self,
        pool: Callable[[], Pool | None],
        settings: EngineSettings,
        block_tokens: int,
        counters: EngineCounters,
        report: Callable[[str, BaseException], None],
        *,
        segment_bytes: int,
        shared: bool = False,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
        refuse: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`pool` returns the pool or None, and must not wait. `segment_bytes`: the size of a segment. `shared`: several
        ranks fill one segment. `model`: the name under which vLLM serves it. `refuse` is called with a line about a
        request whose `kv_transfer_params` do not fit this engine."""
        self._pool = pool
        self._settings = settings
        self._segment = settings.segment_tokens
        self._block = block_tokens
        self._counters = counters
        self._report = report
        self._refuse = refuse
        self._clock = clock
        self.rates = Rates()
        """The measured times of this engine's loads and prefills."""
        self._prefills = PrefillSteps(self.rates.prefill, clock)
        self._costs = LoadCosts(self.rates, self._segment, segment_bytes, clock)
        self._lookups = Lookups(settings.match_ms / 1e3, clock)
        self._waits = InFlightWaits(self._costs, self._segment, stores=settings.save)
        self._requests: dict[str, RequestState] = {}
        self._loads = ScheduledLoads(self._add_load_time, report)
        self._saves = ScheduledSaves(settings, block_tokens, shared=shared, model=model)
        self._tails = TailRoom(settings.segment_tokens)
        self._last_saves: list[SavePlan] = []
        """The saves of requests that have finished since the last step. The plan of the next step hands them to the
        ranks."""
        self._held: list[tuple[str, int]] = []
        """(request, job) of each such save: vLLM keeps the request's blocks until the job is done. For the plan of the
        next step."""
        self._markers = InFlightMarkers(
            lambda: None if self._stopped else pool(), self._waits, settings.salt, report, stores=settings.save
        )
        self._step = 0
        self._cached_adapters = CachedAdapters(clock)
        self._weights: str | None = None
        """The weights digest for the keys, after the weights were changed in place; None: the layout's digest."""
        self._stopped = False
        """True: a rank has reported that it cannot read or write the cache, so the pool is not used any more."""

    @property
    def silent(self) -> bool:
        """True if the daemon has not answered a late lookup for longer than `lookup.SILENT_S`."""
        return self._lookups.silent

    def new_request(
        self,
        request: Any,
        hints: Hints | None = None,
        adapter: RequestAdapter | None = None,
        extras: Mapping[int, Sequence[bytes]] | None = None,
        split: Split = NOT_SPLIT,
    ) -> None:
        """Record a request that has arrived and that the pool can serve. `hints`: the hints that came with it.
        `adapter`: its LoRA adapter, whose digest may become known later. `extras`, `split`: as of `RequestState`."""
        state = self._requests[request.request_id] = RequestState(
            request=request,
            hints=hints,
            weights=self._weights,
            adapter=adapter,
            extras=extras,
            split=split,
            prompt=request.num_tokens,
        )
        waiting = sum(other.lookup is not None and not other.placed for other in self._requests.values())
        if waiting < EARLY_LOOKUPS:
            self._begin_lookup(state)

    def bring(self, name: str, bring: Bring) -> bool:
        """Bring a prompt to this node, as the request `name` wants. Never waits. Returns False where the pool, or the
        digest of the request's adapter, is not there, and where the daemon takes no request now."""
        state, pool = self._requests.get(name), None if self._stopped else self._pool()
        if state is None or pool is None or not pool.connected or not state.identified:
            return False
        salt = self._settings.salt
        keys = state.keys(pool, salt) if bring.tokens is None else state.keys_of(pool, salt, bring.tokens)
        try:
            pool.engine.prefetch(keys, bring.source)
        except TokenLakeError:
            return False
        return True

    def matched(self, request: Any, computed: int, *, reads: bool = True) -> int | None:
        """The number of tokens to load behind the first `computed`; None: not known yet, and vLLM asks again. `reads`:
        False where the request must not read the pool."""
        state = self._requests.get(request.request_id)
        if state is None:
            return 0
        # Also a request that loads nothing gets other blocks after a preemption: its saves and the number of tokens in
        # vLLM's own cache begin anew.
        if state.placed:
            state.placed = False
            state.split = replace(state.split, prefill=None)
            state.waits_since, state.waited = None, False
            state.may_store = True
            # Its earlier saves read blocks that it has lost: vLLM keeps none for them.
            state.last_job = 0
        state.local, state.skipped, state.remote = computed, 0, 0
        if state.lookup is not None:
            state.lookup.takes(computed, computed)
        if state.adapter is not None and state.adapter.refused:
            self._counters.add(requests_not_served=1)
            del self._requests[request.request_id]
            return 0
        if not (reads and state.may_load):
            return 0
        if not state.identified:
            return self._unidentified(state)
        if state.adapter is not None and not self._cached_adapters.may_load(state.adapter):
            self._end_wait(state)
            self._waits.answered(request.request_id)
            state.drop_lookup()
            return 0
        if state.lookup is None:
            self._begin_lookup(state)
        lookup = state.lookup
        if lookup is None:
            return 0
        if state.waits_since is None:
            state.waits_since = self._clock()
        if not lookup.poll():
            return self._unanswered(state, lookup)
        self._waits.answered(request.request_id)
        self._end_wait(state)
        if lookup.hits < len(lookup.keys):
            self._markers.computes(state, lookup)
        return self._choose_load(state, lookup)

    def _unidentified(self, state: RequestState) -> int | None:
        """The result of `matched` while the digest of the request's adapter is not known: a request waits for it no
        longer than for a lookup. Its segments are stored if the digest is known by then."""
        if state.waits_since is None:
            state.waits_since = self._clock()
        if self._clock() - state.waits_since < self._settings.match_ms / 1e3:
            return None
        self._counters.add(lookups_late=1)
        self._end_wait(state)
        state.may_load = False
        return 0

    def _unanswered(self, state: RequestState, lookup: Lookup) -> int | None:
        """The result of `matched` while the lookup has no answer. Gives up a lookup that is late or whose wait
        is useless."""
        if lookup.waiting and state.split.prefill is None and self._wait_is_useless(state, lookup):
            state.drop_lookup()
            self._begin_lookup(state, may_wait=False)
            return None if state.lookup is not None else 0
        if not self._lookups.give_up_late(lookup):
            return None
        self._counters.add(lookups_late=1)
        self._end_wait(state)
        self._waits.answered(state.request.request_id)
        state.lookup, state.may_load = None, False
        return 0

    def _end_wait(self, state: RequestState) -> None:
        """Record how long the request has waited for its lookup, which has an answer or is given up."""
        if state.waits_since is not None and not state.waited:
            self._counters.sample(lookup_wait_seconds=self._clock() - state.waits_since)
            state.waited = True

    def _add_load_time(self, owners: tuple[Owner, ...], time: LoadTime) -> None:
        self._costs.add_load(owners, time)
        self._counters.sample(copy_seconds=time.copy_s)
        if not all_local(owners):
            self._counters.sample(fetch_seconds=time.fetch_s)

    def _wait_is_useless(self, state: RequestState, lookup: Lookup) -> bool:
        """True if a request of this engine computes the segments that `lookup` waits for, or if the wait has lasted
        longer than the prefill behind the tokens that vLLM's own cache has by now."""
        if self._waits.computed_here(lookup.keys):
            return True
        limit_s = self._waits.wait(state.request.num_tokens, state.local).total_s
        return state.local > 0 and self._clock() - lookup.started > limit_s

    def _choose_load(self, state: RequestState, lookup: Lookup) -> int:
        """The number of tokens to load of the hit. The lease of the remaining segments is released. The tokens that are
        not loaded are counted when the request gets its blocks, because vLLM may ask again until then."""
        total, start, prefill = state.request.num_tokens, state.local, state.split.prefill
        # Segments that another engine has computed for this one are loaded to the last token but one, whatever the cost
        # of computing them.
        block = self._block if prefill is None else 1
        found = max(start, loadable_until(lookup.hits, total, self._segment, block))
        # `lookup.hits` still counts the segments that an earlier call of this method released (vLLM may ask again);
        # `lookup.owners` has only those that are still leased, so it limits the load.
        until = max(start, min(found, len(lookup.owners) * self._segment))
        stop = until
        if self._settings.weigh_loads and prefill is None:
            stop = self._costs.cheapest_stop(lookup.owners, start, until, total)
        lookup.takes(start, stop)
        if stop < found:
            lookup.keep(-(-stop // self._segment) if stop > start else 0)
        state.skipped = found - stop
        return stop - start

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """To be called when vLLM has given `blocks` to `request`, into which `external` tokens are to be loaded. These
        tokens were promised to vLLM: if an error occurs here, the ranks get a load without a lease, and report its
        blocks as errors."""
        try:
            self._allocated(request, blocks, external)
        except Exception as error:
            self._report("preparing a load", error)
            state = self._requests[request.request_id]
            if external and request.request_id not in self._loads:
                start = state.local
                targets = tuple(blocks[start // self._block : -(-(start + external) // self._block)])
                self._loads.add(LoadPlan(request.request_id, (), 0, start, start + external, targets, local=False))
            state.drop_lookup()

    def _allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        state = self._requests.get(request.request_id)
        if state is None or state.placed:
            return
        state.placed = True
        if state.adapter is not None:
            known = self._cached_adapters.placed(state.adapter, cached=state.local > 0)
            state.may_store = state.may_store and known
        lookup = state.lookup
        start, stop = state.local, state.local + external
        if state.split.prefill is not None:
            state.taken = stop == state.prompt - 1
        lease = lookup.lease if lookup is not None else None
        if lookup is None or lease is None or not external:
            asked = lookup is not None and lookup.answered
            self._counters.add_request(request.num_tokens, start, skipped=state.skipped, asked=asked)
            if lookup is not None:
                lookup.takes(start, start)
                state.drop_lookup()
            return
        lookup.takes(start, stop, self._costs.saved_s(request.num_tokens, start, stop))
        owners = lookup.owners[start // self._segment : -(-stop // self._segment)]
        state.remote = remote_tokens(owners, start, stop, self._segment)
        self._counters.add_request(
            request.num_tokens, start, here=external - state.remote, remote=state.remote, skipped=state.skipped
        )
        targets = tuple(blocks[start // self._block : -(-stop // self._block)])
        local = all_local(owners)
        at_most_s = self._costs.fetch_limit_s(start, stop) if self._settings.weigh_loads else 0.0
        ids = tuple(map(int, lease.ids))
        plan = LoadPlan(
            request.request_id,
            ids,
            lease.incarnation,
            start,
            stop,
            targets,
            local,
            at_most_s,
            adapter=state.adapter_use,
        )
        tail = state.tail if stop > state.prompt // self._segment * self._segment else None
        self._loads.add(plan, lease, owners, None if tail is None else lambda: self._tail_read(tail))
        state.lookup = None
        state.saved = stop // self._segment

    def _tail_read(self, tail: SegmentKey) -> None:
        """Record that a load has read the tail of a prompt, which no other request needs."""
        pool = self._pool()
        if pool is not None:
            pool.hint([tail], READ)

    def remote_tokens(self, request: str) -> int:
        """The number of tokens in segments of other nodes, in the load that was planned when vLLM last gave `request`
        blocks."""
        state = self._requests.get(request)
        return state.remote if state is not None else 0

    def step(self, scheduled: Sequence[ScheduledPart], table: Callable[[str], Sequence[int]]) -> StepPlan:
        """The plan of loads and saves that the ranks get for the engine's next step. `table` returns the blocks of a
        scheduled request, by the request's name. Never raises: after an error the plan is that of `unknown_step`."""
        self._step += 1
        loads = self._loads.hand_out()
        try:
            return self._plan_step(loads, scheduled, table)
        except Exception as error:
            self._report("planning a step", error)
            return self._without_pool(loads)

    def unknown_step(self) -> StepPlan:
        """The plan of a step whose requests are not known: its loads fail, no segment is stored, and the blocks of all
        save jobs count as handed out again."""
        self._step += 1
        return self._without_pool(self._loads.hand_out())

    def _without_pool(self, loads: tuple[LoadPlan, ...]) -> StepPlan:
        # The ranks must get each load that was promised to vLLM. Without a session they report its blocks as errors.
        return StepPlan(step=self._step, loads=loads, reused=self._saves.jobs)

    def _plan_step(
        self, loads: tuple[LoadPlan, ...], scheduled: Sequence[ScheduledPart], table: Callable[[str], Sequence[int]]
    ) -> StepPlan:
        self._prefills.begin(self._step, scheduled)
        saves = list(self._last_saves)
        try:
            reused = self._saves.reading(self._blocks_written(scheduled, loads))
        except Exception as error:
            self._report("finding blocks that are handed out again", error)
            reused = self._saves.jobs
        for part in scheduled:
            state = self._requests.get(part.request)
            if state is not None:
                computed = part.computed + part.new
                if state.marker_s and computed < state.request.num_tokens:
                    self._markers.set(state, state.marker_s)
                    state.marker_s = 0.0
                saves += self._plan_saves(state, min(computed, state.request.num_tokens), table)
        pool = self._pool()
        connected = pool is not None and pool.connected
        session = pool.engine.session if pool is not None and connected else 0
        incarnation = pool.engine.incarnation if pool is not None and connected else 0
        # The ranks get these saves with this plan, so an error must not come after this line.
        held, self._held, self._last_saves = self._held, [], []
        return StepPlan(
            step=self._step,
            session=session,
            incarnation=incarnation,
            idle=not scheduled,
            loads=loads,
            saves=tuple(saves),
            reused=reused,
            held=tuple(held),
        )

    def worker_output(self, report: StepReport | None, received: Sequence[str], invalid: set[int]) -> None:
        """Take the outcome of a step. `report`: the combined report of all ranks. `received`: the requests whose
        asynchronous loads ended. `invalid`: the blocks that loads should have filled and did not."""
        if report is not None:
            self._loads.add_times(report.loaded)
        if invalid:
            self._fail_loads(invalid)
        for request in received:
            self._loads.end(request)
        if report is not None:
            self._take_report(report)
        for state in self._requests.values():
            # This poll begins the request for the nodes of the segments as early as possible: if a lookup has found
            # segments on other nodes, its poll asks for the nodes.
            if state.lookup is not None:
                with contextlib.suppress(TokenLakeError):
                    state.lookup.poll()

    def _take_report(self, report: StepReport) -> None:
        for step, seconds in report.computed.items():
            self._prefills.end(step, seconds)
        if not report.serves:
            self._stopped = True
        self._saves.done(report.done)
        self._markers.done(report.done)

    def finished(self, request: Any, blocks: Sequence[int], end: RequestEnd) -> tuple[bool, Offer | None]:
        """To be called when `request` has finished. Returns (True: vLLM must keep its blocks until the ranks report
        that its saves are done; the segments that the engine that decodes the request is to wait for)."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        self._waits.ended(request.request_id)
        state.drop_lookup()
        try:
            state.end(end, None if self._stopped else self._pool(), self._settings.salt)
        except Exception as error:
            self._report("sending hints", error)
        if state.taken is not None:
            self._counters.add(prefills_taken=state.taken, prefills_recomputed=not state.taken)
        if not end.complete:
            self._markers.set(state, 0.0)
            return self._moves(state, end), None
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        saves = self._plan_saves(state, computed, lambda _: blocks)
        self._last_saves += saves
        if not saves and not state.offered:
            return False, None
        keep = state.last_job in self._saves.jobs
        if keep:
            self._held.append((request.request_id, state.last_job))
        if not state.offered:
            return keep, None
        self._counters.add(prefills_offered=1)
        return keep, Offer(state.offered, state.prompt, self._costs.prefill_s(state.prompt, 0))

    def _moves(self, state: RequestState, end: RequestEnd) -> bool:
        """Let another engine go on with a request that was aborted here: it waits for the segments that are handed out
        and not stored yet. Returns whether vLLM must keep the request's blocks for that."""
        pool = self._pool()
        if end.stop_reason != "abort" or pool is None or state.last_job not in self._saves.jobs:
            return False
        self._markers.move(state, self._saves.first_unfinished(state.request.request_id))
        self._held.append((state.request.request_id, state.last_job))
        return True

    def new_weights(self, digest: str) -> None:
        """To be called when the weights have changed: keys are hashed with this digest from now on. Saves that were
        handed out before store results of the old weights, under the old keys. A request that has blocks stores nothing
        more until it loses them; a request without blocks begins a new lookup."""
        self._weights = digest
        # This loop ends before any marker is removed: `InFlightMarkers.set` keeps the markers of segments that a
        # request of this engine counts as computing.
        for name in self._requests:
            self._waits.ended(name)
        for state in self._requests.values():
            state.drop_lookup()
            self._markers.set(state, 0.0)
            state.saved = 0
            state.weights, state.prefix, state.gap, state.marker_s = digest, None, None, 0.0
            state.offered, state.tail = None, None
            state.may_store = not state.placed

    def cache_emptied(self) -> None:
        """To be called when vLLM's own cache was emptied."""
        self._cached_adapters.emptied()

    def close(self) -> None:
        """Release all leases and reservations that the scheduler's side holds."""
        for state in self._requests.values():
            state.drop_lookup()
        self._loads.close()
        self._saves.close()
        self._requests.clear()

    def _begin_lookup(self, state: RequestState, *, may_wait: bool = True) -> None:
        """Begin a lookup and set `state.lookup`, which stays None if there is no pool or no segment to look up, or
        while the daemon owes an answer. `may_wait`: the lookup may wait for another engine that computes the prompt."""
        pool = None if self._stopped else self._pool()
        total = state.request.num_tokens
        count = loadable_segments(total, self._segment, self._block)
        prefill = state.split.prefill
        if pool is None or not state.identified or not (count or prefill):
            return
        keys = state.keys(pool, self._settings.salt)[:count]
        name = state.request.request_id
        self._waits.answered(name)
        if prefill is not None:
            keys, wait = self._computed_elsewhere(pool, state, prefill)
        elif may_wait:
            wait = self._waits.begin(name, keys, total, state.local)
        else:
            wait = NO_WAIT
        if keys:
            traceparent = traceparent_of(state.request)
            state.lookup = self._lookups.begin(pool, keys, name, state.hints, total, wait, traceparent)

    def _computed_elsewhere(
        self, pool: Pool, state: RequestState, prefill: RemotePrefill
    ) -> tuple[Sequence[SegmentKey], InFlightWait]:
        """The keys to look up of a prompt that another engine has computed, and how long the lookup may wait for them.
        If that engine has other keys (another model, salt or prompt), the request is served as any other."""
        full = state.prompt // self._segment
        keys = list(state.keys(pool, self._settings.salt)[:full])
        tail = state.tail_key(pool, self._settings.salt, self._segment) if prefill.keys else None
        own = keys if tail is None else [*keys, tail]
        if prefill.keys != tuple(key.hex() for key in own[: len(prefill.keys)]):
            self._refuse(
                f"request {state.request.request_id[:100]!r} is served as if no other engine had computed it: its "
                "kv_transfer_params name segments with other keys than this engine's, so the engines differ in layout "
                "(model, weights, dtype, segment_tokens), tenant or salt, or the prompts differ"
            )
            state.split, state.taken = NOT_SPLIT, False
            return keys, NO_WAIT
        keys = own[: len(prefill.keys)] if prefill.keys else keys
        state.tail = tail if tail in keys else None
        return keys, self._waits.for_prefill(prefill, state.prompt)

    def _plan_saves(self, state: RequestState, computed: int, table: Callable[[str], Sequence[int]]) -> list[SavePlan]:
        """The plans that store the segments of one request among its first `computed` tokens, whose ids are known.
        `table`: as of `step`. Never raises: after an error the step goes on without them, and the segments are offered
        again in the request's next step."""
        if not state.may_store or not state.identified:
            return []
        segments = state.take(computed // self._segment)
        offers = state.split.decodes_elsewhere and computed >= state.prompt and state.offered is None
        if not (segments or offers) or not self._settings.save or self._stopped:
            return []
        saves: list[SavePlan] = []
        try:
            pool = self._pool()
            if pool is not None and pool.connected:
                if segments:
                    saves += self._saves.plan(pool, state, segments, table)
                if offers:
                    saves += self._plan_offer(pool, state, table)
        except Exception as error:
            self._report("planning which segments to store", error)
            if not saves:
                state.saved = segments.start
        return saves

    def _plan_offer(self, pool: Pool, state: RequestState, table: Callable[[str], Sequence[int]]) -> list[SavePlan]:
        """The plan that stores the tail of a prompt for the engine that decodes it. Sets the in-flight markers of the
        prompt's segments before that engine can ask for them, and `state.offered`. Raises the errors of the pool."""
        full = state.prompt // self._segment
        saves: list[SavePlan] = []
        count = min(full, state.saved)
        keys = list(state.keys(pool, self._settings.salt)[:count])
        tail = state.tail_key(pool, self._settings.salt, self._segment)
        if tail is not None and count == full and self._tails.take(state.prompt):
            saves, granted = self._saves.plan_tail(pool, state, tail, table)
            keys += [tail] if granted else []
        if state.last_job in self._saves.jobs:
            # The segments before are stored or refused.
            pool.engine.mark_in_flight(keys[self._saves.first_unfinished(state.request.request_id) :], LONGEST_S)
        state.offered = tuple(keys)
        return saves

    def _blocks_written(self, scheduled: Sequence[ScheduledPart], loads: Sequence[LoadPlan]) -> set[int]:
        """The blocks that the step may write: those that loads fill, and those that requests were given for this step,
        except the ones that they share in vLLM's own cache."""
        written: set[int] = set()
        if not self._saves.jobs:
            return written
        for load in loads:
            written.update(load.blocks)
        for part in scheduled:
            state = self._requests.get(part.request)
            shared = state.local // self._block if state is not None and part.whole else 0
            written.update(part.blocks[shared:])
        return written

    def _fail_loads(self, invalid: set[int]) -> None:
        for name in self._loads.fail(invalid):
            if name in self._requests:
                # The request loads nothing more, because a second attempt would read the same segment again.
                state = self._requests[name]
                state.may_load = False
                state.taken = None if state.taken is None else False
                if state.adapter is not None:
                    self._cached_adapters.load_failed(state.adapter)
                self._counters.add(loads_failed=1)
        for state in self._requests.values():
            # All segments are offered again: one that could not be read may be lost.
            state.saved, state.offered = 0, None
