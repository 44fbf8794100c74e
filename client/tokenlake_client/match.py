"""A match: its options, and the request whose answer is awaited."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake.wire.engine import MAX_KEYS, Match, Matched
from tokenlake.wire.slots import join_keys
from tokenlake_client.lease import Lease
from tokenlake_client.pool_state import PoolState

__all__ = ["DEFAULT_MATCH", "MatchOptions", "PendingMatch"]

log = logging.getLogger(__name__)


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
    """How long the match waits for the first missing segment while an in-flight marker says that another engine
    computes it; at most 10 s. Where there is no marker, the match sets one for its caller, and matches of other engines
    wait: so a prompt that arrives at many engines at once is computed once."""
    in_flight_wait_per_segment_s: float = 0.0
    """A second limit of the wait for another engine: this many seconds for each missing segment, and not more than
    `in_flight_wait_s`; 0: only `in_flight_wait_s` limits the wait."""


DEFAULT_MATCH = MatchOptions()


class PendingMatch:
    """A match that was sent to the daemon and whose answer is awaited. For one thread."""

    def __init__(
        self, state: PoolState, keys: Sequence[SegmentKey], request: str, options: MatchOptions, deadline_s: float
    ) -> None:
        """Sends the match, of the first `MAX_KEYS` keys: the others count as not found. `request`: the name of the
        request, which the caller made up where `options` has none.
        Raises `Unreachable`."""
        self._state = state
        self._keys = keys
        self._request = request
        self._deadline_s = deadline_s
        self._waits = options.in_flight_wait_s > 0
        self._lease: Lease | None = None
        packed = join_keys(keys[:MAX_KEYS])
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %r: match of %d segments", request, len(keys))
        self._link = state.grants.link
        self._pending = self._link.channel.begin(
            lambda number: Match(
                number,
                packed,
                deadline_s,
                state.verify,
                request,
                options.hints,
                options.prompt_tokens,
                options.in_flight_wait_s,
                options.in_flight_wait_per_segment_s,
            )
        )

    def poll(self) -> Lease | None:
        """The lease once the daemon's answer to the match has arrived, None before. Never waits. Raises
        `Unreachable`."""
        if self._lease is None:
            reply = self._link.channel.poll(self._pending)
            if reply is not None:
                self._lease = self._lease_of(self._link.expect(reply, Matched))
        return self._lease

    def wait(self) -> Lease:
        """Wait for the daemon's answer to the match and return its lease. Raises `Unreachable`: without
        `in_flight_wait_s` when the deadline has passed; with it, when the daemon does not answer a heartbeat."""
        if self._lease is None:
            if self._waits:
                reply = self._link.wait_while_alive(self._pending)
            else:
                reply = self._link.channel.wait(self._pending, self._deadline_s + self._link.deadlines.grace_s)
            self._lease = self._lease_of(self._link.expect(reply, Matched))
        return self._lease

    def cancel(self) -> None:
        """Give the match up: its lease is released now, or when the daemon's answer arrives."""
        if self._lease is not None:
            self._lease.release()
        else:
            self._link.channel.drop(self._pending)

    def _lease_of(self, matched: Matched) -> Lease:
        beyond = len(self._keys) - MAX_KEYS
        if beyond > 0:
            matched = msgspec.structs.replace(matched, codes=matched.codes + bytes([Code.SESSION_LIMIT]) * beyond)
        return Lease(self._state, self._link, self._keys, matched, self._request)
