"""Matching: find, and lease where it is found.

::

    Match -> own index -> all here?  yes -> Matched
                |  no
                v
             other nodes, and this node's own directory (`rounds`)
                |
                v
             Matched: the longest prefix that is leased, here or elsewhere
             (or, when it may wait for whoever computes what comes next: again, `pendings`)

What is leased beyond the prefix is given back at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tokenlake.core.access import access_of, with_access
from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.explain import Explain, Trail
from tokenlake.core.fetch_calls import MISSING
from tokenlake.core.instructions import Answer
from tokenlake.core.match_under_way import MatchUnderWay
from tokenlake.core.packing import pack
from tokenlake.core.peers import Peers
from tokenlake.core.pendings import Pendings, Waiting
from tokenlake.core.replicas import Replicas
from tokenlake.core.replication import Replication
from tokenlake.core.rounds import Rounds
from tokenlake.core.sessions import Lease, Process, Sessions
from tokenlake.hints import AccessRecord
from tokenlake.identity import LeaseId, NodeId, SegmentKey
from tokenlake.metrics import Metric
from tokenlake.store import Segment, State
from tokenlake.wire import Code
from tokenlake.wire import engine as wire
from tokenlake.wire import peer as peer_wire
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["Matches"]

ASKED = Metric("tokenlake_asked_tokens_total", "Tokens of full segments that engines asked for")
LOCAL = Metric("tokenlake_local_tokens_total", "Tokens found in this node's arena")
PENDING = Metric("tokenlake_pending_timeout_tokens_total", "Tokens that somebody was still writing")
MATCHES = Metric("tokenlake_match_requests_total", "Match requests")

# Looked up once: each access to a member of an enum costs Python 3.11 some 100 ns, and there is one per key.
_LOCAL, _REMOTE, _MISSING = Code.LOCAL, Code.REMOTE, Code.MISSING
_GONE = State.GONE


class Matches:
    """Match of the local engines."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        peers: Peers,
        directory_node: DirectoryNode,
        replicas: Replicas,
        replication: Replication,
        explain: Explain,
    ) -> None:
        self._context = context
        self._replication = replication
        self._directory_node = directory_node
        self._pendings = Pendings(context, peers, directory_node)
        self._explain = explain
        self._sessions = sessions
        self._peers = peers
        self._rounds = Rounds(context, peers, directory_node, replicas, replication, self._pendings, self._end)
        self._under_way: dict[MatchUnderWay, None] = {}

    def match(self, process: Process, request: wire.Match) -> None:
        """Answered at once when everything is here, else at the latest at the deadline."""
        keys = split_keys(request.keys)
        session = process.session
        self._context.counters.add(MATCHES)
        self._context.counters.add(ASKED, len(keys) * session.segment_tokens)
        match = MatchUnderWay(process, request, keys, self._context.ready(session.tenant, keys))
        self._under_way[match] = None
        here = [segment for segment in match.segments if segment is not None]
        self._context.store.pin(*here)
        if len(here) < len(keys):
            self._ask(match)
        else:
            self._finish(match)

    def _ask(self, match: MatchUnderWay) -> None:
        """First round: of every key that is not here a copy where it is hot, else both candidates, this node last."""
        if match.request.in_flight_wait_s:
            match.waits = Waiting(
                self._context.now, match.request.in_flight_wait_s, match.request.in_flight_wait_per_segment_s
            )
        match.arrivals = self._context.store.arrivals
        missing = match.missing()
        candidates = self._context.ring.candidates(join_keys([match.keys[index] for index in missing]))
        match.candidates = dict(zip(missing, candidates, strict=True))
        self._rounds.begin(match, missing)

    def _end(self, match: MatchUnderWay) -> None:
        """Everybody answered: that is all, unless there is more to ask about, or it waits for whoever computes what it
        misses."""
        if match.later:
            self._recheck(match)
            if self._rounds.more(match):
                return
        waits = match.waits
        if waits is not None:
            self._recheck(match)
            gap = match.found(len(match.keys))
            waits.lacks(len(match.keys) - gap)
            if self._patient(match, waits, gap):
                match.asking = False
                if match.codes[gap] == Code.PENDING:
                    self._wait(match, waits, gap)
                else:
                    self._claim(match, waits, gap)
                return
        self._finish(match)

    def _patient(self, match: MatchUnderWay, waits: Waiting, gap: int) -> bool:
        alive = self._sessions.process(match.process.connection) is match.process
        return alive and gap < len(match.keys) and self._pendings.patient(waits, match.codes[gap])

    def _wait(self, match: MatchUnderWay, waits: Waiting, gap: int) -> None:
        self._pendings.wait(waits, lambda: self._look(match, waits, gap))

    def _look(self, match: MatchUnderWay, waits: Waiting, gap: int) -> None:
        """Is `gap` still being computed? As long as nothing else has changed only its directory node is asked."""
        self._recheck(match)
        whole = all(node is None or self._peers.usable(node) for node in match.remotes)
        if whole and match.found(len(match.keys)) == gap and self._patient(match, waits, gap):
            self._claim(match, waits, gap)
        else:
            self._again(match)

    def _claim(self, match: MatchUnderWay, waits: Waiting, gap: int) -> None:
        waited = match.codes[gap] == Code.PENDING

        def claimed(code: Code) -> None:
            if code is Code.LOCAL or (code is Code.UNKNOWN and waited):
                # It is there; or its directory node does not say, and its other candidate may know more.
                self._again(match)
                return
            match.codes[gap] = code
            if code is Code.PENDING:
                self._wait(match, waits, gap)
            else:
                self._finish(match)

        key, directory_node = match.keys[gap], match.candidates[gap][0]
        self._pendings.claim(waits, match.process.session.tenant, key, directory_node, claimed)

    def _again(self, match: MatchUnderWay) -> None:
        """Ask anew about all that is not here: what was found elsewhere then is what many read there by now."""
        for node, leases in match.leases.items():
            self._peers.tell(node, peer_wire.ReleaseLease(tuple(leases)))
        match.leases.clear()
        match.remotes = [None] * len(match.keys)
        match.asked.clear()
        match.denied.clear()
        match.hints.clear()
        match.rather.clear()
        self._recheck(match)
        self._rounds.begin(match, match.missing())

    def _finish(self, match: MatchUnderWay) -> None:
        """Lease the longest prefix that was found, give the rest back, answer."""
        del self._under_way[match]
        match.asking = False
        process, session = match.process, match.process.session
        here = self._sessions.process(process.connection) is process
        if match.candidates:
            self._recheck(match)
            self._leave_out_dropped(match)
            self._report_stale(match)
        limit = self._sessions.may_lease(session, match.segments) if here else 0
        hits = match.found(limit) if match.candidates else limit
        if hits == limit < len(match.keys) and match.codes[limit] <= Code.REMOTE:
            match.codes[limit] = Code.SESSION_LIMIT
        self._context.store.unpin(*(segment for segment in match.segments[hits:] if segment is not None))
        access = access_of(match, hits, self._context.store, self._context.now)
        if hits < len(match.keys):
            session.recent.add(match.request.keys, access)
        lease = self._make_lease(match, hits, access)
        self._count(match, hits)
        codes = bytes(match.codes)
        if match.request.request and session.segment_tokens:
            self._leave_trail(match, lease, hits, codes)
        if here:
            reply = wire.Matched(
                match.request.id,
                lease.id if lease else 0,
                hits,
                codes,
                *pack(match.segments[:hits], session.shards, checksums=match.request.checksums),
            )
            self._context.emit(Answer(process.connection, reply))

    def _leave_trail(self, match: MatchUnderWay, lease: Lease | None, hits: int, codes: bytes) -> None:
        session = match.process.session
        trail = Trail(self._context.now, match.request, session.segment_tokens, session.slot_bytes)
        trail.hits = hits
        if match.candidates:
            places = zip(match.segments[:hits], match.remotes, strict=False)
            trail.elsewhere = Counter(node for segment, node in places if segment is None and node is not None)
            trail.silent = dict.fromkeys(match.silent)
        if lease is not None:
            lease.trail = trail
        self._explain.begin(session.tenant, trail, codes, match.keys)

    def _recheck(self, match: MatchUnderWay) -> None:
        """What arrived here while others were asked is found here."""
        if match.arrivals == self._context.store.arrivals:
            return
        match.arrivals = self._context.store.arrivals
        missing = match.missing()
        arrived = self._context.ready(match.process.session.tenant, [match.keys[index] for index in missing])
        for index, segment in zip(missing, arrived, strict=True):
            if segment is not None:
                self._context.store.pin(segment)
                match.segments[index] = segment
                match.codes[index] = _LOCAL

    def _leave_out_dropped(self, match: MatchUnderWay) -> None:
        """Copies that were found to be wrong while others were asked are here no more."""
        for index, segment in enumerate(match.segments):
            if segment is not None and segment.state is _GONE:
                match.segments[index] = None
                match.codes[index] = _MISSING
                self._context.store.unpin(segment)

    def _make_lease(self, match: MatchUnderWay, hits: int, access: AccessRecord) -> Lease | None:
        lease: Lease | None = None
        if hits:
            lease = Lease(LeaseId(self._context.next_id()), match.keys[:hits], match.process.connection)
            lease.segments = match.segments[:hits]
            lease.hints = with_access(match.request.hints, access)
            if match.candidates:
                places = zip(lease.segments, match.remotes, strict=False)
                lease.remotes = [remote if segment is None else None for segment, remote in places]
            self._sessions.add_lease(match.process.session, lease)
        for node, leases in match.leases.items():
            if lease is not None and node in lease.remotes:
                lease.remote_leases += [(node, remote) for remote in leases]
            else:
                self._peers.tell(node, peer_wire.ReleaseLease(tuple(leases)))
        return lease

    def _report_stale(self, match: MatchUnderWay) -> None:
        """A directory node named a node that does not have it: tell the directory node, or the key stays lost."""
        stale: dict[tuple[NodeId, NodeId], list[SegmentKey]] = {}
        for index, (directory_node, named) in match.hints.items():
            if match.codes[index] > _REMOTE and (index, named) in match.denied:
                match.codes[index] = min(match.codes[index], _MISSING)
                stale.setdefault((directory_node, named), []).append(match.keys[index])
        tenant = match.process.session.tenant
        for (directory_node, named), keys in stale.items():
            if directory_node == self._context.node:
                self._directory_node.gone(tenant, keys, named)
            else:
                self._peers.tell(directory_node, peer_wire.Evicted(tenant, join_keys(keys), named))

    def _count(self, match: MatchUnderWay, hits: int) -> None:
        """Every token asked for is counted once: now, or when its fetch ends or is skipped."""
        size = match.process.session.segment_tokens
        local = hits - match.segments[:hits].count(None) if match.candidates else hits
        pending = int(hits < len(match.keys) and match.codes[hits] == Code.PENDING)
        self._context.counters.add(LOCAL, local * size)
        self._context.served(match.process.session.tenant, local * match.process.session.slot_bytes)
        self._replication.read_here(match.segments[:hits])
        self._context.counters.add(PENDING, pending * size)
        self._context.counters.add(MISSING, (len(match.keys) - hits - pending) * size)

    @property
    def matching(self) -> int:
        """Matches under way."""
        return len(self._under_way)

    def pinned(self) -> Iterator[Segment]:
        """A segment per pin of the matches under way; for integrity checks."""
        return (segment for match in self._under_way for segment in match.segments if segment is not None)

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"matches": len(self._under_way)}
