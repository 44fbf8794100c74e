"""This node as a source of segments: lookups, leases and sends for other nodes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.fan_out import SERVE, FanOut
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cluster.transfer import MAX_DEADLINE_S, OnArrival, deadline_s
from tokenlake.core.cluster.transfers import Transfers
from tokenlake.core.context import Context, Part
from tokenlake.core.instructions import SendBulk
from tokenlake.hints import NO_ACCESS, AccessRecord
from tokenlake.identity import LeaseId, NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, PoolId, Segment
from tokenlake.metrics import Metric
from tokenlake.timers import Timer
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.fields import MAX_SECONDS
from tokenlake.wire.slots import join_keys, split_keys

SENT = Metric("tokenlake_sent_segments_total", "Segments sent to other nodes")
SENT_BYTES = Metric("tokenlake_sent_bytes_total", "Bytes of segments sent to another node", "peer")
SENT_TO_READERS = Metric("tokenlake_sent_to_readers_segments_total", "Segments sent to other nodes for an engine there")

PEER_LEASE_SHARE = 0.5
"""Share of a pool's capacity (in slots) that all other nodes together may lease, and share of it that the segments of
the sends under way to one node may have. The rest is left for the engines of this node."""
READERS_PER_SLOT = 64
"""Maximum mean number of leases of other nodes on each slot that they may lease; a bound on the memory for leases."""
SLICE = 1024
"""Number of segments whose leases one slice of work releases before other events are handled; a slice releases at least
one lease."""
_LOCAL, _MISSING = Code.LOCAL, Code.MISSING
_NONE: frozenset[Segment] = frozenset()


@dataclass(slots=True, eq=False)
class _PeerLease:
    """A lease that another node holds on segments of this node."""

    node: NodeId
    segments: list[Segment]
    timer: Timer


class _Send(NamedTuple):
    """A send of segments to another node. It pins them."""

    node: NodeId
    segments: list[Segment]
    background: bool
    """True if no engine of the node waits for the segments."""


@dataclass(eq=False, slots=True)
class _Pull:
    """Segments that another node pulls from this one. While some of them are being read from disk, the pull pins those
    in memory."""

    stream: int
    node: NodeId
    tenant: TenantId
    keys: list[SegmentKey]
    background: bool
    segments: list[Segment] = field(default_factory=list)
    awaited: int = 0
    """Number of segments that are not read yet."""


class Serving(Part):
    """Serves other nodes: answers their lookups, grants them leases, and sends them segments. A lease and a send each
    pin their segments."""

    def __init__(self, context: Context, peers: Peers, directory_node: DirectoryNode, transfers: Transfers) -> None:
        self._context = context
        self._directory_node = directory_node
        self._transfers = transfers
        self._reads: dict[_Pull, None] = {}
        """The pulls whose segments are being read from disk."""
        self._reading: dict[int, _Pull] = {}
        """Those of them that are still to be sent, by bulk connection."""
        self._fan_out = FanOut(context, peers)
        self._leases: dict[LeaseId, _PeerLease] = {}
        # Sets, because a loop over the segments takes four times as long. Their order reaches no instruction.
        self._leased: dict[PoolId, set[Segment]] = {}
        """The segments that other nodes lease, by pool of slots."""
        self._again: Counter[Segment] = Counter()
        """For each segment with several leases of other nodes, the number of leases beyond the first."""
        self._pins = 0
        """Number of pins that leases of other nodes hold, in all pools."""
        self._sends: dict[int, _Send] = {}
        """The send under way on each bulk connection."""
        self._sending: Counter[NodeId] = Counter()
        """Number of segments in the sends to each node that are under way."""

    # -- lookups

    def lookup(self, node: NodeId, message: wire.Lookup) -> wire.LookupReply:
        """Answer a lookup of `node`: lease it the segments that this node has, and answer for the other keys from the
        directory."""
        tenant, keys = TenantId(message.tenant), split_keys(message.keys)
        found = self._context.ready(tenant, keys)
        disk = self._context.on_disk(tenant, keys, found)
        codes = bytearray([_LOCAL]) * len(keys)
        nodes = self._ask_directory(tenant, keys, found, disk, codes, message.ring[0]) if None in found else []
        if message.marker_s:
            pairs = self._context.ring.candidates(message.keys)
            for index, (key, pair) in enumerate(zip(keys, pairs, strict=True)):
                if codes[index] != _MISSING:
                    continue
                if self._context.node in pair:
                    self._directory_node.set_markers(node, tenant, (key,), message.marker_s)
                else:
                    # The ring changed since the reader began to wait here: another node grants the markers of this key.
                    codes[index] = Code.UNKNOWN
        leased = self._within_room(found, codes) if message.lease else []
        verdict = self._fan_out.decide(node, leased, patient=message.may_defer) if leased else SERVE
        if verdict.deferred:
            codes, leased = codes.replace(bytes([_LOCAL]), bytes([Code.DEFERRED])), []
        lease = self._grant(node, leased) if leased else LeaseId(0)
        read = disk if not verdict.deferred else {}
        disk_s = self._read_s(read, keep=message.lease) if read else 0.0
        on_disk = bytes(index in read for index in range(len(keys))) if read else b""
        vacancy, load, ring = self._context.vacancy(), self._context.load(), self._context.ring_version
        known, redirect = self._deepest(tenant, keys, found, disk), verdict.redirect or ""
        return wire.LookupReply(
            message.call, lease, bytes(codes), tuple(nodes), vacancy, load, *known, redirect, ring, disk_s, on_disk
        )

    def _read_s(self, entries: Mapping[int, int], *, keep: bool) -> float:
        """Returns the seconds that reading segments on disk takes. `keep`: keep them there until a reader has had time
        to fetch them."""
        disk, until = self._context.disk, self._context.now + self._context.config.peer_lease_s
        for entry in entries.values() if keep else ():
            disk.hold(entry, until)
        nbytes = sum(disk.slab(entry).slot_bytes for entry in entries.values())
        return self._transfers.disk_s(nbytes)

    def _deepest(
        self, tenant: TenantId, keys: list[SegmentKey], found: list[Segment | None], disk: Mapping[int, int]
    ) -> tuple[int, AccessRecord, float]:
        """Returns three fields of `LookupReply`: the number of keys up to the last one whose segment this node has or
        remembers, the `AccessRecord` of the request that accessed that segment last, and the seconds since then."""
        known = len(found)
        while known and found[known - 1] is None:
            known -= 1
        deepest = max(disk, default=-1)
        if deepest >= known:
            return deepest + 1, *self._context.disk.last_access(disk[deepest], self._context.now)
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
        self,
        tenant: TenantId,
        keys: list[SegmentKey],
        found: list[Segment | None],
        disk: Container[int],
        codes: bytearray,
        epoch: int,
    ) -> list[NodeId]:
        """Set the codes of the keys whose segments this node lacks from the directory. `disk`: the indices of the keys
        whose segments it has on disk. Returns the owner for each code ELSEWHERE, in the order of the keys. `epoch`:
        that of the reader's ring; on a newer ring than this node's, this node may be the directory node of keys of
        which it knows nothing."""
        absent_code = _MISSING if epoch <= self._context.record.epoch else Code.UNKNOWN
        here = self._context.node
        absent = [index for index, segment in enumerate(found) if segment is None and index not in disk]
        missing = [keys[index] for index in absent]
        nodes: list[NodeId] = []
        candidates = self._context.ring.candidates(join_keys(missing))
        answers = self._directory_node.answers(tenant, missing)
        for index, pair, (code, elsewhere) in zip(absent, candidates, answers, strict=True):
            # A reader that was told that this node owns some segments also asks for their neighbours, of which this
            # node is not a candidate and knows nothing.
            # An entry of a key that moved away counts for readers that have not heard of the new ring yet.
            known = here in pair or code in (Code.ELSEWHERE, Code.PENDING)
            codes[index] = code if known else absent_code
            if codes[index] == Code.ELSEWHERE and elsewhere is not None:
                nodes.append(elsewhere)
        return nodes

    def _within_room(self, found: list[Segment | None], codes: bytearray) -> list[Segment]:
        """Returns those found segments that other nodes may still lease, within the limit of slots that they may lease;
        the codes of the other found segments become UNKNOWN. A segment that another node leases already takes no
        further slot."""
        leased = [segment for segment in found if segment is not None]
        rooms: dict[PoolId, int] = {}
        enough = True
        for pool, segments in _by_pool(leased).items():
            rooms[pool] = self._room(pool, len(leased))
            enough = enough and len(segments - self._leased.get(pool, _NONE)) <= rooms[pool]
        if enough:
            return leased
        leased.clear()
        for index, segment in enumerate(found):
            if segment is None:
                continue
            fresh = segment not in self._leased.get(segment.pool, _NONE)
            if rooms[segment.pool] >= fresh:
                rooms[segment.pool] -= fresh
                leased.append(segment)
            else:
                codes[index] = Code.UNKNOWN
        return leased

    def _room(self, pool: PoolId, wanted: int) -> int:
        """Returns how many further slots of `pool` other nodes may lease. Returns -1 if `wanted` further leases would
        exceed the limit of leases (`READERS_PER_SLOT`): then slots that are leased already get no further lease
        either."""
        limit = int(PEER_LEASE_SHARE * self._context.store.capacity(pool))
        room = limit - len(self._leased.get(pool, _NONE))
        return room if self._pins + wanted <= READERS_PER_SLOT * limit else -1

    # -- leases

    def _grant(self, node: NodeId, segments: list[Segment]) -> LeaseId:
        lease = LeaseId(self._context.next_id())
        self._context.store.pin(*segments)
        self._pins += len(segments)
        for pool, leased in _by_pool(segments).items():
            before = self._leased.setdefault(pool, set())
            self._again.update(before & leased)
            before |= leased
        self._leases[lease] = _PeerLease(node, segments, self._expire_later(lease))
        return lease

    def _expire_later(self, lease: LeaseId) -> Timer:
        return self._context.after(self._context.config.peer_lease_s, lambda: self.release(lease))

    def renew(self, node: NodeId, leases: Iterable[int]) -> None:
        """Renew leases that `node` still needs. A lease that has ended, or that another node holds, is ignored."""
        for number in leases:
            lease = self._leases.get(LeaseId(number))
            if lease is not None and lease.node == node:
                lease.timer.cancel()
                lease.timer = self._expire_later(LeaseId(number))

    def release(self, lease_id: LeaseId, node: NodeId | None = None) -> None:
        """End a lease of another node. A lease that has ended already, or that is not held by `node` (if given), is
        ignored."""
        lease = self._leases.get(lease_id)
        if lease is None or (node is not None and lease.node != node):
            return
        del self._leases[lease_id]
        lease.timer.cancel()
        self._pins -= len(lease.segments)
        for pool, leased in _by_pool(lease.segments).items():
            if self._again:
                still = {segment for segment in leased if segment in self._again}
                leased -= still
                for segment in still:
                    self._again[segment] -= 1
                    if not self._again[segment]:
                        del self._again[segment]
            before = self._leased[pool]
            before -= leased
            if not before:
                del self._leased[pool]
        self._context.store.unpin(*lease.segments)

    def release_all(self, node: NodeId) -> None:
        """End all leases of `node`, which is down, some at a time. Sends to it keep their own pins."""
        self.release_some([at for at, lease in self._leases.items() if lease.node == node])

    def release_some(self, leases: Iterable[int], node: NodeId | None = None) -> None:
        """End these leases of other nodes (see `release`), some at a time."""
        ending = [LeaseId(number) for number in leases]

        def work() -> bool:
            room = SLICE
            while ending and room > 0:
                lease_id = ending.pop()
                lease = self._leases.get(lease_id)
                room -= 8 + len(lease.segments) if lease is not None else 1
                self.release(lease_id, node)
            return bool(ending)

        self._context.in_slices(work)

    # -- sends

    def check_pull(self, stream: int) -> None:
        """Raises `ValueError` while an earlier send on the bulk connection is under way. Changes nothing."""
        if stream in self._sends or stream in self._reading:
            raise ValueError(f"bulk connection {stream} asks again before it was served")

    def pull(
        self, stream: int, node: NodeId, tenant: TenantId, keys: list[SegmentKey], *, background: bool = False
    ) -> None:
        """Send segments to `node` over the bulk connection `stream`: those that this node has are pinned and sent, the
        codes of the others are LOST. Segments on disk are read back first. `background`: no engine of `node` waits for
        them. A node that reads slowly is sent no further segments while those under way to it are as many as all other
        nodes together may lease; as many are read from disk for other nodes at a time."""
        pull, found = _Pull(stream, node, tenant, keys, background), self._context.ready(tenant, keys)
        disk = self._readable(pull, found)
        if disk:
            self._read_back(pull, found, disk)
        else:
            self._send(pull, found)

    def _readable(self, pull: _Pull, found: Sequence[Segment | None]) -> dict[int, int]:
        """Returns the entries of the segments on disk that are read for a pull, by index: as many as there is room for
        besides the segments in memory that it sends, those that other pulls read and those under way to its node."""
        entries = self._context.on_disk(pull.tenant, pull.keys, found)
        if not entries:
            return entries
        slab = self._context.disk.slab(next(iter(entries.values())))
        pool = self._context.store.pool(slab.tenant, slab.slot_bytes)
        held = sum(each.awaited + len(each.segments) for each in self._reads) + self._sending[pull.node]
        room = self._limit(pool.id) - held - (len(found) - found.count(None)) if pool is not None else 0
        return dict(itertools.islice(entries.items(), max(0, room)))

    def _limit(self, pool: PoolId) -> int:
        """Returns how many slots of `pool` the segments of the sends under way to one node may have."""
        return max(1, int(PEER_LEASE_SHARE * self._context.store.capacity(pool)))

    def _read_back(self, pull: _Pull, found: Sequence[Segment | None], entries: Mapping[int, int]) -> None:
        """Read segments from disk, and then send them with those in memory, which are pinned meanwhile. The bulk
        connection may end before: then nothing is sent."""
        tier, here = self._context.disk, self._context.node
        pull.segments = [segment for segment in found if segment is not None]
        self._context.store.pin(*pull.segments)
        self._reading[pull.stream] = pull
        self._reads[pull] = None
        pull.awaited = len(entries)
        by_shape: dict[tuple[int, int], list[tuple[SegmentKey, int, OnArrival]]] = {}
        for index, entry in entries.items():
            shape = tier.slab(entry).slot_bytes, tier.shards(entry)
            by_shape.setdefault(shape, []).append((pull.keys[index], index, partial(self._read, pull)))
        for (slot_bytes, shards), wanted in by_shape.items():
            wait_s = min(MAX_DEADLINE_S, deadline_s(self._transfers.disk_s(slot_bytes * len(wanted))))
            self._transfers.bring(
                here,
                pull.tenant,
                wanted,
                kind=Kind.CACHED,
                slot_bytes=slot_bytes,
                shards=shards,
                wait_s=wait_s,
                for_peer=True,
            )

    def _read(self, pull: _Pull, segment: Segment | None, code: Code) -> None:
        """Handle the end of the read of one segment of a pull from disk. `segment`: None if it was not read."""
        pull.awaited -= 1
        if segment is not None:
            pull.segments.append(segment)
        if pull.awaited:
            return
        del self._reads[pull]
        if self._reading.get(pull.stream) is pull:
            del self._reading[pull.stream]
            self._send(pull, self._context.ready(pull.tenant, pull.keys))
        self._context.store.unpin(*pull.segments)

    def _send(self, pull: _Pull, found: Sequence[Segment | None]) -> None:
        node = pull.node
        sizes = {segment.slot_bytes for segment in found if segment is not None}
        # All segments of a correct request have one layout. A request for segments of two sizes is malformed, and gets
        # none.
        slot_bytes = sizes.pop() if len(sizes) == 1 else 0
        sent = [segment for segment in found if segment is not None] if slot_bytes else []
        if sent:
            del sent[max(0, self._limit(sent[0].pool) - self._sending[node]) :]
        codes = bytearray([Code.LOST]) * len(found)
        having = (index for index, segment in enumerate(found) if segment is not None)
        for index in itertools.islice(having, len(sent)):
            codes[index] = Code.LOCAL
        self._context.store.pin(*sent)
        self._sends[pull.stream] = _Send(node, sent, pull.background)
        self._sending[node] += len(sent)
        self._context.counters.add(SENT, len(sent))
        self._context.counters.add_for(SENT_BYTES, len(sent) * slot_bytes, node)
        if not pull.background:
            self._context.counters.add(SENT_TO_READERS, len(sent))
            self._context.sends(len(sent) * slot_bytes)
            self._fan_out.began(node, sent)
        slots = b"".join(segment.packed for segment in sent)
        checksums = b"".join(segment.checksums for segment in sent)
        self._context.emit(SendBulk(pull.stream, slot_bytes, bytes(codes), slots, checksums))

    def sent(self, stream: int) -> None:
        """Handle the end of a send on the bulk connection `stream`: release its pins."""
        self._reading.pop(stream, None)
        send = self._sends.pop(stream, None)
        if send is None:
            return
        self._context.store.unpin(*send.segments)
        self._sending[send.node] -= len(send.segments)
        if not send.background:
            self._fan_out.done(send.node, send.segments)

    def sweep(self) -> None:
        """Forget recent readers that are too old to redirect others to. Called once per gossip interval."""
        self._fan_out.sweep()

    # -- checks

    def pinned(self) -> Iterator[Segment]:
        for lease in self._leases.values():
            yield from lease.segments
        for send in self._sends.values():
            yield from send.segments
        for pull in self._reads:
            yield from pull.segments

    def census(self) -> dict[str, int]:
        return {
            "leases to peers": len(self._leases),
            "sends": len(self._sends),
            "pulls from disk": len(self._reads),
            "segments with recipients": len(self._fan_out),
        }

    def check_integrity(self) -> None:
        readers = Counter(itertools.chain.from_iterable(set(lease.segments) for lease in self._leases.values()))
        assert self._again == Counter({segment: count - 1 for segment, count in readers.items() if count > 1})
        assert self._leased == _by_pool(list(readers))
        assert self._pins == sum(len(lease.segments) for lease in self._leases.values())
        assert all(lease.timer.callback is not None for lease in self._leases.values()), "a lease that no timer ends"
        counted: Counter[NodeId] = Counter()
        for send in self._sends.values():
            counted[send.node] += len(send.segments)
        assert self._sending == counted
        self._fan_out.check_integrity()


def _by_pool(segments: Sequence[Segment]) -> dict[PoolId, set[Segment]]:
    """Returns the segments grouped by their pool of slots, mostly one."""
    if not segments:
        return {}
    first = segments[0].pool
    if all(segment.pool is first for segment in segments):
        return {first: set(segments)}
    grouped: dict[PoolId, set[Segment]] = {}
    for segment in segments:
        grouped.setdefault(segment.pool, set()).add(segment)
    return grouped
