"""Matching: find, and lease where it is found.

::

    Match -> own index -> all here?  yes -> Matched
                |  no
                v
             Lookup to both candidates of every missing key, in parallel (of many nodes, to those of some keys first:
             `probing`);
             where it is hot to one copy, and to its candidates if that one is silent or has it no more
                |
                v
             own directory: what nobody was found to have
                |  a home names another node
                v
             Lookup there (second round, same deadline)
                |
                v
             Matched: the longest prefix that is leased, here or elsewhere
             (or, when it may wait for whoever computes what comes next: again, `pendings`)

A lease exists only where the slot is, so whoever holds the bytes leases them while answering. What is leased
beyond the prefix is given back at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial

from tokenlake.advice import Use
from tokenlake.core.context import Context
from tokenlake.core.explain import Explain, Trail
from tokenlake.core.fetch_calls import MISSING
from tokenlake.core.home import Home
from tokenlake.core.hot import Hot
from tokenlake.core.instructions import Answer
from tokenlake.core.match_under_way import MatchUnderWay
from tokenlake.core.packing import pack
from tokenlake.core.peers import Peers, Reply
from tokenlake.core.pendings import Pendings, Waiting
from tokenlake.core.probing import MANY_NODES, behind, probes
from tokenlake.core.sessions import Lease, Process, Sessions
from tokenlake.core.uses import use_of, with_use
from tokenlake.identity import LeaseId, NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import Segment
from tokenlake.wire import Code
from tokenlake.wire import engine as wire
from tokenlake.wire import peer as peer_wire
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["Matches"]

ASKED = Metric("tokenlake_asked_tokens_total", "Tokens of full segments that engines asked for")
LOCAL = Metric("tokenlake_local_tokens_total", "Tokens found in this node's arena")
PENDING = Metric("tokenlake_pending_timeout_tokens_total", "Tokens that somebody was still writing")
MATCHES = Metric("tokenlake_match_requests_total", "Match requests")

OWN_SHARE = 0.25
"""Of a match's deadline: so long the own directory waits for the first answer of another node, and what was found
for the answer of whoever is to be asked rather."""
_HOME_ANSWERS = (Code.PENDING, Code.MISSING, Code.UNKNOWN)
"""What a lookup says of a key that is neither leased nor elsewhere."""
_NOT_THERE = (Code.PENDING, Code.MISSING, Code.ELSEWHERE)
"""What it says of a key of which there is no copy."""
# Looked up once: each access to a member of an enum costs Python 3.11 some 100 ns, and there is one per key.
_LOCAL, _REMOTE, _MISSING, _UNKNOWN, _ELSEWHERE = Code.LOCAL, Code.REMOTE, Code.MISSING, Code.UNKNOWN, Code.ELSEWHERE


class Matches:
    """Match of the local engines."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        peers: Peers,
        home: Home,
        hot: Hot,
        explain: Explain,
    ) -> None:
        self._context = context
        self._hot = hot
        self._pendings = Pendings(context, peers, home)
        self._explain = explain
        self._sessions = sessions
        self._peers = peers
        self._home = home
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

    def _limit_s(self, match: MatchUnderWay) -> float:
        """How long a round may take."""
        limit = self._context.config.match_deadline_s
        return min(limit, match.request.deadline_s) if match.request.deadline_s > 0 else limit

    def _ask(self, match: MatchUnderWay) -> None:
        """First round: of every key that is not here a copy where it is hot, else both candidates, this node last."""
        if match.request.pending_s:
            match.waits = Waiting(self._context.now, match.request.pending_s, match.request.pending_segment_s)
        match.arrivals = self._context.store.arrivals
        missing = match.missing()
        candidates = self._context.ring.candidates(join_keys([match.keys[index] for index in missing]))
        match.candidates = dict(zip(missing, candidates, strict=True))
        self._ask_about(match, self._first(match, missing))

    def _first(self, match: MatchUnderWay, indices: list[int]) -> list[int]:
        """Which of these to ask about first."""
        return probes(match, indices) if len(self._context.ring.members) >= MANY_NODES else indices

    def _ask_about(self, match: MatchUnderWay, indices: list[int]) -> None:
        session, planned = match.process.session, match.request.planned
        match.hot = self._hot.choose(session.tenant, match.keys, indices, session.slot_bytes, planned=planned)
        self._round(match, indices)

    def _round(self, match: MatchUnderWay, indices: list[int]) -> None:
        limit = self._limit_s(match)
        match.deadline = self._context.now + limit
        wanted: defaultdict[NodeId, list[int]] = defaultdict(list)
        for index in indices:
            home, other = match.candidates[index]
            match.codes[index] = _UNKNOWN
            if index in match.hot:
                wanted[match.hot[index]].append(index)
                continue
            wanted[home].append(index)
            if other != home:
                wanted[other].append(index)
        match.own = wanted.pop(self._context.node, [])
        match.round = wanted
        if wanted:
            # Mostly those who are asked have everything, and there is nothing left to look up here.
            self._context.after(limit * OWN_SHARE, lambda: self._ask_own(match, wanted))
            self._send(match, wanted)
        else:
            self._ask_own(match, wanted)

    def _ask_own(self, match: MatchUnderWay, asked: dict[NodeId, list[int]]) -> None:
        """Look up in this node's own directory what nobody was found to have yet, unless that was done. Of copies that
        were `asked` first and are still silent the candidates are asked, and nobody waits for what else they say."""
        if match not in self._under_way or match.parked or match.round is not asked:
            return
        wanted: dict[NodeId, list[int]] = {}
        for node in dict.fromkeys(match.hot.values()):
            if all(index in match.hot for index in asked[node]):
                match.given_up.append(asked[node])
                match.waiting -= 1
            silent = [index for index, each in match.hot.items() if each == node]
            self._ask_candidates(match, node, silent, wanted, [])
        self._add_own(match, wanted)
        self._send(match, wanted)

    def _ask_candidates(
        self,
        match: MatchUnderWay,
        node: NodeId,
        indices: list[int],
        wanted: dict[NodeId, list[int]],
        denied: list[int],
    ) -> None:
        """A copy at `node` was of no use for these hot ones. `denied`: those of which it said that it has none."""
        for index in indices:
            del match.hot[index]
            for candidate in dict.fromkeys(match.candidates[index]):
                if candidate == self._context.node:
                    match.own.append(index)
                elif candidate != node:
                    wanted.setdefault(candidate, []).append(index)
        absent = [match.keys[index] for index in denied]
        self._hot.missed(match.process.session.tenant, len(indices), absent, node)

    def _add_own(self, match: MatchUnderWay, wanted: dict[NodeId, list[int]]) -> None:
        own, match.own = match.own, []
        self._ask_here(match, [index for index in own if match.remotes[index] is None], wanted)

    def _ask_here(self, match: MatchUnderWay, indices: list[int], wanted: dict[NodeId, list[int]]) -> None:
        """This node's own directory answers on the spot; whom it names is added to those to be asked."""
        if not indices:
            return
        node, codes = self._context.node, match.codes
        answers = self._home.ask(match.process.session.tenant, [match.keys[index] for index in indices])
        for index, (code, elsewhere) in zip(indices, answers, strict=True):
            candidates = match.candidates[index]
            if candidates[0] == node:
                if code < codes[index]:
                    codes[index] = code
            elif elsewhere is None or candidates[1] != node:
                match.denied.add((index, node))
                continue
            if elsewhere is not None:
                match.hints[index] = (node, elsewhere)
                if elsewhere not in candidates:
                    self._aim(match, index, elsewhere, wanted)

    def _aim(self, match: MatchUnderWay, index: int, node: NodeId, wanted: dict[NodeId, list[int]]) -> None:
        """Ask the `node` that a home named, unless it was asked."""
        if node in match.candidates[index] or (index, node) in match.asked:
            return
        match.asked.add((index, node))
        if node == self._context.node:
            self._ask_here(match, [index], wanted)
        else:
            wanted.setdefault(node, []).append(index)

    def _send(self, match: MatchUnderWay, wanted: dict[NodeId, list[int]]) -> None:
        tenant = match.process.session.tenant
        patient = match.waits is not None and self._pendings.may_come_again(match.waits)
        match.waiting += len(wanted)
        for node, indices in wanted.items():
            packed = join_keys([match.keys[index] for index in indices])
            limit = match.deadline - self._context.now
            if match.rather and all(match.rather.get(index) == node for index in indices):
                # All of it is leased elsewhere: it is not worth waiting for.
                limit = min(limit, OWN_SHARE * self._limit_s(match))
            self._peers.call(
                node,
                partial(_lookup, tenant=tenant, keys=packed, request=match.request.request, patient=patient),
                limit,
                partial(self._heard, match, node, indices),
            )
        if not wanted and not match.waiting:
            self._end(match)

    def _heard(self, match: MatchUnderWay, node: NodeId, indices: list[int], reply: Reply | None) -> None:
        """One node answered, or will not. Then the second round, or the end."""
        if match not in self._under_way or match.parked:
            # It was given up.
            if isinstance(reply, peer_wire.LookupReply) and reply.lease:
                self._peers.tell(node, peer_wire.ReleaseLease((reply.lease,)))
            return
        if not any(given_up is indices for given_up in match.given_up):
            match.waiting -= 1
        second: dict[NodeId, list[int]] = {}
        denied: list[int] = []
        if reply is None:
            match.silent.append(node)
        if isinstance(reply, peer_wire.LookupReply) and len(reply.codes) == len(indices) >= reply.known:
            if reply.known:
                match.pasts.append((indices[reply.known - 1], reply.past, reply.past_age_s))
            if reply.lease:
                match.leases.setdefault(node, []).append(reply.lease)
            missed = [i for i, code in zip(indices, reply.codes, strict=True) if i in match.hot and code != _LOCAL]
            # UNKNOWN does not say that it is not there: perhaps no more of it may be leased now.
            denied = [i for i, code in zip(indices, reply.codes, strict=True) if i in match.hot and code in _NOT_THERE]
            self._take(match, node, indices, reply, second)
            for index in [index for index in indices if index in match.hot and index not in missed]:
                del match.hot[index]
        else:
            missed = [index for index in indices if index in match.hot]
        if missed:
            self._ask_candidates(match, node, missed, second, denied)
        if match.own:
            self._add_own(match, second)
        if second and self._context.now < match.deadline:
            self._send(match, second)
        elif not match.waiting:
            self._end(match)

    def _take(
        self,
        match: MatchUnderWay,
        node: NodeId,
        indices: list[int],
        reply: peer_wire.LookupReply,
        second: dict[NodeId, list[int]],
    ) -> None:
        named = iter(reply.nodes)
        codes, remotes = match.codes, match.remotes
        for index, code in zip(indices, reply.codes, strict=True):
            if code == _LOCAL:
                if remotes[index] is None or match.rather.get(index) == node:
                    remotes[index] = node
                    codes[index] = _REMOTE
            elif code == _ELSEWHERE:
                elsewhere = NodeId(next(named, ""))
                match.hints[index] = (node, elsewhere)
                if remotes[index] is None and elsewhere:
                    self._aim(match, index, elsewhere, second)
            elif code == _MISSING and match.candidates[index][0] != node:
                match.denied.add((index, node))
            elif code in _HOME_ANSWERS and code < codes[index]:
                codes[index] = code
        rather = NodeId(reply.rather)
        # A candidate was asked, and has answered or will.
        for index in indices if self._peers.usable(rather) else ():
            if remotes[index] == node and rather not in match.candidates[index] and (index, rather) not in match.asked:
                match.asked.add((index, rather))
                match.rather[index] = rather
                second.setdefault(rather, []).append(index)

    def _end(self, match: MatchUnderWay) -> None:
        """Everybody answered: that is all, unless there is more to ask about, or it waits for whoever computes what it
        misses."""
        if match.later:
            self._recheck(match)
            if wanted := behind(match):
                self._ask_about(match, wanted)
                return
        waits = match.waits
        if waits is not None:
            self._recheck(match)
            gap = match.found(len(match.keys))
            waits.lacks(len(match.keys) - gap)
            if self._patient(match, waits, gap):
                match.parked = True
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
        """Is `gap` still being computed? As long as nothing else has changed only its home is asked."""
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
                # It is there; or its home does not say, and its other candidate may know more.
                self._again(match)
                return
            match.codes[gap] = code
            if code is Code.PENDING:
                self._wait(match, waits, gap)
            else:
                self._finish(match)

        key, home = match.keys[gap], match.candidates[gap][0]
        self._pendings.claim(waits, match.process.session.tenant, key, home, claimed)

    def _again(self, match: MatchUnderWay) -> None:
        """Ask anew about all that is not here: what was found elsewhere then is what many read there by now."""
        match.parked = False
        for node, leases in match.leases.items():
            self._peers.tell(node, peer_wire.ReleaseLease(tuple(leases)))
        match.leases.clear()
        match.remotes = [None] * len(match.keys)
        match.asked.clear()
        match.denied.clear()
        match.hints.clear()
        match.rather.clear()
        self._recheck(match)
        self._round(match, self._first(match, match.missing()))

    def _finish(self, match: MatchUnderWay) -> None:
        """Lease the longest prefix that was found, give the rest back, answer."""
        del self._under_way[match]
        process, session = match.process, match.process.session
        here = self._sessions.process(process.connection) is process
        if match.candidates:
            self._recheck(match)
            self._report_stale(match)
        limit = self._sessions.may_lease(session, match.segments) if here else 0
        hits = match.found(limit) if match.candidates else limit
        if hits == limit < len(match.keys) and match.codes[limit] <= Code.REMOTE:
            match.codes[limit] = Code.SESSION_LIMIT
        self._context.store.unpin(*(segment for segment in match.segments[hits:] if segment is not None))
        use = use_of(match, hits, self._context.store, self._context.load_now)
        if hits < len(match.keys):
            session.recent.add(match.request.keys, use)
        lease = self._make_lease(match, hits, use)
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

    def _make_lease(self, match: MatchUnderWay, hits: int, use: Use) -> Lease | None:
        lease: Lease | None = None
        if hits:
            lease = Lease(LeaseId(self._context.next_id()), match.keys[:hits], match.process.connection)
            lease.segments = match.segments[:hits]
            lease.advice = with_use(match.request.advice, use)
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
        """A home named a node that does not have it: tell the home, or the key stays lost."""
        stale: dict[tuple[NodeId, NodeId], list[SegmentKey]] = {}
        for index, (home, named) in match.hints.items():
            if match.codes[index] > _REMOTE and (index, named) in match.denied:
                match.codes[index] = min(match.codes[index], _MISSING)
                stale.setdefault((home, named), []).append(match.keys[index])
        tenant = match.process.session.tenant
        for (home, named), keys in stale.items():
            if home == self._context.node:
                for key in keys:
                    self._context.directory.gone(tenant, key, named)
            else:
                self._peers.tell(home, peer_wire.Evicted(tenant, join_keys(keys), named))

    def _count(self, match: MatchUnderWay, hits: int) -> None:
        """Every token asked for is counted once: now, or when its fetch ends or is skipped."""
        size = match.process.session.segment_tokens
        local = hits - match.segments[:hits].count(None) if match.candidates else hits
        pending = int(hits < len(match.keys) and match.codes[hits] == Code.PENDING)
        self._context.counters.add(LOCAL, local * size)
        self._context.served(match.process.session.tenant, local * match.process.session.slot_bytes)
        self._hot.read(match.segments[:hits])
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


def _lookup(call: int, *, tenant: TenantId, keys: bytes, request: str, patient: bool) -> peer_wire.Lookup:
    return peer_wire.Lookup(call, tenant, keys, request, patient=patient)
