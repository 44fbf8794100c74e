"""This node as a source of segments: lookups, leases and sends for other nodes, and the fan-out limit.

Fan-out limit: an owner serves two readers of a segment at a time, and other readers fetch it from them::

    the first FAN_OUT readers              leased, and sent
    further readers, during those sends    DEFERRED if the match can wait, else leased and sent as well
    further readers, after one send        leased, and redirected to a recent recipient, which applies the same rule

So the copies spread as a tree, and no node of it sends many. A reader that is redirected to a node without a copy reads
from this node after all: it costs one lookup, and this node does not redirect to that recipient again.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.fetch import deadline_s
from tokenlake.core.instructions import SendBulk
from tokenlake.core.peers import Peers
from tokenlake.core.timers import Timer
from tokenlake.hints import NO_ACCESS, AccessRecord
from tokenlake.identity import LeaseId, NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import PoolId, Segment
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.fields import MAX_SECONDS
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["FAN_OUT", "FanOut", "Serving", "Verdict"]

SENT = Metric("tokenlake_sent_segments_total", "Segments sent to other nodes")
SENT_BYTES = Metric("tokenlake_sent_bytes_total", "Bytes of segments sent to other nodes")
SENT_TO_READERS = Metric("tokenlake_sent_to_readers_segments_total", "Segments sent to other nodes for an engine there")
REDIRECTED = Metric("tokenlake_redirected_lookups_total", "Lookups redirected to a recent recipient")
DEFERRED = Metric("tokenlake_deferred_lookups_total", "Lookups deferred while the segment is sent to other readers")

PEER_LEASE_SHARE = 0.5
"""Share of the slots that a pool can grow to which other nodes may lease in all; the rest is left for local writers."""
SLICE = 1024
"""Segments released per slice of work, or one lease."""
FAN_OUT = 2
"""Readers of a segment that this node serves at a time."""
RECIPIENTS_KEPT_S = 2.0
"""Seconds after the last send of a segment for which its recipients are remembered. Cached copies do not last long."""
MAX_REMEMBERED = 4096
"""Segments whose recipients are remembered."""

_LOCAL, _MISSING = Code.LOCAL, Code.MISSING
_DELIVERED = math.inf
_pool = operator.attrgetter("pool")


class Verdict(NamedTuple):
    """The fan-out limit's answer to a reader. Neither: this node serves it."""

    redirect: NodeId | None = None
    """Another node that has the segments, which the reader should ask."""
    deferred: bool = False
    """The reader should ask again soon."""


_SERVE, _DEFER = Verdict(), Verdict(deferred=True)


class _Recipients:
    """The recent readers of one segment here."""

    __slots__ = ("deferred_until", "last", "redirected", "until")

    def __init__(self) -> None:
        self.last = 0.0
        """Time of the last entry."""
        self.until: dict[NodeId, float] = {}
        """Per reader, the time until which its transfer counts as under way, or `_DELIVERED`."""
        self.redirected: dict[NodeId, NodeId] = {}
        """Per reader, the recipient that it was redirected to and has not come back from."""
        self.deferred_until: dict[NodeId, float] = {}
        """Per deferred reader, the time from which it is served all the same."""


class FanOut:
    """The recent readers of each segment of this node, and the decision that follows for the next reader."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._recipients: dict[Segment, _Recipients] = {}
        """The segment sent longest ago comes first."""

    def began(self, node: NodeId, segments: Sequence[Segment]) -> None:
        """A send of these segments to an engine of `node` begins."""
        self.sweep()
        nbytes = sum(segment.slot_bytes for segment in segments)
        until = self._context.now + deadline_s(self._peers.predict_s(node, nbytes))
        for segment in segments:
            recipients = self._entry(segment)
            # A reader that was redirected and reads here all the same did not find a copy there.
            recipients.until.pop(recipients.redirected.pop(node, node), None)
            recipients.deferred_until.pop(node, None)
            recipients.until[node] = until

    def done(self, node: NodeId, segments: Sequence[Segment]) -> None:
        """The send has ended."""
        for segment in segments:
            recipients = self._recipients.get(segment)
            if recipients is not None and node in recipients.until:
                recipients.until[node] = _DELIVERED

    def decide(self, node: NodeId, segments: Sequence[Segment], *, patient: bool) -> Verdict:
        """Serve, redirect or defer a reader on `node` that asks for these segments. `patient`: it can be deferred."""
        recipients = self._busy(node, segments)
        if recipients is None:
            if patient:
                self._expect(node, segments[0])
            return _SERVE
        having = [each for each, until in recipients.until.items() if until == _DELIVERED and self._peers.usable(each)]
        if having:
            chosen = min(having, key=self._peers.load)
            self._peers.will_read(chosen, sum(segment.slot_bytes for segment in segments))
            recipients.redirected[node] = chosen
            self._context.counters.add(REDIRECTED)
            return Verdict(redirect=chosen)
        # A reader is deferred no longer than the transfers take that are under way at its first lookup.
        under_way = max(until for until in recipients.until.values() if until < _DELIVERED)
        if patient and self._context.now < recipients.deferred_until.setdefault(node, under_way):
            self._context.counters.add(DEFERRED)
            return _DEFER
        return _SERVE

    def _busy(self, node: NodeId, segments: Sequence[Segment]) -> _Recipients | None:
        """The recipients of the deepest of these segments that has `FAN_OUT` of them beside `node`."""
        now, oldest = self._context.now, self._context.now - RECIPIENTS_KEPT_S
        for segment in reversed(segments) if self._recipients else ():
            recipients = self._recipients.get(segment)
            if recipients is None or recipients.last < oldest or recipients.until.get(node, 0.0) > now:
                continue
            count = sum(until > now and self._peers.usable(each) for each, until in recipients.until.items())
            if count >= FAN_OUT:
                return recipients
        return None

    def _expect(self, node: NodeId, segment: Segment) -> None:
        """Count a patient reader from its lookup on: many readers may ask before the first send begins."""
        recipients = self._entry(segment)
        until = self._context.now + self._context.config.match_deadline_s
        recipients.until[node] = max(until, recipients.until.get(node, 0.0))

    def _entry(self, segment: Segment) -> _Recipients:
        """The entry of `segment`, moved to the end."""
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
        """Segments whose recipients are remembered."""
        return len(self._recipients)

    def check_integrity(self) -> None:
        """AssertionError when more segments than allowed are remembered, or one without recipients."""
        assert len(self._recipients) <= MAX_REMEMBERED
        assert all(recipients.until for recipients in self._recipients.values())


@dataclass(slots=True, eq=False)
class _PeerLease:
    """A lease of another node."""

    node: NodeId
    segments: list[Segment]
    counts: Counter[PoolId]
    """Number of the segments in each pool."""
    timer: Timer


class Serving:
    """Lookups, leases and sends. A lease and a send each pin their segments."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._fan_out = FanOut(context, peers)
        self._leases: dict[LeaseId, _PeerLease] = {}
        self._leased: Counter[PoolId] = Counter()
        """Pins of the leases, by pool."""
        self._sends: dict[int, tuple[NodeId | None, list[Segment]]] = {}
        """Per bulk connection, the segments and the node of the engine that reads them; None: a background transfer."""

    # -- lookups

    def lookup(self, node: NodeId, message: wire.Lookup) -> wire.LookupReply:
        """Lease the segments that are here to `node`, and answer from the directory for the other keys."""
        tenant, keys = TenantId(message.tenant), split_keys(message.keys)
        found = self._context.ready(tenant, keys)
        codes = bytearray([_LOCAL]) * len(keys)
        nodes = self._ask_directory(tenant, keys, found, codes) if None in found else []
        if message.claim_s:
            pairs = self._context.ring.candidates(message.keys)
            for key, code, pair in zip(keys, codes, pairs, strict=True):
                if code == _MISSING and self._context.node in pair:
                    self._directory_node.claim(node, tenant, key, message.claim_s)
        leased = self._within_room(found, codes)
        verdict = self._fan_out.decide(node, leased, patient=message.may_defer) if leased else _SERVE
        if verdict.deferred:
            codes, leased = codes.replace(bytes([_LOCAL]), bytes([Code.DEFERRED])), []
        lease = self._grant(node, leased) if leased else LeaseId(0)
        vacancy, load = self._context.vacancy(), self._context.load()
        known, last_access, age_s = self._deepest(tenant, keys, found)
        redirect = verdict.redirect or ""
        return wire.LookupReply(
            message.call, lease, bytes(codes), tuple(nodes), vacancy, load, known, last_access, age_s, redirect
        )

    def _deepest(
        self, tenant: TenantId, keys: list[SegmentKey], found: list[Segment | None]
    ) -> tuple[int, AccessRecord, float]:
        """The number of keys up to the last one that is here or of which a last access is known here, that access, and
        its age in seconds: fields of `LookupReply`."""
        known = len(found)
        while known and found[known - 1] is None:
            known -= 1
        behind = keys[known:]
        sources = (
            self._context.store.last_access(tenant, behind, self._context.now),
            self._directory_node.last_access(tenant, behind),
        )
        remembered = max(
            (each for each in sources if each is not None), key=lambda each: (each[0], -each[2]), default=None
        )
        if remembered is not None:
            index, access, age_s = remembered
            return known + index + 1, access, min(MAX_SECONDS, age_s)
        here = found[known - 1] if known else None
        return (0, NO_ACCESS, 0.0) if here is None else (known, here.hints.access, self._context.since(here.touched))

    def _ask_directory(
        self, tenant: TenantId, keys: list[SegmentKey], found: list[Segment | None], codes: bytearray
    ) -> list[NodeId]:
        """Set `codes` of the keys that are not here from the directory. Returns the node per ELSEWHERE, in order."""
        here = self._context.node
        absent = [index for index, segment in enumerate(found) if segment is None]
        missing = [keys[index] for index in absent]
        nodes: list[NodeId] = []
        candidates = self._context.ring.candidates(join_keys(missing))
        answers = self._directory_node.ask(tenant, missing)
        for index, pair, (code, elsewhere) in zip(absent, candidates, answers, strict=True):
            # The reader may ask for keys that do not hash to this node: it was told that this node owns them.
            codes[index] = code if here in pair else _MISSING
            if codes[index] == Code.ELSEWHERE and elsewhere is not None:
                nodes.append(elsewhere)
        return nodes

    def _within_room(self, found: list[Segment | None], codes: bytearray) -> list[Segment]:
        """The segments found that other nodes may lease now; the codes of the others become UNKNOWN."""
        leased = [segment for segment in found if segment is not None]
        rooms = {pool: self._room(pool) for pool in dict.fromkeys(map(_pool, leased))}
        if all(len(leased) <= room for room in rooms.values()):
            return leased
        leased.clear()
        for index, segment in enumerate(found):
            if segment is not None and rooms[segment.pool] > 0:
                rooms[segment.pool] -= 1
                leased.append(segment)
            elif segment is not None:
                codes[index] = Code.UNKNOWN
        return leased

    def _room(self, pool: PoolId) -> int:
        """Further segments of `pool` that other nodes may lease."""
        return int(PEER_LEASE_SHARE * self._context.store.capacity(pool)) - self._leased[pool]

    # -- leases

    def _grant(self, node: NodeId, segments: list[Segment]) -> LeaseId:
        lease = LeaseId(self._context.next_id())
        self._context.store.pin(*segments)
        counts = Counter(map(_pool, segments))
        self._leased += counts
        self._leases[lease] = _PeerLease(node, segments, counts, self._expire_later(lease))
        return lease

    def _expire_later(self, lease: LeaseId) -> Timer:
        return self._context.after(self._context.config.peer_lease_s, lambda: self.release(lease))

    def renew(self, node: NodeId, leases: Iterable[int]) -> None:
        """`node` still needs these leases. A lease that has ended, or is another node's, is ignored."""
        for number in leases:
            lease = self._leases.get(LeaseId(number))
            if lease is not None and lease.node == node:
                lease.timer.cancel()
                lease.timer = self._expire_later(LeaseId(number))

    def release(self, lease_id: LeaseId, node: NodeId | None = None) -> None:
        """End a lease. A lease that has ended, or that is not `node`'s, is ignored."""
        lease = self._leases.get(lease_id)
        if lease is None or (node is not None and lease.node != node):
            return
        del self._leases[lease_id]
        lease.timer.cancel()
        self._leased -= lease.counts
        self._context.store.unpin(*lease.segments)

    def release_all(self, node: NodeId) -> None:
        """`node` is down: end its leases, in slices. Sends to it keep their own pins."""
        ending = [at for at, lease in self._leases.items() if lease.node == node]

        def work() -> bool:
            room = SLICE
            while ending and room > 0:
                lease_id = ending.pop()
                lease = self._leases.get(lease_id)
                room -= len(lease.segments) if lease is not None else 0
                self.release(lease_id)
            return bool(ending)

        self._context.in_slices(work)

    # -- sends

    def check_pull(self, stream: int) -> None:
        """Raises `ValueError` while an earlier send on the bulk connection is under way. Changes nothing."""
        if stream in self._sends:
            raise ValueError(f"bulk connection {stream} asks again before it was served")

    def pull(
        self, stream: int, node: NodeId, tenant: TenantId, keys: list[SegmentKey], *, background: bool = False
    ) -> None:
        """Pin the segments that are here and send them to `node`; the codes of the others are LOST. `background`: no
        engine of `node` waits for them."""
        found = self._context.ready(tenant, keys)
        sizes = {segment.slot_bytes for segment in found if segment is not None}
        # Segments of two layouts never share a key: a request for both is malformed, and gets neither.
        slot_bytes = sizes.pop() if len(sizes) == 1 else 0
        sent = [segment for segment in found if segment is not None] if slot_bytes else []
        codes = bytes(Code.LOCAL if segment is not None and slot_bytes else Code.LOST for segment in found)
        self._context.store.pin(*sent)
        self._sends[stream] = (None if background else node), sent
        self._context.counters.add(SENT, len(sent))
        self._context.counters.add(SENT_BYTES, len(sent) * slot_bytes)
        if not background:
            self._context.counters.add(SENT_TO_READERS, len(sent))
            self._context.sends(len(sent) * slot_bytes)
            self._fan_out.began(node, sent)
        slots = b"".join(segment.packed for segment in sent)
        checksums = b"".join(segment.checksums for segment in sent)
        self._context.emit(SendBulk(stream, slot_bytes, codes, slots, checksums))

    def sent(self, stream: int) -> None:
        """The sender has returned: release the pins of the send."""
        node, segments = self._sends.pop(stream, (None, []))
        self._context.store.unpin(*segments)
        if node is not None:
            self._fan_out.done(node, segments)

    def sweep(self) -> None:
        """Forget recipients that are too old for a redirect. Called once per gossip interval."""
        self._fan_out.sweep()

    # -- checks

    def pinned(self) -> Iterator[Segment]:
        """A segment per pin held here."""
        for lease in self._leases.values():
            yield from lease.segments
        for _, segments in self._sends.values():
            yield from segments

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {
            "leases to peers": len(self._leases),
            "sends": len(self._sends),
            "segments with recipients": len(self._fan_out),
        }

    def check_integrity(self) -> None:
        """AssertionError when the count of leased segments is wrong, or the fan-out limit exceeds its bounds."""
        leased = Counter(map(_pool, itertools.chain.from_iterable(lease.segments for lease in self._leases.values())))
        assert self._leased == leased
        self._fan_out.check_integrity()
