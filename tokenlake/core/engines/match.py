"""Match: find the longest prefix of a prompt that the pool has, or all independent keys that it has, and lease them.

::

    Match -> copies of this node: the whole prompt ------------------------------------------> Matched
                |  some keys are missing
                v
             `Search`: lookups at directory nodes and owners, waits for segments in flight
                |
                v
             Matched: the prefix without a gap is leased, here or at other nodes; the rest is released

A lease exists only where the slot is: the node that has the bytes grants it in its answer to the lookup. The lease of
independent keys is of all segments that were found.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cold_reads import ColdReads
from tokenlake.core.context import Context, Part
from tokenlake.core.engines.access import access_of_match, with_access
from tokenlake.core.engines.found import Found
from tokenlake.core.engines.grants import Grants, Lease, pack
from tokenlake.core.engines.search import Parts, Search
from tokenlake.core.engines.sessions import Process
from tokenlake.core.engines.waiting import WaitingMatches
from tokenlake.core.instructions import Answer
from tokenlake.core.report.account import Account
from tokenlake.core.report.explain import Explain, Trail
from tokenlake.core.report.misses import NO_NODES, Beyond, UnheardNodes, only_other_layouts, unheard_nodes
from tokenlake.hints import AccessRecord
from tokenlake.identity import LeaseId, NodeId, SegmentKey
from tokenlake.memory import Segment
from tokenlake.metrics import Metric
from tokenlake.wire import Code, engine
from tokenlake.wire import peer as wire
from tokenlake.wire.engine import MAX_KEYS
from tokenlake.wire.funnel import MissReason
from tokenlake.wire.slots import split_keys

MATCHES = Metric("tokenlake_match_requests_total", "Match requests")
MATCH_SECONDS = Metric(
    "tokenlake_match_seconds",
    "Time from a match request to its answer, of matches that did not wait for a segment in flight",
    kind="histogram",
)
WAIT_SECONDS = Metric(
    "tokenlake_in_flight_wait_seconds",
    "Time from a match request to its answer, of matches that waited for a segment in flight",
    kind="histogram",
)

_NO_KEYS: list[SegmentKey] = []


class MatchResult(NamedTuple):
    """The outcome of one match of an engine. A hit is a segment that the match leases."""

    codes: bytes
    """One `Code` per key of the prompt: LOCAL or REMOTE for each hit, otherwise the reason why the segment is not
    leased."""
    segments: tuple[Segment | None, ...]
    """The pinned segment of this node for each hit; None for a hit that is leased at another node, or on disk here."""
    access: AccessRecord
    owners: tuple[NodeId | None, ...] = ()
    """The other node where each hit is leased, this one for a hit on its disk, None for a hit in its memory. Empty if
    all hits are in its memory."""
    leases: tuple[tuple[NodeId, int], ...] = ()
    """(node, lease id) of the leases that other nodes granted for the hits."""
    silent: tuple[NodeId, ...] = ()
    """Nodes that did not answer a lookup of the match since its last wait, or have segments of it and deliver none."""
    places: list[int] | None = None
    """Index of the key of each hit, ascending; None for a prefix."""

    @property
    def hits(self) -> int:
        """Number of segments that the match leases."""
        return len(self.segments)

    def missed(self, keys: list[SegmentKey]) -> tuple[bytes, list[SegmentKey]]:
        """Returns the codes of those of the match's `keys` that it does not lease, and these keys."""
        if self.places is None:
            return self.codes[self.hits :], keys[self.hits :]
        missed = self.places_missed(len(keys))
        return bytes(self.codes[index] for index in missed), [keys[index] for index in missed]

    def places_missed(self, keys: int) -> Sequence[int]:
        """Returns the index of each of the `keys` independent keys that the match does not lease, ascending."""
        return array("H", sorted(set(range(keys)).difference(self.places or ())))


@dataclass(eq=False, slots=True)
class _Match:
    """One match under way: the request of an engine's process, and what was found so far."""

    process: Process
    request: engine.Match
    keys: list[SegmentKey]
    found: Found
    began: float
    """Time in seconds of the request."""
    search: Search | None = None
    """None when this node has every segment of the prompt."""


class Matches(Part):
    """Finds and leases the longest prefix of a prompt that the pool has, for the engines of this node."""

    def __init__(
        self,
        context: Context,
        grants: Grants,
        peers: Peers,
        directory_node: DirectoryNode,
        waiting: WaitingMatches,
        explain: Explain,
        cold: ColdReads,
    ) -> None:
        self._context = context
        self._grants = grants
        self._peers = peers
        self._explain = explain
        self._parts = Parts(context, peers, directory_node, waiting, cold)
        self._under_way: dict[_Match, None] = {}
        self._match_seconds = context.counters.histogram(MATCH_SECONDS)
        self._wait_seconds = context.counters.histogram(WAIT_SECONDS)

    def match(self, process: Process, request: engine.Match) -> None:
        """Answer an engine's `Match`: at once when this node has every segment of the prompt, otherwise at the latest
        at the deadline of the lookups or after the wait for a segment in flight."""
        keys = split_keys(request.keys)
        self._context.counters.add(MATCHES)
        segments = self._context.ready(process.session.tenant, keys)
        here = [segment for segment in segments if segment is not None]
        tier, size = self._context.disk, process.session.slot_bytes
        entries = self._context.on_disk(process.session.tenant, keys, segments)
        disk = [index for index, entry in entries.items() if tier.slab(entry).slot_bytes == size]
        match = _Match(process, request, keys, Found(segments, self._context.node, disk), self._context.now)
        self._under_way[match] = None
        self._context.store.pin(*here)
        if disk:
            access, age_s = tier.last_access(entries[disk[-1]], self._context.now)
            match.found.accesses.append((disk[-1], access, age_s))
        if len(here) + len(disk) < len(keys):
            done = partial(self._finish, match)
            match.search = Search(self._parts, process, request, keys, match.found, done)
            match.search.begin()
        else:
            self._finish(match)

    # -- the result

    def _finish(self, match: _Match) -> None:
        """End a match: lease the longest prefix, or all independent keys, that were found; release all other segments
        and leases, and answer the engine."""
        del self._under_way[match]
        result = self._conclude(match)
        process, session, hits = match.process, match.process.session, result.hits
        if hits < len(match.keys):
            session.recent.add(match.request.keys, result.access, independent=match.request.independent)
        account, unheard, missed = self._account(match, result)
        lease: Lease | None = None
        if hits or (match.keys and process.alive and self._grants.may_add_lease(session)):
            number, hints = LeaseId(self._context.next_id()), with_access(match.request.hints, result.access)
            keys = match.keys[:hits] if result.places is None else [match.keys[index] for index in result.places]
            places = result.segments, result.owners, result.leases
            lease = Lease(number, keys, process.connection, hints, account, *places)
            lease.disk_s = match.found.disk_s
            self._grants.add_lease(session, lease)
        else:
            account.close(self._context.counters)
        waited = match.search is not None and match.search.waited
        (self._wait_seconds if waited else self._match_seconds).add(self._context.now - match.began)
        if match.request.request or result.owners:
            self._leave_trail(match, result, lease, account, unheard, missed)
        if process.alive:
            packed = pack(result.segments, session.shards, checksums=match.request.checksums)
            lease_id = lease.id if lease is not None else 0
            matched = engine.Matched(match.request.id, lease_id, hits, result.codes, *packed)
            self._context.emit(Answer(process.connection, matched))

    def _conclude(self, match: _Match) -> MatchResult:
        """Decide which segments the match leases (the hits), unpin the others, and release the leases at other nodes
        that no hit needs. Returns the result."""
        found, search, session = match.found, match.search, match.process.session
        independent = match.request.independent
        if search is not None:
            search.conclude()
        places = found.places() if independent else None
        candidates = found.segments if places is None else [found.segments[index] for index in places]
        limit = self._grants.may_lease(session, candidates, len(session.processes)) if match.process.alive else 0
        if places is None:
            hits = found.prefix(limit) if search is not None else limit
            self._hold(match, range(hits))
            if hits == limit < len(match.keys) and found.codes[limit] <= Code.REMOTE:
                found.codes[limit] = Code.SESSION_LIMIT
        else:
            hits = limit
            for index in places[limit:]:
                found.codes[index] = Code.SESSION_LIMIT
            places = places[:limit]
            self._hold(match, places)
        segments = tuple(candidates[:hits])
        if hits < len(candidates):
            self._context.store.unpin(*(segment for segment in candidates[hits:] if segment is not None))
        access = access_of_match(self._context, session.tenant, match.keys, found.segments, hits, found.accesses)
        if search is None and not found.disk:
            return MatchResult(bytes(found.codes), segments, access, places=places)
        of_hits = found.owners if places is None else [found.owners[index] for index in places]
        pairs = zip(segments, of_hits, strict=False)
        owners = tuple(owner if segment is None else None for segment, owner in pairs)
        leases: list[tuple[NodeId, int]] = []
        for node, granted in found.leases.items():
            if node in owners:
                leases += ((node, lease) for lease in granted)
            else:
                self._peers.tell(node, wire.ReleaseLease(tuple(granted)))
        return MatchResult(bytes(found.codes), segments, access, owners, tuple(leases), tuple(found.silent), places)

    def _hold(self, match: _Match, hits: Sequence[int]) -> None:
        """Keep those hits that are on disk there until the engine has had time to fetch them."""
        if match.found.disk:
            chosen, until = frozenset(hits), self._context.now + self._context.config.peer_lease_s
            for index in match.found.disk:
                if index in chosen:
                    entry = self._context.disk.find(match.process.session.tenant, match.keys[index])
                    self._context.disk.hold(entry, until)

    def _account(self, match: _Match, result: MatchResult) -> tuple[Account, UnheardNodes, list[SegmentKey]]:
        """Returns the account of the tokens that the engine asked for, the nodes because of which the match does not
        know where segments are, and the keys of the segments that are no hits."""
        session, request, hits, keys = match.process.session, match.request, result.hits, len(match.keys)
        size, tenant = session.segment_tokens, session.tenant
        counted = min(keys, request.counted) if size else 0
        tokens = request.tokens if request.counted < MAX_KEYS or not request.independent else 0
        tail = tokens - counted * size if counted and tokens else 0
        beyond, missed, unheard = Beyond(), _NO_KEYS, NO_NODES
        places = range(hits) if result.places is None else result.places
        if hits < keys:
            codes, missed = result.missed(match.keys)
            unheard = unheard_nodes(self._peers, result.silent, codes)
            known = result.access.known - hits
            other_layout = known < len(codes) and only_other_layouts(self._context.store, tenant, session.slot_bytes)
            at = range(hits, keys) if result.places is None else result.places_missed(keys)
            beyond = Beyond(codes, at, known, unheard.reason, other_layout, match.found.slow)
            if not match.process.alive:
                beyond = Beyond(bytes([Code.UNKNOWN]) * len(codes), at, 0, MissReason.UNREPORTED)
        elif result.silent:
            unheard = unheard_nodes(self._peers, result.silent, b"")
        tail = tail if tail > -size else 0
        account = Account(tenant, size, session.slot_bytes, counted, tail, places, beyond, request.independent)
        return account, unheard, missed

    def _leave_trail(
        self,
        match: _Match,
        result: MatchResult,
        lease: Lease | None,
        account: Account,
        unheard: UnheardNodes,
        missed: list[SegmentKey],
    ) -> None:
        """Leave a record of the match for `explain`, and for the reasons of misses where hits are at other nodes."""
        session = match.process.session
        trail = Trail(self._context.now, match.request, account)
        trail.match_s = self._context.now - match.began
        trail.hits = result.hits
        trail.elsewhere = Counter(owner for owner in result.owners if owner is not None)
        for node in trail.elsewhere:
            if node == self._context.node:
                names = ("the cold tier",) if match.found.cold else ()
                trail.disks[node] = " and ".join([*([f"the disk of {node}"] if match.found.disk else ()), *names])
            elif node in match.found.disk_s:
                trail.disks[node] = f"{node}, in part from its disk,"
        if match.found.slow:
            trail.slow = frozenset(match.keys[index] for index in match.found.slow)
        trail.silent, trail.unconnected = dict(unheard.silent), unheard.unconnected
        if lease is not None:
            lease.trail = trail
        if match.request.request:
            self._explain.begin(session.tenant, trail, missed)

    @property
    def matching(self) -> int:
        """Number of matches that are not answered yet."""
        return len(self._under_way)

    def pinned(self) -> Iterator[Segment]:
        return (segment for match in self._under_way for segment in match.found.segments if segment is not None)

    def census(self) -> dict[str, int]:
        return {"matches": len(self._under_way)}
