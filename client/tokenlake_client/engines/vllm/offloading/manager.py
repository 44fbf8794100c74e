"""The side of the connector in vLLM's scheduler, behind vLLM's OffloadingConnector. Imports no engine.

No method waits for the daemon, but for the reservation of slots that several ranks fill. vLLM calls the methods for a
request in this order::

    new_request       record the request
    lookup            for each chunk, again in each step, until no answer is RETRY or PENDING
    prepare_load      the job that loads the hits; complete_load when all ranks have ended it
    step_ends         the step's requests are known: wanted chunks are fetched, leases that are not needed end
    prepare_store     the job that stores chunks; complete_store when all ranks have ended it
    finished          the request ends; its jobs may end later
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tokenlake.errors import Unreachable
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.engines.vllm.adapters import CachedAdapters, RequestAdapter
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.offloading.chunks import HASH_BYTES, parse_key
from tokenlake_client.engines.vllm.offloading.jobs import NOWHERE, LoadJob, Member, StoreJob
from tokenlake_client.engines.vllm.offloading.lookup import ChunkLookup, Found
from tokenlake_client.engines.vllm.polled_match import LateLookup
from tokenlake_client.engines.vllm.served_request import ServedRequest
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.match import MatchOptions
from tokenlake_client.pool import Pool
from tokenlake_client.write import Reservation

OPEN_S = 2.0
"""Seconds from the first lookup on in which requests wait for the reports of the ranks and for the first connection to
the daemon. Later requests do not wait."""
FETCH_QUEUE = 256


@dataclass(slots=True, kw_only=True)
class _Request(ServedRequest):
    name: str
    traceparent: str | None = None
    """The span of the request's caller."""
    adapter_due: float = 0.0
    """The time until which the request waits for the digest of its adapter."""
    lookup: ChunkLookup | None = None
    tails: ChunkLookup | None = None
    """The lookup of the tails that may follow the chunks found."""
    asked_tails: list[bytes] = field(default_factory=list)
    """The tails that vLLM has asked for since the last `tails_wait`, and that are not looked up."""
    tail_unanswered: bool = False
    """True: an answer for a tail since then was RETRY or PENDING."""
    may_load_tail: bool = True
    tokens: Callable[[], int] = int
    """Returns the number of the request's tokens that are known."""

    @property
    def lookups(self) -> list[ChunkLookup]:
        """The lookups that have begun."""
        return [lookup for lookup in (self.lookup, self.tails) if lookup is not None]


class ChunkManager:
    """Looks chunks up, and plans the jobs of the ranks. One per engine. For the scheduler's thread."""

    def __init__(
        self,
        settings: EngineSettings,
        counters: EngineCounters,
        report: Callable[[str, BaseException], None],
        refuse: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`refuse` logs the reason why the pool does not serve the engine."""
        self._settings = settings
        self._counters = counters
        self._report = report
        self._log_refusal = refuse
        self._clock = clock
        self._deadline_s = settings.match_ms / 1e3
        self._late = LateLookup(clock)
        self._pool: Callable[[], Pool | None] | None = None
        self._layout: OpaqueLayout | None = None
        self._stopped = False
        self._open_until: float | None = None
        self._requests: dict[str, _Request] = {}
        self._looking: dict[str, _Request] = {}
        """The requests that have a lookup."""
        self._loads: dict[str, list[ChunkLookup]] = {}
        """The lookups whose segments are being loaded, by request."""
        self._reservations: dict[frozenset[bytes], Reservation] = {}
        """The slots that ranks are filling, by the chunks of the job."""
        self.counted_group = 0
        """The number of the cache group whose chunks stand for the tokens of a prompt."""
        self._cached_adapters = CachedAdapters()
        self._weights: str | None = None
        self._starts: BackgroundQueue[ChunkLookup] = BackgroundQueue(ChunkLookup.start, "tokenlake-lookup")
        self._fetches: BackgroundQueue[tuple[ChunkLookup, list[int]]] = BackgroundQueue(
            lambda task: self._fetch(*task), "tokenlake-fetch", FETCH_QUEUE
        )

    @property
    def silent(self) -> bool:
        """True if the daemon has not answered a late lookup for more than `lookup.SILENT_S`."""
        return self._late.silent

    def open(self, pool: Callable[[], Pool | None], layout: OpaqueLayout) -> None:
        """Use the pool from now on. `pool` returns it or None, and must not wait. `layout`: that of the pool. Any
        thread may call this method."""
        self._layout = layout
        self._pool = pool

    def stop(self, reason: str) -> None:
        """Do not use the pool, and log the reason."""
        if not self._stopped:
            self._stopped = True
            self._log_refusal(reason)

    def new_request(
        self,
        name: str,
        hints: Hints | None = None,
        tokens: Callable[[], int] = int,
        adapter: RequestAdapter | None = None,
        traceparent: str | None = None,
    ) -> None:
        """Record a request that has arrived and that the pool serves. `tokens` returns the number of its tokens that
        are known. `adapter`: its LoRA adapter. `traceparent`: the span of its caller."""
        due = self._clock() + self._settings.match_ms / 1e3
        state = _Request(
            name=name, hints=hints, tokens=tokens, adapter=adapter, adapter_due=due, traceparent=traceparent
        )
        self._requests[name] = state
        self._record_adapter(state)

    def takes(self, name: str, start: int, stop: int) -> None:
        """Record that vLLM's own cache has the tokens of a request before `start`, and that those up to `stop` are
        loaded."""
        for lookup in self._lookups(name):
            lookup.takes(start, stop)

    def cache_emptied(self) -> None:
        """Record that vLLM's own cache was emptied."""
        self._cached_adapters.emptied()

    @property
    def waiting(self) -> bool:
        """True if a request waits for a lookup or a load, which run in the background."""
        return bool(self._looking or self._loads)

    def asked(self, name: str) -> bool:
        """True if the pool has answered the lookup of a request that is given its blocks."""
        return bool(self._lookups(name))

    def remote(self, name: str, key: bytes) -> bool:
        """True if a chunk that is loaded for a request was on another node."""
        return any(lookup.remote(key) for lookup in self._loads.get(name, ()))

    def leading(self, name: str, keys: Sequence[bytes]) -> int:
        """The number of chunks of `keys`, from the first on, that the lookup of a request has found in the pool."""
        state = self._requests.get(name)
        return state.lookup.leading(keys) if state is not None and state.lookup is not None else 0

    def lookup(self, name: str, key: bytes, chunks: Callable[[], Sequence[bytes]]) -> Found:
        """The answer whether the chunk `key` can be loaded for a request. `chunks` returns the keys of all chunks of
        the request. Raises the errors of the pool; the chunk is a miss then, and the request does not use the pool
        again."""
        state = self._requests.get(name)
        if state is None or not state.may_load or self._stopped:
            return Found.MISS
        if state.lookup is None:
            began = self._begin(state, chunks)
            if isinstance(began, Found):
                return began
            state.lookup = began
            return Found.RETRY
        found = self._find(state, state.lookup, key)
        if found is None:
            state.lookup = None
            self._give_up(state).may_load = False
        return found or Found.MISS

    def lookup_tail(self, name: str, key: bytes) -> Found:
        """The answer whether a tail can be loaded for a request: a chunk that ends within its last block. vLLM asks for
        tails once it knows which whole chunks there are, so they have a lookup of their own. Raises as `lookup`."""
        state = self._requests.get(name)
        if state is None or not (state.may_load and state.may_load_tail) or self._stopped:
            return Found.MISS
        if state.tails is None:
            state.asked_tails.append(key)
            return Found.RETRY
        found = self._find(state, state.tails, key)
        if found is None:
            state.tails, state.may_load_tail = None, False
        elif found in (Found.RETRY, Found.PENDING):
            state.tail_unanswered = True
        return found or Found.MISS

    def tails_wait(self, name: str) -> bool:
        """True if vLLM must ask for the tails of a request again, because some of its questions since the last call are
        not answered: it would otherwise take the whole chunks alone. Begins the lookup of the tails. Raises the errors
        of the pool."""
        state = self._requests.get(name)
        if state is None:
            return False
        asked, state.asked_tails = state.asked_tails, []
        waits, state.tail_unanswered = state.tail_unanswered, False
        if asked and state.tails is None:
            began = self._begin(state, lambda: asked, tails=True)
            if isinstance(began, ChunkLookup):
                state.tails = began
            waits = began is not Found.MISS
            state.may_load_tail = waits
        return waits

    def prepare_load(self, name: str, keys: Collection[bytes]) -> LoadJob:
        """The job that loads the chunks `keys`. All other chunks of the request's lookups are released. Never raises: a
        chunk that cannot be loaded fails on the ranks."""
        groups = tuple(parse_key(key)[0] for key in keys)
        state = self._requests.get(name)
        if state is None or not state.lookups:
            return LoadJob(NOWHERE, name, (), (-1,) * len(keys), groups)
        self._loads[name] = state.lookups
        self._take(state).may_load = False
        try:
            return self._load_job(state, keys, groups)
        except Exception as error:
            self._report("preparing a load", error)
            return LoadJob(NOWHERE, name, (), (-1,) * len(keys), groups)

    def _load_job(self, state: _Request, keys: Collection[bytes], groups: tuple[int, ...]) -> LoadJob:
        """The job of `prepare_load`, out of all lookups of the request."""
        ids: list[int] = []
        segments: dict[bytes, int] = {}
        incarnations, first = set(), 0
        for lookup in self._loads[state.name]:
            parts = lookup.keep(keys)
            if lookup.lease is None or parts is None or not parts.ids:
                continue
            incarnations.add(int(lookup.lease.incarnation))
            ids += map(int, parts.ids)
            indices = ((key, lookup.segment(key)) for key in keys)
            segments.update((key, first + parts.within[index]) for key, index in indices if index is not None)
            first += parts.hits
        # The leases of an earlier incarnation of the daemon have ended, and their numbers may name others.
        member = self._member(incarnations.pop()) if len(incarnations) == 1 else NOWHERE
        of_keys = tuple(segments.get(key, -1) for key in keys)
        return LoadJob(member, state.name, tuple(ids), of_keys, groups, state.adapter_use)

    def complete_load(self, name: str) -> None:
        """Record that all ranks have ended the load of a request."""
        _drop(self._loads.pop(name, ()))

    def load_failed(self, name: str) -> None:
        """Count a load that failed on a rank. `name`: its request; another connector may be the one that loads it."""
        if name in self._loads:
            self._counters.add(loads_failed=1)
            for lookup in self._loads[name]:
                lookup.fails()

    def step_ends(self, begun: Iterable[str], preempted: Iterable[str]) -> None:
        """A step was scheduled. `begun`: the requests that compute for the first time; they load nothing more.
        `preempted`: the requests that lost their blocks; they begin anew."""
        for name in preempted:
            if name in self._requests:
                state = self._requests[name]
                self._give_up(state)
                state.placed, state.may_load, state.may_store, state.may_load_tail = False, True, True, True
        for name in begun:
            if name in self._requests:
                state = self._requests[name]
                self._give_up(state)
                state.placed = True
                self._record_adapter(state)
        for state in list(self._looking.values()):
            for lookup in state.lookups:
                wanted = lookup.take_wanted()
                if wanted and not self._fetches.submit((lookup, wanted)):
                    self._give_up(state).may_load = False

    def prepare_store(self, name: str, keys: Sequence[bytes]) -> tuple[Sequence[bytes], StoreJob] | None:
        """The chunks of `keys` that are stored, and the job that stores them; None: nothing is stored. Raises the
        errors of the pool."""
        state = self._requests.get(name)
        if state is not None:
            self._record_adapter(state)
        if state is None or not (state.may_store and self._settings.save) or self._stopped:
            return None
        pool = self._pool() if self._pool is not None else None
        if pool is None or not pool.connected or not self._hashed(keys) or not state.identified:
            return None
        segments = self._segment_keys(pool, state, keys, self._weights)
        groups = tuple(parse_key(key)[0] for key in keys)
        member = self._member(int(pool.engine.incarnation))
        packed = tuple(map(bytes, segments))
        if self._layout is None or self._layout.shards == 1:
            return keys, StoreJob(member, name, packed, groups, hints=state.hints, adapter=state.adapter_use)
        deadline_s = self._settings.match_ms / 1e3
        reservation = pool.engine.reserve(segments, deadline_s=deadline_s, request=name, hints=state.hints)
        if not reservation.id:
            return None
        self._reservations[frozenset(keys)] = reservation
        return keys, StoreJob(member, name, packed, groups, int(reservation.id), adapter=state.adapter_use)

    def complete_store(self, keys: Collection[bytes]) -> None:
        """Record that all ranks have ended the job that stores the chunks `keys`."""
        reservation = self._reservations.pop(frozenset(keys), None)
        if reservation is not None:
            reservation.release()

    def finished(self, name: str) -> None:
        """A request has ended. A load of it that is under way keeps its lease."""
        state = self._requests.pop(name, None)
        if state is not None:
            self._give_up(state)

    def new_weights(self, digest: str) -> None:
        """The weights may have changed: `digest` is part of all keys from now on. Requests that have blocks, or are
        loading them, store nothing more. vLLM forgets the jobs under way."""
        self._weights = digest
        for state in self._requests.values():
            state.may_store = not state.placed and state.name not in self._loads
            self._give_up(state)
        for reservation in self._reservations.values():
            reservation.release()
        self._reservations.clear()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until lookups that have begun are sent, and wanted chunks are fetched; False when `timeout` seconds were
        not enough."""
        return self._starts.flush(timeout) and self._fetches.flush(timeout)

    def close(self) -> None:
        """Release all leases and reservations."""
        for state in self._requests.values():
            self._give_up(state)
        for name in list(self._loads):
            self.complete_load(name)
        for reservation in self._reservations.values():
            reservation.release()
        self._requests.clear()
        self._loads.clear()
        self._reservations.clear()
        self._starts.close(1.0, drain=False)
        self._fetches.close(1.0, drain=False)

    def _find(self, state: _Request, lookup: ChunkLookup, key: bytes) -> Found | None:
        """The answer of a lookup for one chunk; None: the answer is late, and the lookup is given up. Raises the errors
        of the pool; the request does not use it again."""
        try:
            if lookup.poll():
                return lookup.find(key)
        except Exception:
            self._give_up(state).may_load = False
            raise
        if self._clock() < lookup.due:
            return Found.RETRY
        self._late.give_up(lookup)
        self._counters.add(lookups_late=1)
        return None

    def _begin(
        self, state: _Request, chunks: Callable[[], Sequence[bytes]], *, tails: bool = False
    ) -> ChunkLookup | Found:
        """Begin a lookup of a request, of chunks or of `tails`. RETRY while the pool is being opened or the adapter's
        digest is not known; MISS if the pool is not used."""
        if self._pool is None:
            if self._open_until is None:
                self._open_until = self._clock() + OPEN_S
            return Found.RETRY if self._clock() < self._open_until else Found.MISS
        pool = self._pool()
        asked = chunks() if pool is not None else ()
        if pool is None or not asked or not self._hashed(asked):
            return Found.MISS
        if not state.identified:
            refused = state.adapter is not None and state.adapter.refused
            waits = not refused and self._clock() < state.adapter_due
            return Found.RETRY if waits else Found.MISS
        weights = self._weights
        if not self._late.answered():
            return Found.MISS
        counted = [key for key in asked if parse_key(key)[0] == self.counted_group and not tails]
        if not tails:
            asked = [*counted, *(key for key in asked if parse_key(key)[0] != self.counted_group)]
        options = MatchOptions(
            request=state.name,
            hints=state.hints,
            prompt_tokens=state.tokens(),
            independent=True,
            counted_keys=len(counted),
            traceparent=state.traceparent,
        )
        lookup = ChunkLookup(
            lambda: pool.engine.begin_match(
                self._segment_keys(pool, state, asked, weights), options, deadline_s=self._deadline_s
            ),
            asked,
            self._deadline_s,
            self._clock,
            verify=self._settings.verify,
        )
        if not self._starts.submit(lookup):
            lookup.start()
        self._looking[state.name] = state
        return lookup

    def _record_adapter(self, state: _Request) -> None:
        """Record that the request's adapter computes. Parts of a block in vLLM's own cache are not reported to a
        connector, so that each request counts as one with tokens in that cache."""
        if state.adapter is not None and not self._cached_adapters.placed(state.adapter, cached=True):
            state.may_store = False

    def _take(self, state: _Request) -> _Request:
        """Remove the lookups from a request, and return the request."""
        self._looking.pop(state.name, None)
        state.lookup = state.tails = None
        return state

    def _lookups(self, name: str) -> list[ChunkLookup]:
        """The lookups of a request that waits, or that is loading."""
        state = self._requests.get(name)
        return self._loads.get(name) or (state.lookups if state is not None else [])

    def _member(self, incarnation: int) -> Member:
        """The description by which a rank joins the session at the daemon of this incarnation."""
        pool = self._pool() if self._pool is not None else None
        if pool is None or self._layout is None:
            return NOWHERE
        return Member(pool.engine.session, incarnation, self._layout.encode(), self._layout.shard_bytes)

    def _give_up(self, state: _Request) -> _Request:
        """Remove the lookups from a request, release their leases, and return the request."""
        lookups = state.lookups
        self._take(state)
        _drop(lookups)
        return state

    def _segment_keys(
        self, pool: Pool, state: _Request, keys: Iterable[bytes], weights: str | None
    ) -> list[SegmentKey]:
        adapter = None if state.adapter is None else state.adapter.digest
        return pool.opaque_keys(map(parse_key, keys), adapter=adapter, salt=self._settings.salt, weights_digest=weights)

    def _hashed(self, keys: Sequence[bytes]) -> bool:
        """True if vLLM has hashed the blocks with SHA-256. Otherwise two prompts may have one hash, and the pool is not
        used."""
        size = len(parse_key(keys[0])[1])
        if size != HASH_BYTES:
            self.stop(
                f"vLLM setting 'prefix_caching_hash_algo' makes block hashes of {size} bytes; supported: sha256, "
                "sha256_cbor"
            )
        return size == HASH_BYTES

    def _fetch(self, lookup: ChunkLookup, wanted: list[int]) -> None:
        try:
            lookup.fetch(wanted, lambda: self._counters.add(loads_failed=1))
        except Unreachable:
            pass
        except Exception as error:
            self._report("fetching segments", error)


def _drop(lookups: Iterable[ChunkLookup]) -> None:
    """Release the leases of lookups, all of them where one release raises."""
    with ExitStack() as stack:
        for lookup in lookups:
            stack.callback(lookup.drop)
