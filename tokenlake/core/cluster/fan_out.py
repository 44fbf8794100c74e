"""The fan-out limit: an owner serves two readers of a segment at a time, and other readers fetch it from them::

    the first FAN_OUT readers              leased, and sent
    further readers, during those sends    DEFERRED if the match can wait, else leased and sent as well
    further readers, after one send        leased, and redirected to a recent recipient, which applies the same rule

So the copies spread as a tree, and no node of it sends many. A reader that is redirected to a node without a copy reads
from this node after all: it costs one lookup, and this node does not redirect to that recipient again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cluster.transfer import deadline_s
from tokenlake.core.context import Context
from tokenlake.identity import NodeId
from tokenlake.memory import Segment
from tokenlake.metrics import Metric
from tokenlake.wire.match_deadline import match_deadline_s

REDIRECTED = Metric("tokenlake_redirected_lookups_total", "Lookups redirected to a recent recipient")
DEFERRED = Metric("tokenlake_deferred_lookups_total", "Lookups deferred while the segment is sent to other readers")

FAN_OUT = 2
"""Number of readers of a segment that this node serves at a time."""
RECIPIENTS_KEPT_S = 2.0
"""Seconds after the last send of a segment for which its recipients are remembered: a recipient may evict its copy."""
MAX_REMEMBERED = 4096
"""Maximum number of segments whose recipients are remembered."""

_DELIVERED = math.inf


class Verdict(NamedTuple):
    """The decision of the fan-out limit about a reader. With neither field set, this node serves the reader."""

    redirect: NodeId | None = None
    """Another node that has the segments and that the reader should ask instead; None for none."""
    deferred: bool = False
    """True if the reader should ask again soon."""


SERVE, _DEFER = Verdict(), Verdict(deferred=True)


@dataclass(eq=False, slots=True)
class _Recipients:
    """The nodes that recently read one segment from this node."""

    last: float = 0.0
    """Time in seconds of the newest send or lookup of the segment that is recorded."""
    until: dict[NodeId, float] = field(default_factory=dict)
    """For each reading node, the time until which its transfer counts as under way, or infinity (`_DELIVERED`) once it
    has ended."""
    redirected: dict[NodeId, NodeId] = field(default_factory=dict)
    """For each redirected node, the recipient to which it was redirected; removed when the node reads here all the
    same."""
    deferred_until: dict[NodeId, float] = field(default_factory=dict)
    """For each deferred node, the time from which it is served even if other transfers are still under way."""


class FanOut:
    """The fan-out limit: records the recent readers of each segment of this node and decides whether the next reader is
    served, redirected or deferred."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._recipients: dict[Segment, _Recipients] = {}
        """Recent readers by segment; the segment that was sent longest ago comes first."""

    def began(self, node: NodeId, segments: Sequence[Segment]) -> None:
        """Record that a send of these segments to an engine of `node` begins."""
        self.sweep()
        nbytes = sum(segment.slot_bytes for segment in segments)
        until = self._context.now + deadline_s(self._peers.path(node).predict_s(nbytes))
        for segment in segments:
            recipients = self._entry(segment)
            # A reader that was redirected and reads from this node all the same found no copy at the node to which it
            # was redirected: that node does not count as a recipient any more.
            recipients.until.pop(recipients.redirected.pop(node, node), None)
            recipients.deferred_until.pop(node, None)
            recipients.until[node] = until

    def done(self, node: NodeId, segments: Sequence[Segment]) -> None:
        """Record that the send of these segments to `node` has ended: other readers can be redirected to `node`."""
        for segment in segments:
            recipients = self._recipients.get(segment)
            if recipients is not None and node in recipients.until:
                recipients.until[node] = _DELIVERED

    def decide(self, node: NodeId, segments: Sequence[Segment], *, patient: bool) -> Verdict:
        """Decide whether a reader on `node` that looks up these segments is served, redirected or deferred. `patient`:
        the reader can wait, so it may be deferred."""
        recipients = self._busy(node, segments)
        if recipients is None:
            if patient:
                self._expect(node, segments)
            return SERVE
        having = [each for each, until in recipients.until.items() if until == _DELIVERED and self._peers.usable(each)]
        if having:
            chosen = min(having, key=self._peers.load)
            self._peers.will_read(chosen, sum(segment.slot_bytes for segment in segments))
            recipients.redirected[node] = chosen
            self._context.counters.add(REDIRECTED)
            return Verdict(redirect=chosen)
        # A reader is deferred at most until the transfers have ended that are under way at its first lookup.
        under_way = max(until for until in recipients.until.values() if until < _DELIVERED)
        if patient and self._context.now < recipients.deferred_until.setdefault(node, under_way):
            self._context.counters.add(DEFERRED)
            return _DEFER
        return SERVE

    def _busy(self, node: NodeId, segments: Sequence[Segment]) -> _Recipients | None:
        """Returns the recent readers of the deepest of these segments that has at least `FAN_OUT` readers other than
        `node`; None if no segment has."""
        now, oldest = self._context.now, self._context.now - RECIPIENTS_KEPT_S
        for segment in reversed(segments) if self._recipients else ():
            recipients = self._recipients.get(segment)
            if recipients is None or recipients.last < oldest or recipients.until.get(node, 0.0) > now:
                continue
            count = sum(until > now and self._peers.usable(each) for each, until in recipients.until.items())
            if count >= FAN_OUT:
                return recipients
        return None

    def _expect(self, node: NodeId, segments: Sequence[Segment]) -> None:
        """Count a reader that can wait from its lookup on, because many readers may ask before the first send
        begins."""
        recipients = self._entry(segments[0])
        until = self._context.now + match_deadline_s(self._context.config.match_deadline_s, len(segments))
        recipients.until[node] = max(until, recipients.until.get(node, 0.0))

    def _entry(self, segment: Segment) -> _Recipients:
        """Returns the record of the recent readers of `segment`, moved to the end of the order."""
        recipients = self._recipients.pop(segment, None) or _Recipients()
        self._recipients[segment] = recipients
        recipients.last = self._context.now
        if len(self._recipients) > MAX_REMEMBERED:
            del self._recipients[next(iter(self._recipients))]
        return recipients

    def sweep(self) -> None:
        """Forget the recipients of segments that were sent too long ago."""
        oldest = self._context.now - RECIPIENTS_KEPT_S
        while self._recipients:
            segment = next(iter(self._recipients))
            if self._recipients[segment].last >= oldest:
                return
            del self._recipients[segment]

    def __len__(self) -> int:
        """Number of segments whose recipients are remembered."""
        return len(self._recipients)

    def check_integrity(self) -> None:
        """Raises AssertionError when the readers of more segments than allowed are remembered, or a segment without
        readers."""
        assert len(self._recipients) <= MAX_REMEMBERED
        assert all(recipients.until for recipients in self._recipients.values())
