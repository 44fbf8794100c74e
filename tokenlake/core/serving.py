"""This node as a source: lookups, leases and sends for other nodes."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator

from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.hot import Hot
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
from tokenlake.wire.slots import join_keys

__all__ = ["Serving"]

SENT = Metric("tokenlake_sent_segments_total", "Segments sent to other nodes")
SENT_BYTES = Metric("tokenlake_sent_bytes_total", "Bytes of segments sent to other nodes")
SENT_TO_READERS = Metric("tokenlake_sent_to_readers_segments_total", "Those of them that an engine there was to read")

PEER_LEASE_SHARE = 0.5
"""Of the slots that a pool can grow to, what other nodes together may have leased: the rest stays for writers
here."""

SLICE = 1024
"""Segments given back at a time, or one lease."""

_LOCAL, _MISSING = Code.LOCAL, Code.MISSING
_pool = operator.attrgetter("pool")


class _PeerLease:
    def __init__(self, node: NodeId, segments: list[Segment], counts: Counter[PoolId], timer: Timer) -> None:
        self.node = node
        self.segments = segments
        self.counts = counts
        """How many of them in each pool."""
        self.timer = timer


class Serving:
    """Leases to nodes, and the sends under way."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode, hot: Hot) -> None:
        self._context = context
        self._hot = hot
        self._peers = peers
        self._directory_node = directory_node
        self._leases: dict[LeaseId, _PeerLease] = {}
        self._leased: Counter[PoolId] = Counter()
        """Pins of the leases, by pool."""
        self._sends: dict[int, tuple[NodeId | None, list[Segment]]] = {}
        """Segments, and the node whose engine reads them."""

    # -- lookups

    def lookup(self, node: NodeId, message: wire.Lookup, keys: list[SegmentKey]) -> wire.LookupReply:
        """Lease what is here to `node`, say what the directory knows of the rest."""
        tenant = TenantId(message.tenant)
        found = self._context.ready(tenant, keys)
        codes = bytearray([_LOCAL]) * len(keys)
        nodes = self._ask_directory_node(tenant, keys, found, codes) if None in found else []
        if message.claim_s:
            missing = [key for key, code in zip(keys, codes, strict=True) if code == _MISSING]
            for key in self._context.by_directory_node(missing).get(self._context.node, ()):
                self._directory_node.claim(node, tenant, key, message.claim_s)
        leased = self._within_room(found, codes)
        rather = self._hot.turns.look(node, leased, patient=message.patient) if leased else None
        if rather == node:
            codes, leased, rather = codes.replace(bytes([_LOCAL]), bytes([Code.PENDING])), [], None
        lease = self._grant(node, leased) if leased else LeaseId(0)
        vacancy, load = self._context.vacancy(), self._context.load()
        known, last_access, age_s = self._deepest(tenant, keys, found)
        return wire.LookupReply(
            message.call, lease, bytes(codes), tuple(nodes), vacancy, load, known, last_access, age_s, rather or ""
        )

    def _deepest(
        self, tenant: TenantId, keys: list[SegmentKey], found: list[Segment | None]
    ) -> tuple[int, AccessRecord, float]:
        """Of the last key that is here, or that is remembered: as `LookupReply` tells it."""
        known = len(found)
        while known and found[known - 1] is None:
            known -= 1
        remembered = self._context.store.last_access(tenant, keys[known:], self._context.now)
        if remembered is not None:
            index, access, age_s = remembered
            return known + index + 1, access, min(MAX_SECONDS, age_s)
        here = found[known - 1] if known else None
        return (0, NO_ACCESS, 0.0) if here is None else (known, here.hints.access, self._context.since(here.touched))

    def _ask_directory_node(
        self, tenant: TenantId, keys: list[SegmentKey], found: list[Segment | None], codes: bytearray
    ) -> list[NodeId]:
        """What the directory knows of the keys that are not here goes into `codes`; the nodes it names, in order."""
        here = self._context.node
        absent = [index for index, segment in enumerate(found) if segment is None]
        missing = [keys[index] for index in absent]
        nodes: list[NodeId] = []
        unasked: list[SegmentKey] = []
        candidates = self._context.ring.candidates(join_keys(missing))
        answers = self._directory_node.ask(tenant, missing)
        for index, (directory_node, other), (code, elsewhere) in zip(absent, candidates, answers, strict=True):
            codes[index] = _MISSING
            if here not in (directory_node, other):
                # Asked only because a candidate named this node: what it knows is out of date.
                unasked.append(keys[index])
            elif elsewhere is not None:
                codes[index] = code
                nodes.append(elsewhere)
            elif directory_node == here:
                # The other candidate knows only what it was told in place of the home.
                codes[index] = code
        for directory_node, gone in self._context.by_directory_node(unasked).items():
            self._peers.tell(directory_node, wire.Evicted(tenant, join_keys(gone), here))
        return nodes

    def _within_room(self, found: list[Segment | None], codes: bytearray) -> list[Segment]:
        """What of the segments found other nodes may lease now; the others become UNKNOWN."""
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
        """How many more segments of `pool` other nodes may lease."""
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
        """`node` still needs these; those that have ended stay ended."""
        for number in leases:
            lease = self._leases.get(LeaseId(number))
            if lease is not None and lease.node == node:
                lease.timer.cancel()
                lease.timer = self._expire_later(LeaseId(number))

    def release(self, lease_id: LeaseId, node: NodeId | None = None) -> None:
        """End a lease to a node; nothing happens when it has ended, or is another `node`'s."""
        lease = self._leases.get(lease_id)
        if lease is None or (node is not None and lease.node != node):
            return
        del self._leases[lease_id]
        lease.timer.cancel()
        self._leased -= lease.counts
        self._context.store.unpin(*lease.segments)

    def release_all(self, node: NodeId) -> None:
        """`node` is gone: its leases end. Sends to it hold pins of their own."""
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
        """Raises `ValueError` while an earlier send on the stream is not done. Changes nothing."""
        if stream in self._sends:
            raise ValueError(f"bulk connection {stream} asks again before it was served")

    def pull(
        self, stream: int, node: NodeId, tenant: TenantId, keys: list[SegmentKey], *, background: bool = False
    ) -> None:
        """Pin what is here and send it to `node`; what is not is LOST. `background`: to be kept there, no
        engine reads it now."""
        found = self._context.ready(tenant, keys)
        sizes = {segment.slot_bytes for segment in found if segment is not None}
        slot_bytes = sizes.pop() if len(sizes) == 1 else 0
        # Segments of two layouts never share a key; should a peer ask for both, it gets neither.
        sent = [segment for segment in found if segment is not None] if slot_bytes else []
        codes = bytes(Code.LOCAL if segment is not None and slot_bytes else Code.LOST for segment in found)
        self._context.store.pin(*sent)
        self._sends[stream] = (None if background else node), sent
        self._context.counters.add(SENT, len(sent))
        self._context.counters.add(SENT_BYTES, len(sent) * slot_bytes)
        if not background:
            self._context.counters.add(SENT_TO_READERS, len(sent))
            self._context.served(tenant, len(sent) * slot_bytes)
            self._hot.sent(sent, node)
        slots = b"".join(segment.packed for segment in sent)
        checksums = b"".join(segment.checksums for segment in sent)
        self._context.emit(SendBulk(stream, slot_bytes, codes, slots, checksums))

    def sent(self, stream: int) -> None:
        """The sender returned."""
        node, segments = self._sends.pop(stream, (None, []))
        self._context.store.unpin(*segments)
        if node is not None:
            self._hot.turns.done(node, segments)

    def pinned(self) -> Iterator[Segment]:
        """A segment per pin held here; for integrity checks."""
        for lease in self._leases.values():
            yield from lease.segments
        for _, segments in self._sends.values():
            yield from segments

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"leases to peers": len(self._leases), "sends": len(self._sends)}

    def check_integrity(self) -> None:
        """AssertionError when the count of leased segments is wrong."""
        leased = Counter(map(_pool, itertools.chain.from_iterable(lease.segments for lease in self._leases.values())))
        assert self._leased == leased
