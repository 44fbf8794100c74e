"""A match: its options, and the request whose answer is awaited."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

import msgspec

from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.trace import NO_TRACE, parse_traceparent
from tokenlake.wire.engine import MAX_KEYS, EngineReply, Match, Matched
from tokenlake.wire.slots import join_keys
from tokenlake_client.arguments import check_keys, index, seconds
from tokenlake_client.lease import Lease
from tokenlake_client.pool_state import PoolState

log = logging.getLogger(__name__)

LEAST_S = 0.001
"""Least deadline in seconds of a request for further keys of a match."""


class MatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a match: the request that it is made for, and how long it may wait for other engines."""

    request: str | None = None
    """The name of the request in the logs of all nodes and for `tokenlake explain`, at most 64 characters; None: the
    pool makes one."""
    hints: Hints | None = None
    """Statements of the engine about the request (`tokenlake.hints`), for example whether the conversation goes on."""
    prompt_tokens: int = 0
    """The number of tokens of the request's prompt, for `tokenlake explain`; 0: the number of tokens in the full
    segments that the keys name."""
    in_flight_wait_s: float = 0.0
    """The seconds for which the match waits for the first missing segment while an in-flight marker says that another
    engine computes it; at most 10. Where there is no marker, the match sets one for its caller, and matches of other
    engines wait: so a prompt that arrives at many engines at once is computed once."""
    in_flight_wait_per_segment_s: float = 0.0
    """A second limit of the wait for another engine: this many seconds for each missing segment, and not more than
    `in_flight_wait_s`; 0: only `in_flight_wait_s` limits the wait."""
    in_flight_expected_s: float = 0.0
    """During the first `in_flight_expected_s` seconds of `in_flight_wait_s` the match waits for a missing segment also
    where there is no marker, and sets none: another engine has announced that it stores the segments, and its markers
    may arrive later."""
    independent: bool = False
    """True: the segments are useful without those before them, and the match leases all that it finds. False: it leases
    the longest prefix. Only with an `in_flight_wait_s` of 0."""
    counted_keys: int | None = None
    """The number of keys, from the first on, whose segments stand for the tokens of the prompt, in order; None: all.
    The others are of further cache groups of an opaque layout, whose segments stand for the same tokens."""

    traceparent: str | None = None
    """The span of the caller, as a header `traceparent` of W3C Trace Context: the spans of the match lie below it, and
    those of fetches of its lease and of stores with the same `request`. Anything else than a valid and sampled one
    counts as None. Without a collector at the daemon (its setting `otlp`) it has no effect."""

    def __post_init__(self) -> None:
        index("prompt_tokens", self.prompt_tokens)
        index("counted_keys", self.counted_keys or 0)
        seconds("in_flight_wait_s", self.in_flight_wait_s)
        seconds("in_flight_wait_per_segment_s", self.in_flight_wait_per_segment_s)
        seconds("in_flight_expected_s", self.in_flight_expected_s)
        if self.independent and self.in_flight_wait_s:
            raise ValueError(
                f"in_flight_wait_s is {self.in_flight_wait_s} with independent keys; expected 0: such a match does not "
                "wait for other engines"
            )


DEFAULT_MATCH = MatchOptions()


class PendingMatch:
    """A match that was sent to the daemon and whose answer is awaited. For one thread.

    The daemon is asked for `MAX_KEYS` keys at a time, the next ones once it has found all before them::

        keys  |--- MAX_KEYS: found ---|--- MAX_KEYS: some found --|--- not asked for ---|
        lease |------------------- hits ----------|

    Of independent keys it is asked for all, whether it finds those before them or not::

        keys  |--- MAX_KEYS: some ----|--- MAX_KEYS: none --------|--- the rest: some --|
        lease |--- hits ---|--- hits ---|
    """

    def __init__(
        self, state: PoolState, keys: Sequence[SegmentKey], request: str, options: MatchOptions, deadline_s: float
    ) -> None:
        """Sends the match of the first keys. `request`: the name of the request, which the caller made up where
        `options` has none. Raises `Unreachable`; `ValueError` for keys of another length and for a `deadline_s` that is
        no number of seconds."""
        check_keys(keys)
        self._state = state
        self._keys = keys
        self._request = request
        self._options = options
        self._trace = parse_traceparent(options.traceparent) if options.traceparent else NO_TRACE
        self._deadline_s = seconds("deadline_s", deadline_s)
        self._began = time.monotonic()
        self._parts: list[Matched] = []
        self._lease: Lease | None = None
        self._link = state.grants.open_link
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %r: match of %d segments", request, len(keys))
        self._ask(deadline_s)

    @property
    def answers(self) -> int:
        """The number of answers of the daemon so far. After each of them but the last, `poll` has asked for the next
        keys, with the whole deadline."""
        return len(self._parts)

    def poll(self) -> Lease | None:
        """The lease once the daemon's answer to the match has arrived, None before. Never waits. Raises
        `Unreachable`."""
        while self._lease is None:
            try:
                reply = self._link.channel.poll(self._pending)
                if reply is None:
                    return None
                if self._take(reply):
                    self._ask(self._deadline_s)
            except TokenLakeError:
                if not self._parts:
                    raise
                # The keys that the daemon has not answered for count as missing.
                self._lease = self._join()
        return self._lease

    def wait(self) -> Lease:
        """Wait for the daemon's answer to the match and return its lease. All answers arrive within the deadline
        together; with `in_flight_wait_s`, each arrives within the deadline after its wait. Raises `Unreachable`:
        without `in_flight_wait_s` when the deadline has passed; with it, when the daemon does not answer a
        heartbeat."""
        while self._lease is None:
            try:
                if self._options.in_flight_wait_s > 0:
                    reply, left_s = self._link.wait_while_alive(self._pending), self._deadline_s
                else:
                    reply = self._link.channel.wait(self._pending, self._left_s() + self._link.deadlines.grace_s)
                    left_s = self._left_s()
                if self._take(reply):
                    self._ask(left_s)
            except TokenLakeError:
                if not self._parts:
                    raise
                # The keys that the daemon has not answered for count as missing.
                self._lease = self._join()
        return self._lease

    def cancel(self) -> None:
        """Give the match up: its lease is released now, or when the daemon's answer arrives. The tokens of a match that
        is not answered yet do not count as asked for."""
        answered = self._lease is not None
        if self._lease is None:
            self._state.grants.give_up(self._link, self._pending)
            if not self._parts:
                return
            with contextlib.suppress(TokenLakeError):
                self._lease = self._join()
        if self._lease is not None:
            self._lease.release(counted=answered)

    def _passed_s(self) -> float:
        return time.monotonic() - self._began

    def _left_s(self) -> float:
        return max(LEAST_S, self._deadline_s - self._passed_s())

    def _ask(self, deadline_s: float) -> None:
        """Send the match of the next `MAX_KEYS` keys. Raises `Unreachable`."""
        at, options = len(self._parts) * MAX_KEYS, self._options
        packed = join_keys(self._keys[at : at + MAX_KEYS])
        # The waits of all requests together do not exceed that of the match.
        wait_s = options.in_flight_wait_s and max(LEAST_S, options.in_flight_wait_s - self._passed_s())
        per_segment_s = options.in_flight_wait_per_segment_s
        if len(self._keys) - at > MAX_KEYS:
            # The daemon counts the missing keys of this request only. If it misses all of them, it waits for as long as
            # if it had been asked for all keys that are left.
            per_segment_s *= (len(self._keys) - at) / MAX_KEYS
        last = at + MAX_KEYS >= len(self._keys)
        tokens = max(0, options.prompt_tokens - at * self._state.layout.segment_tokens) if last else 0
        self._pending = self._link.channel.begin(
            lambda number: Match(
                number,
                packed,
                deadline_s,
                self._state.verify,
                self._request,
                options.hints,
                tokens,
                wait_s if self._parts else options.in_flight_wait_s,
                per_segment_s,
                options.independent,
                max(0.0, options.in_flight_expected_s - (self._passed_s() if self._parts else 0.0)),
                MAX_KEYS if options.counted_keys is None else max(0, min(MAX_KEYS, options.counted_keys - at)),
            ),
            self._trace,
        )

    def _take(self, reply: EngineReply) -> bool:
        """Take the daemon's answer. True: there are more keys, and they are independent or all before them were found;
        False: the lease is complete. Raises `Unreachable` and `ProtocolRefused`."""
        matched = self._link.expect_grant(reply, Matched)
        self._parts.append(matched)
        whole = self._options.independent or matched.hits == MAX_KEYS
        more = whole and len(self._keys) > len(self._parts) * MAX_KEYS
        if not more:
            self._lease = self._join()
        return more

    def _join(self) -> Lease:
        independent = self._options.independent
        try:
            return Lease(self._state, self._link, self._keys, self._parts, self._request, independent=independent)
        except ProtocolRefused:
            self._link.channel.orphans.extend(self._parts)
            raise
