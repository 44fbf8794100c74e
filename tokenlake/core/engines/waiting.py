"""In-flight markers: they let the engines of the cluster compute a missing segment once instead of all at once.

A directory node keeps the marker of a segment that an engine computes; a lookup of the segment is answered PENDING
until the segment is stored, the marker is withdrawn or its time is over. A match that may wait uses the markers so::

    first missing segment PENDING    wait until the segment is there, its marker is gone, or the match has waited for
                                     `in_flight_wait_s`
    first missing segment DEFERRED   the same: the owner is sending the segment to other nodes
    first missing segment UNKNOWN    a node did not answer its lookup in time: ask again at the same intervals, for at
                                     most `suspect_s`, after which a node that does not answer is SUSPECT
    first missing segment MISSING    set the marker at its directory node. Granted: answer the match, its engine
                                     computes the segment. PENDING: another engine set the marker first; wait for it.
                                     A match whose engine was told of the segment by another engine also waits without
                                     a marker, for its first `in_flight_expected_s`: the directory node may receive the
                                     marker of the other engine later than the lookup

All matches of a tenant that wait for the same segment share one poll of its directory node, at growing intervals. A
segment that arrives at this node, or of which this node as directory node hears, ends their waits without a poll. The
matches go on one by one, in turns of the tenants, each in an event of its own.

An engine that computes a long prompt stores it in parts. It sets markers for the whole prompt (`engine.MarkInFlight`),
because the waiting matches would otherwise compute the rest as soon as the first part is stored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context, Part
from tokenlake.core.engines.grants import SessionGrants
from tokenlake.core.engines.sessions import Process
from tokenlake.identity import ConnectionId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.timers import Timer
from tokenlake.wire import Code, engine
from tokenlake.wire import peer as wire
from tokenlake.wire.match_deadline import match_deadline_s
from tokenlake.wire.slots import split_keys

IN_FLIGHT_WAITS = Metric(
    "tokenlake_in_flight_waits_total",
    "Matches that waited for a segment that another engine was computing",
)
DEFERRED_WAITS = Metric(
    "tokenlake_deferred_waits_total",
    "Matches that waited for a segment whose owner was sending it to other nodes",
)
UNANSWERED_WAITS = Metric(
    "tokenlake_unanswered_waits_total",
    "Matches that asked again because a node had not answered a lookup in time",
)
IN_FLIGHT_MARKERS = Metric(
    "tokenlake_in_flight_markers_total",
    "Matches whose engine was told to compute a segment while the matches of other engines wait for it",
)

WAITS = {Code.DEFERRED: DEFERRED_WAITS, Code.UNKNOWN: UNANSWERED_WAITS}
"""The metric that counts the waits for a segment with this code, if it is not `IN_FLIGHT_WAITS`."""
MAX_IN_FLIGHT_WAIT_S = 10.0
"""Upper bound on the wait of a match: the segments that it has found stay leased meanwhile, and leases at other nodes
end after `peer_lease_s`."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.005, 0.05
"""Seconds between two polls for one segment: before the first poll, and the maximum. Each poll doubles the time."""
POLL_S = 0.0005
"""Minimum mean seconds between two polls of this node, if its tenants wait for many different segments."""
MAX_WAITING = 1024
"""Maximum number of matches of a tenant that wait; a further one is answered at once, with the code PENDING or
DEFERRED."""
MAX_MARKERS = 1024
"""Maximum number of in-flight markers of one process: markers of segments that are never stored must not fill a
directory, whose size is bounded."""


MAX_MARKERS_BY_TENANT = 16 * MAX_MARKERS
"""Maximum number of in-flight markers of all processes of a tenant; further ones are not set."""


class Wait:
    """The time for which one match may still wait for a segment that another engine computes."""

    def __init__(self, now: float, in_flight_wait_s: float, per_segment_s: float, expected_s: float) -> None:
        """`in_flight_wait_s`: maximum wait in seconds. `per_segment_s`: if above 0, the wait is also at most this many
        seconds for each missing segment. `expected_s`: for so many seconds the match also waits for a segment without a
        marker."""
        self._per_segment_s = per_segment_s
        self.in_flight_wait_s = min(in_flight_wait_s, MAX_IN_FLIGHT_WAIT_S)
        self.until = now + self.in_flight_wait_s
        self.expects_until = now + min(expected_s, self.in_flight_wait_s)
        """Time until which a segment without a marker counts as in flight; 0 once the match has met a marker."""
        self.key: SegmentKey | None = None
        """The segment that the match waits for, or waited for last."""
        self.pause_s = FIRST_PAUSE_S
        self.repeats_until = math.inf
        """Time until which lookups that were not answered are repeated; infinite before the first such lookup."""
        self.counted: dict[Metric, None] = {}
        """Metrics (of the reasons for waiting) that have counted this match already, so that each counts it once."""

    def limit_to(self, missing: int) -> None:
        """Shorten the wait to the time allowed for `missing` segments. Only the first call has an effect, because the
        number of missing segments falls while the match waits."""
        per_segment_s, self._per_segment_s = self._per_segment_s, 0.0
        if per_segment_s:
            surplus_s = max(0.0, self.in_flight_wait_s - missing * per_segment_s)
            self.in_flight_wait_s -= surplus_s
            self.until -= surplus_s


@dataclass(eq=False, slots=True)
class _Waiter:
    """One match that waits."""

    wait: Wait
    sound: Callable[[], bool]
    resume: Callable[[Code], None]
    timer: Timer | None = None
    """The end of the wait."""


@dataclass(eq=False, slots=True)
class _Poll:
    """The matches of one tenant that wait for the same segment, and the next question to its directory node."""

    tenant: TenantId
    key: SegmentKey
    pause_s: float
    waiters: dict[_Waiter, None] = field(default_factory=dict)


class WaitingMatches(Part):
    """Delays the answer to a match until its first missing segment is stored, or until its own engine should compute
    the segment."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode, markers: InFlightMarkers) -> None:
        self.markers = markers
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._polls: dict[TenantId, dict[SegmentKey, _Poll]] = {}
        self._woken: dict[TenantId, dict[_Waiter, Code]] = {}
        """By tenant, matches that waited for a segment, whose wait is over, and that were not resumed yet. The turn of
        the first tenant is next."""
        self._waiting: Counter[TenantId] = Counter()
        """Number of matches of each tenant that wait, or whose wait is over and that were not resumed yet."""

    def may_wait(self, wait: Wait, code: int) -> bool:
        """Returns True if a match whose first missing segment has this code could find more segments by waiting, and
        has time left to wait. With UNKNOWN, a node did not answer the lookup of the segment: the match may wait for at
        most `suspect_s`."""
        now, until = self._context.now, wait.until
        if code == Code.UNKNOWN:
            wait.repeats_until = min(wait.repeats_until, now + self._context.config.suspect_s)
            until = min(until, wait.repeats_until)
        waits = code in (Code.PENDING, Code.DEFERRED, Code.MISSING, Code.UNKNOWN)
        return waits and now + wait.pause_s <= until

    def may_be_deferred(self, wait: Wait) -> bool:
        """Returns True if the match has time left to ask an owner again that answers DEFERRED because it is sending the
        segment to others."""
        return self._context.now + 2 * MAX_PAUSE_S <= wait.until

    def has_room(self, tenant: TenantId) -> bool:
        """Returns True if another match of the tenant may wait."""
        return self._waiting[tenant] < MAX_WAITING

    def pause(
        self,
        wait: Wait,
        tenant: TenantId,
        key: SegmentKey,
        code: int,
        sound: Callable[[], bool],
        resume: Callable[[Code], None],
    ) -> None:
        """Let a match wait for the segment `key`. Calls `resume` once, in a later event: with MISSING if this node got
        the in-flight marker for the engine of this match; with another code if the match should look its segments up
        again, also at the end of its wait.

        `code`: PENDING, DEFERRED or UNKNOWN, the code of the segment, by which the wait is counted; MISSING where the
        match expects the segment. `sound()`: returns False once the match should not wait any more for another reason;
        it is called at each poll."""
        if code == Code.PENDING:
            wait.expects_until = 0.0
        if key != wait.key:
            # The segments arrive one after the other: long pauses for the first ones must not delay the last one.
            wait.key, wait.pause_s = key, FIRST_PAUSE_S
        metric = WAITS.get(Code(code), IN_FLIGHT_WAITS)
        if metric not in wait.counted:
            wait.counted[metric] = None
            self._context.counters.add(metric)
        polls = self._polls.setdefault(tenant, {})
        poll = polls.get(key)
        if poll is None:
            poll = polls[key] = _Poll(tenant, key, wait.pause_s)
            self._poll_later(poll)
        wait.pause_s = min(MAX_PAUSE_S, 2 * wait.pause_s)
        waiter = _Waiter(wait, sound, resume)
        poll.waiters[waiter] = None
        waiter.timer = self._context.timers.at(wait.until, lambda: self._wake(poll, (waiter,), Code.UNKNOWN))
        self._waiting[tenant] += 1

    def arrived(self, tenant: TenantId, keys: Iterable[SegmentKey]) -> None:
        """End the waits for these segments: they are on this node, or this node as directory node knows an owner."""
        polls = self._polls.get(tenant)
        for key in keys if polls else ():
            if polls and key in polls:
                self._wake(polls[key], polls[key].waiters, Code.LOCAL)

    # -- polls

    def _poll_later(self, poll: _Poll) -> None:
        # The polls of a tenant for many segments keep a distance, so that all tenants together poll at a bounded rate.
        least_s = POLL_S * len(self._polls) * len(self._polls[poll.tenant])
        self._context.after(max(poll.pause_s, least_s), lambda: self._ask(poll))
        poll.pause_s = min(MAX_PAUSE_S, 2 * poll.pause_s)

    def _ask(self, poll: _Poll) -> None:
        self._wake(poll, [waiter for waiter in poll.waiters if not waiter.sound()], Code.UNKNOWN)
        if poll.waiters:
            wait = next(iter(poll.waiters)).wait
            self.request_marker(wait, poll.tenant, poll.key, partial(self._answered, poll))

    def _answered(self, poll: _Poll, code: Code) -> None:
        if code is Code.MISSING:
            if poll.waiters:
                self._wake(poll, (next(iter(poll.waiters)),), code)
            else:
                # The waits ended while the directory node was asked.
                self.markers.withdraw(poll.tenant, [poll.key])
        elif code is not Code.PENDING:
            # The segment is stored by now, or the directory node cannot tell and the other candidate of the key may
            # know.
            self._wake(poll, poll.waiters, code)
        if poll.waiters:
            self._poll_later(poll)

    # -- matches that go on

    def _wake(self, poll: _Poll, waiters: Iterable[_Waiter], code: Code) -> None:
        """End the waits of those of these matches that still wait for `poll`."""
        woken = {waiter: code for waiter in waiters if waiter in poll.waiters}
        if not woken:
            return
        if not self._woken:
            self._context.after(0.0, self._resume_next)
        self._woken.setdefault(poll.tenant, {}).update(woken)
        for waiter in woken:
            del poll.waiters[waiter]
        if not poll.waiters:
            del self._polls[poll.tenant][poll.key]
            if not self._polls[poll.tenant]:
                del self._polls[poll.tenant]

    def _resume_next(self) -> None:
        """Let one match of one tenant go on."""
        tenant = next(iter(self._woken))
        woken = self._woken.pop(tenant)
        waiter = next(iter(woken))
        code = woken.pop(waiter)
        if woken:
            self._woken[tenant] = woken
        if self._woken:
            self._context.after(0.0, self._resume_next)
        self._waiting[tenant] -= 1
        if waiter.timer is not None:
            waiter.timer.cancel()
        waiter.resume(code)

    def request_marker(self, wait: Wait, tenant: TenantId, key: SegmentKey, done: Callable[[Code], None]) -> None:
        """Ask the directory node of `key` to set the in-flight marker for this node. Calls `done` once, possibly before
        this returns, with MISSING: this node has the marker and its engine computes the segment; PENDING: another node
        has the marker, or may set it while the match of `wait` expects the segment; LOCAL: the segment is stored by
        now; UNKNOWN: the directory node cannot tell, or did not answer."""
        marker_s = 0.0 if self._context.now < wait.expects_until else wait.in_flight_wait_s

        def answered(code: Code) -> None:
            if code is Code.PENDING:
                wait.expects_until = 0.0
            elif code is Code.MISSING and not marker_s:
                code = Code.PENDING
            self._context.counters.add(IN_FLIGHT_MARKERS, code is Code.MISSING)
            done(code)

        def replied(reply: wire.LookupReply | None) -> None:
            code = Code.UNKNOWN if reply is None else Code(reply.codes[0])
            answered(code if code in (Code.PENDING, Code.MISSING, Code.UNKNOWN) else Code.LOCAL)

        (directory_node,) = self._peers.directory_nodes(key)
        if directory_node == self._context.node:
            code, owner = self._directory_node.answers(tenant, [key])[0]
            if code is Code.MISSING:
                self._directory_node.set_markers(directory_node, tenant, (key,), marker_s)
            answered(Code.LOCAL if owner is not None else code)
            return
        limit_s = match_deadline_s(self._context.config.match_deadline_s, 1)
        self._peers.look_up(directory_node, tenant, [key], limit_s, replied, marker_s=marker_s, lease=False)

    # -- checks

    def census(self) -> dict[str, int]:
        return {"matches that wait": self._waiting.total(), "polls": sum(map(len, self._polls.values()))}

    def check_integrity(self) -> None:
        counted = Counter({tenant: len(woken) for tenant, woken in self._woken.items()})
        assert all(counted.values())
        for tenant, polls in self._polls.items():
            assert polls
            for key, poll in polls.items():
                assert poll.waiters
                assert (poll.tenant, poll.key) == (tenant, key)
                counted[tenant] += len(poll.waiters)
        assert +self._waiting == counted, f"{self._waiting} matches are counted, {counted} wait"
        assert all(count <= MAX_WAITING for count in self._waiting.values())


class InFlightMarkers(Part):
    """The in-flight markers that the processes of this node's engines hold: their engine asked for them
    (`engine.MarkInFlight`), or a match of theirs was told to compute the segment. Markers of writes are not counted
    here. They end when the process withdraws them or ends, unless another process of this node computes the segment
    too; a directory node drops a marker by itself when its time is over or the segment is stored."""

    def __init__(self, context: Context, directory_node: DirectoryNode) -> None:
        self._context = context
        self._directory_node = directory_node
        self._held: dict[ConnectionId, tuple[SessionGrants, dict[SegmentKey, float]]] = {}
        """The session of each process, and the time in seconds at which each of its markers ends, the oldest marker
        first."""

    def mark(self, process: Process, request: engine.MarkInFlight) -> None:
        """Set in-flight markers for the segments that an engine's process is about to compute, or, if the request has 0
        seconds, withdraw them. A process with more than `MAX_MARKERS` markers loses its oldest ones."""
        keys, tenant = split_keys(request.keys)[:MAX_MARKERS], process.session.tenant
        keys = self._hold(process, keys, request.seconds)
        absent = [key for key in keys if self._context.store.get(tenant, key) is None]
        self._directory_node.announce(tenant, absent, min(request.seconds, MAX_IN_FLIGHT_WAIT_S))

    def granted(self, process: Process, key: SegmentKey, seconds: float) -> None:
        """This node got the marker of `key`, for at most `seconds`, because a match of the process computes it. The
        marker is withdrawn if the process died meanwhile."""
        self._hold(process, [key], seconds if process.alive else 0.0)

    def _hold(self, process: Process, keys: list[SegmentKey], seconds: float) -> list[SegmentKey]:
        """Let a process hold the markers of `keys`, or withdraw them with 0 seconds. Returns those that it holds now;
        the tenant may have no room for the others."""
        session, connection = process.session, process.connection
        _, held = self._held.get(connection, (session, {}))
        ended = keys
        for key in keys:
            held.pop(key, None)
        if seconds:
            keys = keys[: self._room(session.tenant)]
            held.update(dict.fromkeys(keys, self._context.now + min(seconds, MAX_IN_FLIGHT_WAIT_S)))
            ended = list(islice(held, max(0, len(held) - MAX_MARKERS)))
            for key in ended:
                del held[key]
            self._held[connection] = session, held
        self.withdraw(session.tenant, ended)
        return keys if seconds else []

    def _room(self, tenant: TenantId) -> int:
        """Returns how many further markers the tenant may have. Forgets those whose time is over or whose segment is
        stored."""
        room = MAX_MARKERS_BY_TENANT
        for session, held in self._held.values():
            if session.tenant == tenant:
                lasting = (at for at, key in enumerate(held) if self._lasts(tenant, key, held))
                for key in list(islice(held, next(lasting, len(held)))):
                    del held[key]
                room -= len(held)
        return max(0, room)

    def _lasts(self, tenant: TenantId, key: SegmentKey, held: Mapping[SegmentKey, float]) -> bool:
        return held.get(key, 0.0) > self._context.now and self._context.ready(tenant, [key]) == [None]

    def move(self, old: ConnectionId, new: ConnectionId) -> None:
        """Move the in-flight markers of a process that goes on over another connection."""
        if old in self._held:
            self._held[new] = self._held.pop(old)

    def process_gone(self, connection: ConnectionId) -> None:
        """Withdraw the in-flight markers of a process that left or died."""
        if connection in self._held:
            session, held = self._held.pop(connection)
            self.withdraw(session.tenant, list(held))

    def withdraw(self, tenant: TenantId, keys: Sequence[SegmentKey], writer: SessionGrants | None = None) -> None:
        """Withdraw the in-flight markers of these segments, except those that are stored or being written on this node,
        and those that a process still holds. `writer`: the session that gave up writing the segments, whose processes
        hold none of them any more."""
        others: list[dict[SegmentKey, float]] = []
        for session, held in self._held.values():
            if session is writer:
                for key in keys:
                    held.pop(key, None)
            elif session.tenant == tenant:
                others.append(held)
        absent = (key for key in keys if self._context.store.get(tenant, key) is None)
        free = [key for key in absent if not any(self._lasts(tenant, key, held) for held in others)]
        self._directory_node.withdraw(tenant, free)

    def census(self) -> dict[str, int]:
        return {"in-flight markers": sum(len(held) for _, held in self._held.values())}
