"""Copies here with wrong bytes: a reader reports one, a thread checks it again, and it is dropped.

::

    report of a node, or of an engine here -> the reporter's queue -> CheckSlot -> SlotChecked
                                                                                    | right: the copy stays
                                                                                    v
                                                wrong: the copy leaves the index at once, its directory node is told

A report alone proves nothing: only a failed check drops a copy. One copy is checked at a time, reporters take turns,
each queue has a bound, and checks that find right bytes take a limited share of one thread's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tokenlake.core.context import Context
from tokenlake.core.instructions import CheckSlot, Note
from tokenlake.core.sessions import Process
from tokenlake.identity import LeaseId, NodeId, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import Segment, State
from tokenlake.wire import engine, peer
from tokenlake.wire.slots import split_keys

__all__ = ["Corruption"]

REPORTED = Metric("tokenlake_reported_segments_total", "Reports of readers that a copy on this node has wrong bytes")
CONFIRMED = Metric("tokenlake_confirmed_segments_total", "Reported copies whose bytes were wrong, which were dropped")

MAX_QUEUED = 256
"""Copies of one reporter that wait for a check. Further reports are ignored: if the copy is wrong, its next reader
reports it again."""
CHECKING_SHARE = 0.25
"""Share of one thread's time for checks that find right bytes: the most that false reports cost."""

Reporter = tuple[str, str]
"""("node", its name) or ("tenant", its name), so there are as many as nodes and tenants."""


class _Check(NamedTuple):
    id: int
    segment: Segment
    reporter: Reporter
    began: float


class Corruption:
    """The queues of reported copies, and the check under way."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queues: dict[Reporter, dict[Segment, None]] = {}
        """Queues that are not empty. The first reporter is served next."""
        self._queued: dict[Segment, None] = {}
        """The segments of all queues; each is in one queue."""
        self._check: _Check | None = None
        self._resting = False

    # -- reports

    def node_reports(self, node: NodeId, message: peer.Corrupt) -> None:
        """Segments that this node sent arrived at `node` with wrong checksums."""
        keys = split_keys(message.keys)[:MAX_QUEUED]
        self._report(("node", node), self._context.ready(TenantId(message.tenant), keys))

    def engine_reports(self, process: Process, message: engine.Corrupt) -> None:
        """A process of this node read a leased segment in place, and its checksum was wrong."""
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
        """The thread of a check has returned: drop a copy with wrong bytes, then begin the next check."""
        check = self._check
        if check is None or check.id != number:
            return
        self._check = None
        segment = check.segment
        if right:
            took = self._context.now - check.began
            self._resting = True
            self._context.after(took * (1 / CHECKING_SHARE - 1), self._rested)
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
        """A segment per pin held here."""
        if self._check is not None:
            yield self._check.segment

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"copies to check": len(self._queued) + (self._check is not None)}

    def check_integrity(self) -> None:
        """AssertionError when a queued segment is in no queue or in two, or queued copies wait and none is checked."""
        assert all(self._queues.values())
        queued = [segment for queue in self._queues.values() for segment in queue]
        assert len(queued) == len(self._queued) == len(set(queued))
        assert all(segment in self._queued for segment in queued)
        assert self._check is not None or self._resting or not queued, "reported copies wait and no check is under way"
