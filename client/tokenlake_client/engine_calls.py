"""`pool.engine`: the calls of an engine that waits for no answer, or whose ranks are processes of their own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tokenlake.content import contents_of
from tokenlake.errors import TokenLakeError
from tokenlake.hints import Hints
from tokenlake.identity import LeaseId, SegmentKey, SessionId, TenantId, WriteId
from tokenlake.keys import Prefix, TokenIds
from tokenlake.opaque_layout import understood
from tokenlake.wire import engine
from tokenlake.wire.engine import MAX_FETCHED, MAX_KEYS
from tokenlake.wire.fields import MAX_REQUEST_NAME
from tokenlake.wire.match_deadline import match_deadline_s
from tokenlake_client.arguments import packed
from tokenlake_client.arguments import seconds as check_seconds
from tokenlake_client.heartbeat import HeartbeatThread
from tokenlake_client.lease import Lease
from tokenlake_client.match import DEFAULT_MATCH, MatchOptions, PendingMatch
from tokenlake_client.pool_state import PoolState
from tokenlake_client.transfer import Transfer
from tokenlake_client.write import Reservation, Write, prepare, store


class EngineCalls:
    """The calls of an engine, beside those of its `Pool`. Thread-safe.

    - Without waiting: `begin_match`, `mark_in_flight`, `prefetch`.
    - Ranks: one process opens the `session` and leases (`Lease.ids`) or reserves (`reserve`); the others join the
      session (`Pool.connect`) and use `attach` and `attach_write`.
    - Layer by layer: `init_transfer`. For routers: `contents`.
    """

    def __init__(self, state: PoolState, heartbeat: HeartbeatThread) -> None:
        """Made by `Pool`."""
        self._state = state
        self._grants = state.grants
        self._heartbeat = heartbeat
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="tokenlake-put")
        self._unpublished: object = None
        """The life of the last link over which the daemon was told that it publishes other models."""

    def begin_match(
        self, keys: Sequence[SegmentKey], options: MatchOptions = DEFAULT_MATCH, *, deadline_s: float | None = None
    ) -> PendingMatch:
        """Send a `Pool.match` without waiting for its answer, which `poll` returns. Raises `Unreachable`."""
        state = self._state
        self._grants.sweep()
        deadline_s = match_deadline_s(state.deadlines.match_s, len(keys)) if deadline_s is None else deadline_s
        return PendingMatch(state, keys, state.request_name(options.request), options, deadline_s)

    def mark_in_flight(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        """Set in-flight markers: these segments are computed here and stored a part at a time, and matches with
        `in_flight_wait_s` wait for them, for `seconds` (at most 10); 0 removes the markers. The marker of the first
        segment that a match with `in_flight_wait_s` misses is set by the match itself. Never waits, never raises."""
        check_seconds("seconds", seconds)
        with contextlib.suppress(TokenLakeError):
            # The daemon keeps at most `MAX_KEYS` markers of a process.
            self._grants.link.channel.tell(engine.MarkInFlight(packed(keys[:MAX_KEYS]), seconds))

    def attach(self, *parts: LeaseId, request: str = "", deadline_s: float | None = None) -> Lease:
        """Hold a lease that another process of this session made, given by all its `ids`. The returned lease has no
        `keys`; its segments have the same indices. Its `hits` is 0 when the lease has ended, and less than in the other
        process where a part has ended. `request`: see `MatchOptions`. `deadline_s`: by default `Deadlines.call_s`.
        Raises `Unreachable`."""
        if not parts:
            raise ValueError("argument 'parts' is empty; expected all 'ids' of a lease")
        until = time.monotonic() + self._deadline_s(deadline_s)
        with contextlib.ExitStack() as attached:
            granted: list[engine.Matched] = []
            for part in parts:
                left_s = max(0.0, until - time.monotonic())
                link, reply = attached.enter_context(self._grants.attaching(part, left_s, write=False))
                granted.append(link.expect(reply, engine.Matched))
                if not granted[-1].hits:
                    # This part has ended: the segments of later ones would have other indices than in the lease.
                    break
            keys = [SegmentKey(b"")] * sum(matched.hits for matched in granted)
            return Lease(self._state, link, keys, granted, request[:MAX_REQUEST_NAME])

    def reserve(
        self,
        keys: Sequence[SegmentKey],
        first: int = 0,
        *,
        deadline_s: float | None = None,
        request: str | None = None,
        hints: Hints | None = None,
        contents: Sequence[bytes] = (),
    ) -> Reservation:
        """Reserve slots, as `Pool.store` does, that other processes of this session fill. `deadline_s`: by default
        `Deadlines.call_s`. Raises `Unreachable`."""
        deadline_s = self._deadline_s(deadline_s)
        return Reservation(self._state, *prepare(self._state, keys, first, deadline_s, request, hints, contents))

    def attach_write(self, write: WriteId) -> Write:
        """Fill a write that another process of this session began; each process fills its own shards. The keys of the
        returned write are not known. Raises `Unreachable`, and `ProtocolRefused` when the write has ended."""
        with self._grants.attaching(write, self._state.deadlines.store_s, write=True) as (link, reply):
            prepared = link.expect(reply, engine.Prepared)
            return Write(self._state, link, [SegmentKey(b"")] * len(prepared.codes), prepared)

    def init_transfer(self, parts: Sequence[tuple[Sequence[SegmentKey], int]]) -> Transfer:
        """Reserve slots for new cache of several prompts, which `Transfer.put` fills layer by layer: for each (keys,
        index of the first in its prompt). A segment that the pool has already, or refuses, gets no slot and is not
        copied. Raises `LayoutRefused` for an opaque layout, and `Unreachable`; then nothing stays reserved."""
        layout = understood(self._state.layout)
        writes: list[Write] = []
        try:
            for keys, first in parts:
                writes.append(store(self._state, keys, first))
        except BaseException:
            for write in writes:
                write.abort()
            raise
        return Transfer(layout, writes, self._copies)

    def prefetch(self, keys: Sequence[SegmentKey], source: str = "") -> None:
        """Ask for consecutive segments of one prompt, from the first on, in the memory of this node before a request
        needs them (`Pool.prefetch`), and wait for no answer. Raises `Unreachable`."""
        channel = self._grants.link.channel
        for start in range(0, len(keys), MAX_FETCHED):
            part = packed(keys[start : start + MAX_FETCHED])
            channel.drop(channel.begin(partial(engine.Prefetch, keys=part, first=start, source=source)))

    def contents(
        self, prefix: Prefix, tokens: TokenIds, segments: range, model: str, adapter: str = ""
    ) -> tuple[bytes, ...]:
        """The contents of `segments` of a prompt, for the argument `contents` of `store`: routers are told of segments
        by them. Empty unless the daemon publishes the segments of `model`, the name under which the engine serves it.
        `tokens`: those of the prompt from the first one on. `adapter`: the name that requests use. Only for a prompt
        that its tokens and the adapter determine: one without `salt` and `extras` of its own."""
        link = self._grants.link
        if model in link.published:
            return contents_of(prefix, tokens, segments, model, adapter)
        if model and link.published and link.life != self._unpublished:
            self._unpublished = link.life
            with contextlib.suppress(TokenLakeError):
                link.channel.tell(engine.Unpublished(model[: engine.MAX_MODEL]))
        return ()

    def close(self) -> None:
        """Called by `Pool.close`: waits for the copies of transfers that are under way."""
        self._copies.shutdown()

    def _deadline_s(self, given_s: float | None) -> float:
        return self._state.deadlines.call_s if given_s is None else check_seconds("deadline_s", given_s)

    @property
    def session(self) -> SessionId:
        """The session's number, by which another process of this engine joins it (`Pool.connect`). It changes when the
        daemon restarts."""
        return self._grants.link.session

    @property
    def incarnation(self) -> int:
        """The daemon's incarnation, which changes at each start of the daemon."""
        return self._grants.link.incarnation

    @property
    def tenant(self) -> TenantId:
        """The tenant that the daemon gave this process, by its token or its uid."""
        return self._grants.link.tenant

    @property
    def timeouts(self) -> int:
        """The number of calls to the daemon, over the current connection, that missed their deadline."""
        return self._grants.link.channel.timeouts

    @property
    def expired(self) -> int:
        """The number of times that the daemon had ended this pool's session because no heartbeat had arrived in
        time."""
        return self._heartbeat.expired
