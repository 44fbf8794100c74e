"""What many want at once is sent by few: the others read it where it was sent.

::

    the first FEW that ask    leased to, and sent
    while they are sent it    PENDING for those that can wait; those that cannot are sent it as well
    once one has it           leased to, and told to ask that one rather, where the same rule holds

So copies spread as a tree, every node of which sends few. Whoever is told of a node that has it no more reads here
after all, which costs it one question, and takes that node's place.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.core.context import Context
from tokenlake.core.fetch import deadline_s
from tokenlake.core.peers import Peers
from tokenlake.identity import NodeId
from tokenlake.metrics import Metric
from tokenlake.store import Segment

__all__ = ["DELAYED", "NAMED", "Turns"]

NAMED = Metric("tokenlake_named_turns_total", "Lookups that were told of a node that was just sent what many read here")
DELAYED = Metric("tokenlake_delayed_turns_total", "Lookups that were told to come again, since others are sent it now")

FEW = 2
"""Readers that one copy is sent to."""
KEPT_S = 2.0
"""So long after it was sent last it is known to whom. Cached copies do not stay for long."""
MAX_KEPT = 4096
"""Segments."""
_HAS_IT = float("inf")


class _Readers:
    """Of one segment, lately."""

    __slots__ = ("last", "sent", "told", "waits")

    def __init__(self) -> None:
        self.last = 0.0
        """When somebody was to be sent it last."""
        self.sent: dict[NodeId, float] = {}
        """Until when it counts as on its way there, or `_HAS_IT`."""
        self.told: dict[NodeId, NodeId] = {}
        """Whom each was told of last, and has not read it here since."""
        self.waits: dict[NodeId, float] = {}
        """Until when each is told to wait, and has not read it here since."""


class Turns:
    """Of one node."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._readers: dict[Segment, _Readers] = {}
        """What was sent longest ago first."""

    def begin(self, node: NodeId, segments: Sequence[Segment]) -> None:
        """An engine of `node` is sent these."""
        self.sweep()
        nbytes = sum(segment.slot_bytes for segment in segments)
        until = self._context.now + deadline_s(self._peers.predict_s(node, nbytes))
        for segment in segments:
            readers = self._of(segment)
            # Whom it was told of had it no more.
            readers.sent.pop(readers.told.pop(node, node), None)
            readers.waits.pop(node, None)
            readers.sent[node] = until

    def done(self, node: NodeId, segments: Sequence[Segment]) -> None:
        """It was sent them."""
        for segment in segments:
            readers = self._readers.get(segment)
            if readers is not None and node in readers.sent:
                readers.sent[node] = _HAS_IT

    def look(self, node: NodeId, segments: Sequence[Segment], *, patient: bool) -> NodeId | None:
        """An engine of `node` asks for these. Who has them as well and should be asked; `node` itself when it is
        `patient` and should come again; else None."""
        readers = self._busy(node, segments)
        if readers is None:
            if patient:
                self._expect(node, segments[0])
            return None
        having = [each for each, until in readers.sent.items() if until == _HAS_IT and self._peers.usable(each)]
        if having:
            chosen = min(having, key=self._peers.load)
            self._peers.will_read(chosen, sum(segment.slot_bytes for segment in segments))
            readers.told[node] = chosen
            self._context.counters.add(NAMED)
            return chosen
        # Nobody waits for longer than those that are sent it now may take.
        under_way = max(until for until in readers.sent.values() if until < _HAS_IT)
        if patient and self._context.now < readers.waits.setdefault(node, under_way):
            self._context.counters.add(DELAYED)
            return node
        return None

    def _busy(self, node: NodeId, segments: Sequence[Segment]) -> _Readers | None:
        """Readers of the deepest of these that has enough of them beside `node`."""
        now, lately = self._context.now, self._context.now - KEPT_S
        for segment in reversed(segments) if self._readers else ():
            readers = self._readers.get(segment)
            if readers is None or readers.last < lately or readers.sent.get(node, 0.0) > now:
                continue
            many = sum(until > now and self._peers.usable(each) for each, until in readers.sent.items()) >= FEW
            if many:
                return readers
        return None

    def _expect(self, node: NodeId, segment: Segment) -> None:
        """It will read this at once: of a crowd many ask before the first is sent anything."""
        readers = self._of(segment)
        until = self._context.now + self._context.config.match_deadline_s
        readers.sent[node] = max(until, readers.sent.get(node, 0.0))

    def _of(self, segment: Segment) -> _Readers:
        """Noted as the last that was sent."""
        readers = self._readers.pop(segment, None) or _Readers()
        self._readers[segment] = readers
        readers.last = self._context.now
        if len(self._readers) > MAX_KEPT:
            del self._readers[next(iter(self._readers))]
        return readers

    def sweep(self) -> None:
        """Forget what was sent too long ago."""
        lately = self._context.now - KEPT_S
        while self._readers:
            segment = next(iter(self._readers))
            if self._readers[segment].last >= lately:
                return
            del self._readers[segment]

    def __len__(self) -> int:
        """Segments whose readers are known."""
        return len(self._readers)

    def check_integrity(self) -> None:
        """AssertionError when more is kept than may be."""
        assert len(self._readers) <= MAX_KEPT
        assert all(readers.sent for readers in self._readers.values())
