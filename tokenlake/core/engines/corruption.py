"""Copies of this node with wrong bytes: a reader reports a copy, a thread compares it with its checksums again, and the
rules drop it if it is wrong.

::

    report of a node, or of an engine here -> the reporter's queue -> CheckSlot -> SlotChecked
                                                                                    | right: the copy stays
                                                                                    v
                                                wrong: the copy leaves the index at once, its directory node is told

A report alone proves nothing, nor does a check that could not be made: only wrong bytes that a check has found drop a
copy. One copy is checked at a time, reporters take turns, each queue has a bound, and checks that find right bytes take
a limited share of one thread's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tokenlake.core.context import Context, Part
from tokenlake.core.engines.sessions import Process
from tokenlake.core.instructions import CheckSlot, Note
from tokenlake.identity import LeaseId, NodeId, TenantId
from tokenlake.memory import Segment, State
from tokenlake.metrics import Metric
from tokenlake.wire import engine, peer
from tokenlake.wire.slots import split_keys

REPORTED = Metric("tokenlake_reported_segments_total", "Reports of readers that a copy on this node has wrong bytes")
CONFIRMED = Metric("tokenlake_confirmed_segments_total", "Reported copies whose bytes were wrong, which were dropped")

MAX_QUEUED = 256
"""Maximum number of copies reported by one node or tenant that wait for a check. Further reports are ignored: if a copy
is wrong, its next reader reports it again."""
CHECKING_SHARE = 0.25
"""Maximum share of one thread's time for checks that find right bytes, so that false reports cost no more than this."""
MAX_REST_S = 10.0
"""Maximum pause after a check. A check that took long, because the process was stopped meanwhile for example, does not
keep the next ones waiting for a multiple of that time."""

Reporter = tuple[str, str]
"""The node or tenant that reports a copy: ("node", its name) or ("tenant", its name)."""


class _Check(NamedTuple):
    id: int
    segment: Segment
    reporter: Reporter
    began: float


class Corruption(Part):
    """Checks the reported copies of this node one at a time, and drops those whose bytes are wrong."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queues: dict[Reporter, dict[Segment, None]] = {}
        """The reported copies that wait for a check, by reporter; no queue is empty. A copy of the first reporter is
        checked next."""
        self._queued: dict[Segment, None] = {}
        """The segments of all queues; each segment is in one queue."""
        self._check: _Check | None = None
        self._resting = False

    # -- reports

    def node_reports(self, node: NodeId, message: peer.Corrupt) -> None:
        """Handle a report of `node`: segments that this node sent arrived there with wrong checksums."""
        keys = split_keys(message.keys)[:MAX_QUEUED]
        self._report(("node", node), self._context.ready(TenantId(message.tenant), keys))

    def engine_reports(self, process: Process, message: engine.Corrupt) -> None:
        """An engine of this node reports that a leased segment had a wrong checksum when it read the shared memory. The
        segment is queued for a check, and is dropped only if the check finds wrong bytes."""
        lease = process.session.leases.get(LeaseId(message.lease))
        if lease is not None and message.index < len(lease.segments):
            self._report(("tenant", process.session.tenant), [lease.segments[message.index]])

    def _report(self, reporter: Reporter, segments: Iterable[Segment | None]) -> None:
        for segment in segments:
            if segment is None or segment.state is not State.READY:
                continue
            self._context.counters.add(REPORTED)
            under_way = self._check is not None and self._check.segment is segment
            queue = self._queues.get(reporter, {})
            if not under_way and segment not in self._queued and len(queue) < MAX_QUEUED:
                self._queues.setdefault(reporter, queue)[segment] = None
                self._queued[segment] = None
        self._next()

    # -- checks

    def _next(self) -> None:
        while self._queues and self._check is None and not self._resting:
            reporter = next(iter(self._queues))
            queue = self._queues.pop(reporter)
            segment = next(iter(queue))
            del queue[segment], self._queued[segment]
            if queue:
                self._queues[reporter] = queue
            if segment.state is not State.READY:
                continue
            self._context.store.pin(segment)
            self._check = _Check(self._context.next_id(), segment, reporter, self._context.now)
            self._context.emit(CheckSlot(self._check.id, segment.packed, segment.slot_bytes, segment.checksums))

    def checked(self, number: int, *, right: bool) -> None:
        """Handle the result of a check: drop the copy if its bytes are wrong, then begin the next check. `right`: the
        bytes match the checksums."""
        check = self._check
        if check is None or check.id != number:
            return
        self._check = None
        segment = check.segment
        if right:
            took = self._context.now - check.began
            self._resting = True
            self._context.after(min(took * (1 / CHECKING_SHARE - 1), MAX_REST_S), self._rested)
        elif segment.state is State.READY:
            self._drop(segment, check.reporter)
        self._context.store.unpin(segment)
        self._next()

    def _rested(self) -> None:
        self._resting = False
        self._next()

    def _drop(self, segment: Segment, reporter: Reporter) -> None:
        self._context.store.drop(segment, self._context.now)
        self._context.counters.add(CONFIRMED)
        kind, key, place = segment.kind.name, segment.key.hex()[:16], segment.place
        where = f"{kind} copy of segment {key} of tenant {segment.tenant!r} in region {place.region}, slot {place.slot}"
        self._context.emit(
            Note(f"the {where} has wrong bytes and is dropped: {reporter[0]} {reporter[1]!r} reported it")
        )

    # -- integrity

    def pinned(self) -> Iterator[Segment]:
        if self._check is not None:
            yield self._check.segment

    def census(self) -> dict[str, int]:
        return {"copies to check": len(self._queued) + (self._check is not None)}

    def check_integrity(self) -> None:
        assert all(self._queues.values())
        queued = [segment for queue in self._queues.values() for segment in queue]
        assert len(queued) == len(self._queued) == len(set(queued))
        assert all(segment in self._queued for segment in queued)
        assert self._check is not None or self._resting or not queued, "reported copies wait and no check is under way"
