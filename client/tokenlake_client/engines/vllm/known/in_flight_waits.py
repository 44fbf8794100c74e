"""The waits of lookups for other engines, and the markers for which other engines wait. Imports no engine.

A lookup may wait in the daemon for another engine that is computing the missing segments (in-flight segments)::

    another engine computes them     the daemon answers when they are stored, or when the wait is over
    no engine computes them          the daemon answers at once and sets the in-flight marker for this engine, which
                                     computes them while other engines wait. Where that takes several steps, the
                                     scheduler's side sets the markers of the remaining segments
    a request of this engine does    the lookup does not wait: vLLM's own cache has the tokens before they are stored

A lookup of a prompt that another engine has computed for this one (`disaggregated`) always waits: neither costs nor
other requests of this engine keep it from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenlake.identity import SegmentKey
from tokenlake_client.engines.common.in_flight import FACTOR, LEAST_S, LONGEST_S, NO_WAIT, InFlightWait, wait_for
from tokenlake_client.engines.vllm.known.disaggregated import EXPECTED_S, LEAST_WAIT_S, RemotePrefill
from tokenlake_client.engines.vllm.known.load_cost import LoadCosts
from tokenlake_client.engines.vllm.known.lookup import Lookup
from tokenlake_client.engines.vllm.known.request import RequestState
from tokenlake_client.pool import Pool

MAX_WAITING = 16
"""Limit of the lookups that may wait for other engines at a time: the segments that a lookup has found stay leased
while it waits."""


class InFlightWaits:
    """Decides whether and how long a lookup waits for another engine. For the scheduler's thread."""

    def __init__(self, costs: LoadCosts, segment_tokens: int, *, stores: bool) -> None:
        """`stores`: True where this engine stores the segments that it computes."""
        self._costs = costs
        self._segment = segment_tokens
        self._stores = stores
        self._computing: dict[str, tuple[int, SegmentKey]] = {}
        """For each request, the first segment that this engine computes: its index in the prompt, and its key."""
        self._waiting: dict[str, None] = {}
        """The names of the requests whose lookup may wait for another engine and was not answered yet."""

    def begin(self, request: str, keys: Sequence[SegmentKey], total: int, local: int) -> InFlightWait:
        """The wait that a new lookup of `request` may make. The prompt has `total` tokens and these keys; vLLM's own
        cache has the first `local` tokens."""
        if len(self._waiting) >= MAX_WAITING or self.computed_here(keys):
            return NO_WAIT
        wait = self.wait(total, local)
        if wait.total_s:
            self._waiting[request] = None
        return wait

    def for_prefill(self, prefill: RemotePrefill, total: int) -> InFlightWait:
        """The wait of a lookup for a prompt of `total` tokens that another engine has computed and is storing."""
        seconds = self._costs.prefill_s(total, 0)
        predicted_s = prefill.seconds if seconds is None else seconds
        return InFlightWait(min(max(LEAST_WAIT_S, FACTOR * predicted_s), LONGEST_S), 0.0, EXPECTED_S)

    def answered(self, request: str) -> None:
        """Record that the lookup of `request` does not wait for another engine any more."""
        self._waiting.pop(request, None)

    def wait(self, total: int, local: int) -> InFlightWait:
        """The wait of a lookup for the tokens of a prompt behind its first `local` ones. `NO_WAIT` until the time of a
        prefill is known, where a load takes longer than the prefill, and where this engine stores nothing."""
        prefill_s = self._costs.prefill_s(total, local)
        if not self._stores or prefill_s is None or prefill_s < LEAST_S or not self._costs.pays(total):
            return NO_WAIT
        return wait_for(prefill_s, self._costs.prefill_s(total, max(0, total - self._segment)) or 0.0)

    def computes(self, request: str, index: int, key: SegmentKey) -> None:
        """Record that `request` computes its segment `index`, which has this key, because the pool does not have it."""
        self._computing[request] = index, key

    def ended(self, request: str) -> None:
        """Record that `request` has finished: it neither waits nor computes."""
        self.answered(request)
        self._computing.pop(request, None)

    def computed_here(self, keys: Sequence[SegmentKey]) -> bool:
        """True if a request of this engine computes a segment of the prompt with these keys. That may be the request
        that has the prompt, if it has lost its blocks."""
        return any(index < len(keys) and keys[index] == key for index, key in self._computing.values())


class InFlightMarkers:
    """Sets and removes the in-flight markers of the segments that this engine computes. For the scheduler's thread."""

    def __init__(
        self,
        pool: Callable[[], Pool | None],
        waits: InFlightWaits,
        salt: str | None,
        report: Callable[[str, BaseException], None],
        *,
        stores: bool,
    ) -> None:
        """`pool` returns the pool or None. `salt`: that of the engine. `report`, `stores`: as of the scheduler's
        side and of `InFlightWaits`."""
        self._pool = pool
        self._waits = waits
        self._salt = salt
        self._report = report
        self._stores = stores
        self._moving: dict[int, tuple[Sequence[SegmentKey], int]] = {}
        """By the number of the last save job of a request that moves: the keys of its segments, and the index of the
        first one that has an in-flight marker until the job is done."""

    def computes(self, state: RequestState, lookup: Lookup) -> None:
        """Record that this engine computes the segments that the lookup has not found. If the lookup could wait, the
        daemon has set the in-flight marker of the first one for this engine."""
        first = lookup.keys[lookup.hits]
        self._waits.computes(state.request.request_id, lookup.hits, first)
        if lookup.wait.total_s and (first == state.tail or not self._stores):
            # This engine does not store the segment.
            pool = self._pool()
            if pool is not None:
                pool.engine.mark_in_flight([first], 0.0)
        elif lookup.wait.total_s:
            state.gap, state.marker_s = lookup.hits, lookup.marker_s

    def set(self, state: RequestState, seconds: float) -> None:
        """Set markers, which last for `seconds`, for the segments of the prompt that the pool lacks. 0 removes them,
        unless another request of this engine computes the same segments. Never raises."""
        pool = self._pool()
        if pool is None or state.gap is None:
            return
        try:
            keys = state.keys(pool, self._salt)
            if seconds:
                pool.engine.mark_in_flight(keys[state.gap :], seconds)
            else:
                self._withdraw(keys, state.gap)
        except Exception as error:
            self._report("setting in-flight markers", error)

    def move(self, state: RequestState, first: int) -> None:
        """Set markers for the segments from index `first` on that were handed out and not stored yet: another engine
        goes on with the request. Never raises."""
        pool = self._pool()
        if pool is None:
            return
        try:
            keys = list(state.keys(pool, self._salt)[: state.saved])
            pool.engine.mark_in_flight(keys[first:], LONGEST_S)
            self._moving[state.last_job] = keys, first
        except Exception as error:
            self._report("setting in-flight markers", error)

    def done(self, job: int) -> None:
        """Record that the save jobs up to `job` are done: markers end when their segments are stored, and those of
        refused segments are removed here, so that no other engine waits for them."""
        for number in [number for number in self._moving if number <= job]:
            self._withdraw(*self._moving.pop(number))

    def _withdraw(self, keys: Sequence[SegmentKey], first: int) -> None:
        """Remove the markers of a prompt's segments from index `first` on, unless another request of this engine
        computes them."""
        pool = self._pool()
        if pool is not None and not self._waits.computed_here(keys):
            pool.engine.mark_in_flight(keys[first:], 0.0)
