"""Match: find the longest prefix of a prompt that the pool has, and lease it.

::

    Match -> copies of this node: the whole prompt ----------------------------------------> Matched
                |  some keys are missing
                v
             round: Lookup of each missing key at both candidates, in parallel
                    (of a hot segment at one copy; with many nodes of some keys first, see `_probes`)
                |  then this node's own directory, for the keys of which it is a candidate
                |  then the owners that directory nodes named, and the nodes that owners redirected to
                v
             the first missing segment is in flight, or deferred, and the match may wait?
                |  no                              yes: wait (`waiting`), then another round
                v
             Matched: the prefix without a gap is leased, here or at other nodes; the rest is released

A lease exists only where the slot is: the node that has the bytes grants it in its answer to the lookup. All rounds
until a wait have one deadline, which is also that of the engine.

With many nodes the segments of a prompt share few candidates, and most lookups of an unknown prompt would ask for
segments behind the first missing one, which are of no use. So a first round asks for the missing keys at places 0, 1,
3, 7, 15, ..., which bounds the prefix to within twice its length, and a second one for the keys before the gap::

    missing keys     0 1 2 3 4 5 6 7 8 9 ...
    first round      0 1   3       7         15
    no node has 7              ->   second round: 2 4 5 6
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tokenlake.core.access import KnownAccess, access_of_match, with_access
from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.explain import Explain, Trail
from tokenlake.core.fetch import MISSING
from tokenlake.core.grants import Grants, Lease, pack
from tokenlake.core.instructions import Answer
from tokenlake.core.peers import Peers, Reply
from tokenlake.core.replicas import Replicas
from tokenlake.core.replication import Replication
from tokenlake.core.sessions import Process
from tokenlake.core.waiting import Wait, WaitingMatches
from tokenlake.hints import AccessRecord
from tokenlake.identity import LeaseId, NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import Segment, State
from tokenlake.wire import Code, engine
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["ASKED", "LOCAL", "MANY_NODES", "PENDING", "MatchResult", "Matches"]

ASKED = Metric("tokenlake_asked_tokens_total", "Tokens of full segments that engines asked for")
LOCAL = Metric("tokenlake_local_tokens_total", "Tokens found in this node's arena")
PENDING = Metric(
    "tokenlake_pending_timeout_tokens_total",
    "Tokens of the first missing segment of matches that ended while the segment was being computed, or sent to others",
)
MATCHES = Metric("tokenlake_match_requests_total", "Match requests")

MANY_NODES = 32
"""Cluster size from which a first round probes. In smaller clusters one round costs hardly more messages."""
PART_OF_DEADLINE = 0.25
"""Part of a match's deadline after which the own directory is asked though no other node has answered, and for which
the answer to a redirect is awaited."""
# Bound once: in Python 3.11 each access to a member of an enum costs some 100 ns, and these are compared for each key.
_LOCAL, _REMOTE, _MISSING, _UNKNOWN, _ELSEWHERE = Code.LOCAL, Code.REMOTE, Code.MISSING, Code.UNKNOWN, Code.ELSEWHERE
_NOT_LEASED = (Code.DEFERRED, Code.PENDING, Code.MISSING, Code.UNKNOWN)
"""Answers to a lookup for a key that is neither leased nor known to be elsewhere."""
_NO_COPY = (Code.PENDING, Code.MISSING, Code.ELSEWHERE)
"""Answers to a lookup from a node without a copy."""
_GONE = State.GONE


class MatchResult(NamedTuple):
    """The outcome of one match."""

    codes: bytes
    """One per key: the place of each hit, the reason for each other key."""
    segments: tuple[Segment | None, ...]
    """Per hit, from the first key on without a gap: the pinned segment of this node, None where it is elsewhere."""
    access: AccessRecord
    owners: tuple[NodeId | None, ...] = ()
    """Per hit, the node where it is leased, None where it is here; empty: all hits are here."""
    leases: tuple[tuple[NodeId, int], ...] = ()
    """The leases at those nodes."""
    silent: tuple[NodeId, ...] = ()
    """Nodes that did not answer a lookup."""

    @property
    def hits(self) -> int:
        """Length of the leased prefix."""
        return len(self.segments)


class _Found:
    """What one match has found, by index of the key."""

    __slots__ = ("absent", "accesses", "codes", "leases", "named", "owners", "segments", "silent")

    def __init__(self, segments: list[Segment | None]) -> None:
        """`segments`: the copies of this node, each pinned for the match."""
        self.segments = segments
        self.codes = bytearray([_LOCAL]) * len(segments)
        """The most definite answer so far, in order of `Code`."""
        self.accesses: list[KnownAccess] = []
        """From each answer the deepest segment with a known access."""
        self.silent: list[NodeId] = []
        """Nodes that did not answer a lookup."""
        self.forget_remote()

    def forget_remote(self) -> None:
        """Start over with the copies of this node."""
        self.owners: list[NodeId | None] = [None] * len(self.segments)
        """The other node where the segment is leased."""
        self.leases: dict[NodeId, list[int]] = {}
        """All leases that other nodes granted."""
        self.named: dict[int, tuple[NodeId, NodeId]] = {}
        """(directory node, the owner that it named)"""
        self.absent: set[tuple[int, NodeId]] = set()
        """(index, node without a copy); only tested for membership."""

    def missing(self) -> list[int]:
        """Indices of the keys without a copy at this node, ascending."""
        return [index for index, segment in enumerate(self.segments) if segment is None]

    def prefix(self, limit: int) -> int:
        """How many of the first `limit` keys are here or leased elsewhere, up to the first gap."""
        places = zip(self.segments[:limit], self.owners, strict=False)
        gaps = (index for index, (segment, owner) in enumerate(places) if segment is None and owner is None)
        return next(gaps, limit)


@dataclass(eq=False, slots=True)
class _Match:
    """One match under way: the request, and what was found."""

    process: Process
    request: engine.Match
    keys: list[SegmentKey]
    found: _Found
    search: _Search | None = None
    """None when this node has every segment."""


@dataclass(eq=False, slots=True)
class _Call:
    """One lookup at one node."""

    node: NodeId
    indices: list[int]
    awaited: bool = True
    """The round does not end before the answer. False: the answer is used only if it comes in time."""


@dataclass(eq=False, slots=True)
class _Search:
    """What one match asks other nodes, and its own directory, for the keys that this node lacks."""

    match: _Match
    keys: list[SegmentKey]
    found: _Found
    candidates: dict[int, tuple[NodeId, NodeId]]
    limit_s: float
    """How long all rounds until a wait may take."""
    wait: Wait | None
    """None when the match may not wait."""
    arrivals: int
    """The store's count of arrivals when the missing keys were last looked up in it."""
    deadline: float = 0.0
    open: bool = False
    """A round is under way. Otherwise answers are not used, and their leases are released."""
    awaited: int = 0
    """Calls whose answers the round awaits."""
    first_calls: dict[NodeId, _Call] = field(default_factory=dict)
    """The calls with which the newest round began."""
    probes: list[int] = field(default_factory=list)
    behind_probes: list[int] = field(default_factory=list)
    """Keys that are not asked for before the probes are answered."""
    own: list[int] = field(default_factory=list)
    """Keys of which this node is a candidate, until its own directory is asked."""
    copies: dict[int, NodeId] = field(default_factory=dict)
    """The copy of a hot segment that is asked instead of the candidates, until it answers."""
    asked: set[tuple[int, NodeId]] = field(default_factory=set)
    """(index, node asked beside the candidates); only tested for membership."""
    redirects: dict[int, NodeId] = field(default_factory=dict)
    """The node to which an owner that has leased the segment redirects its readers."""

    @property
    def tenant(self) -> TenantId:
        return self.match.process.session.tenant

    def keys_of(self, indices: list[int]) -> list[SegmentKey]:
        return [self.keys[index] for index in indices]


class Matches:
    """The matches of the local engines."""

    def __init__(
        self,
        context: Context,
        grants: Grants,
        peers: Peers,
        directory_node: DirectoryNode,
        replicas: Replicas,
        replication: Replication,
        waiting: WaitingMatches,
        explain: Explain,
    ) -> None:
        self._context = context
        self._grants = grants
        self._peers = peers
        self._directory_node = directory_node
        self._replicas = replicas
        self._replication = replication
        self._waiting = waiting
        self._explain = explain
        self._under_way: dict[_Match, None] = {}

    def match(self, process: Process, request: engine.Match) -> None:
        """Answered at once when every segment is here; otherwise at the latest at the deadline, or after the wait."""
        keys = split_keys(request.keys)
        session = process.session
        self._context.counters.add(MATCHES)
        self._context.counters.add(ASKED, len(keys) * session.segment_tokens)
        segments = self._context.ready(session.tenant, keys)
        match = _Match(process, request, keys, _Found(segments))
        self._under_way[match] = None
        here = [segment for segment in segments if segment is not None]
        self._context.store.pin(*here)
        if len(here) < len(keys):
            self._search(match)
        else:
            self._finish(match)

    def _search(self, match: _Match) -> None:
        request, found, now = match.request, match.found, self._context.now
        missing = found.missing()
        pairs = self._context.ring.candidates(join_keys([match.keys[index] for index in missing]))
        candidates = dict(zip(missing, pairs, strict=True))
        limit_s = self._context.config.match_deadline_s
        if request.deadline_s > 0:
            limit_s = min(limit_s, request.deadline_s)
        wait_s = request.in_flight_wait_s
        wait = Wait(now, wait_s, request.in_flight_wait_per_segment_s) if wait_s else None
        search = _Search(match, match.keys, found, candidates, limit_s, wait, self._context.store.arrivals)
        match.search = search
        self._begin(search, missing)

    # -- rounds

    def _begin(self, search: _Search, indices: list[int]) -> None:
        """Ask for these keys, or for the probes among them."""
        search.deadline = self._context.now + search.limit_s
        if len(self._context.ring.members) >= MANY_NODES:
            places = {(1 << power) - 1 for power in range(len(indices).bit_length())}
            search.probes = [index for place, index in enumerate(indices) if place in places]
            search.behind_probes = [index for place, index in enumerate(indices) if place not in places]
            indices = search.probes
        self._round(search, indices)

    def _ask_behind_probes(self, search: _Search) -> bool:
        """Begin the round for the keys between the probes, up to the first gap; False when there is none to ask for,
        or no time left."""
        found = search.found
        behind = [index for index in search.behind_probes if found.segments[index] is None]
        search.behind_probes = []
        gaps = (index for index in search.probes if found.segments[index] is None and found.owners[index] is None)
        gap = next(gaps, len(search.keys))
        wanted = [index for index in behind if index < gap]
        for index in behind[len(wanted) :]:
            # Not asked for: a segment behind a gap is of no use.
            found.codes[index] = _MISSING
        if wanted and self._context.now < search.deadline:
            self._round(search, wanted)
            return True
        for index in wanted:
            found.codes[index] = _UNKNOWN
        return False

    def _round(self, search: _Search, indices: list[int]) -> None:
        """Ask both candidates of each key; where the segment is hot, one copy."""
        session, request = search.match.process.session, search.match.request
        copies = self._replicas.choose(search.tenant, search.keys, indices, session.slot_bytes, planned=request.planned)
        search.copies = copies
        by_node: defaultdict[NodeId, list[int]] = defaultdict(list)
        for index in indices:
            directory_node, other = search.candidates[index]
            search.found.codes[index] = _UNKNOWN
            if index in copies:
                by_node[copies[index]].append(index)
                continue
            by_node[directory_node].append(index)
            if other != directory_node:
                by_node[other].append(index)
        search.own = by_node.pop(self._context.node, [])
        search.open = True
        calls = search.first_calls = {node: _Call(node, its_indices) for node, its_indices in by_node.items()}
        if calls:
            # The other nodes usually have everything, and the own directory need not be asked.
            self._context.after(PART_OF_DEADLINE * search.limit_s, lambda: self._hurry(search, calls))
            self._send(search, calls)
        else:
            self._hurry(search, calls)

    def _hurry(self, search: _Search, first_calls: dict[NodeId, _Call]) -> None:
        """The round has taken a part of its deadline: ask the own directory for the keys that are not found, and the
        candidates of hot keys whose copies are silent. The round does not wait for these copies any more."""
        if not search.open or search.first_calls is not first_calls:
            return
        wanted: dict[NodeId, list[int]] = {}
        for node in dict.fromkeys(search.copies.values()):
            call = first_calls[node]
            if all(index in search.copies for index in call.indices):
                call.awaited = False
                search.awaited -= 1
            silent = [index for index, copy in search.copies.items() if copy == node]
            self._ask_candidates(search, node, silent, wanted, [])
        self._ask_own(search, wanted)
        self._send(search, {node: _Call(node, indices) for node, indices in wanted.items()})

    def _ask_candidates(
        self, search: _Search, node: NodeId, indices: list[int], wanted: dict[NodeId, list[int]], absent: list[int]
    ) -> None:
        """Add the candidates of hot keys whose copy at `node` is of no use to `wanted`. `absent`: the keys of which the
        node answered that it has no copy."""
        for index in indices:
            del search.copies[index]
            for candidate in dict.fromkeys(search.candidates[index]):
                if candidate == self._context.node:
                    search.own.append(index)
                elif candidate != node:
                    wanted.setdefault(candidate, []).append(index)
        self._replication.missed(search.tenant, len(indices), search.keys_of(absent), node)

    def _ask_own(self, search: _Search, wanted: dict[NodeId, list[int]]) -> None:
        """Ask this node's directory for the keys that are not found yet."""
        own, search.own = search.own, []
        self._ask_here(search, [index for index in own if search.found.owners[index] is None], wanted)

    def _ask_here(self, search: _Search, indices: list[int], wanted: dict[NodeId, list[int]]) -> None:
        """This node's directory answers at once; the owners that it names are added to `wanted`."""
        if not indices:
            return
        node, found = self._context.node, search.found
        answers = self._directory_node.ask(search.tenant, search.keys_of(indices))
        for index, (code, owner) in zip(indices, answers, strict=True):
            candidates = search.candidates[index]
            if candidates[0] == node:
                if code < found.codes[index]:
                    found.codes[index] = code
            elif owner is None or candidates[1] != node:
                found.absent.add((index, node))
                continue
            if owner is not None:
                found.named[index] = (node, owner)
                self._ask_owner(search, index, owner, wanted)

    def _ask_owner(self, search: _Search, index: int, owner: NodeId, wanted: dict[NodeId, list[int]]) -> None:
        """Add the owner that a directory node named to `wanted`, unless it was asked."""
        if owner in search.candidates[index] or (index, owner) in search.asked:
            return
        search.asked.add((index, owner))
        if owner == self._context.node:
            self._ask_here(search, [index], wanted)
        else:
            wanted.setdefault(owner, []).append(index)

    def _send(self, search: _Search, calls: dict[NodeId, _Call]) -> None:
        may_defer = search.wait is not None and self._waiting.may_be_deferred(search.wait)
        search.awaited += len(calls)
        for node, call in calls.items():
            limit_s = search.deadline - self._context.now
            if search.redirects and all(search.redirects.get(index) == node for index in call.indices):
                # Every key is leased at another node already: a redirect is not worth the whole deadline.
                limit_s = min(limit_s, PART_OF_DEADLINE * search.limit_s)
            keys, request = join_keys(search.keys_of(call.indices)), search.match.request.request
            lookup = partial(wire.Lookup, tenant=search.tenant, keys=keys, request=request, may_defer=may_defer)
            self._peers.call(node, lookup, limit_s, partial(self._answered, search, call))
        if not calls and not search.awaited:
            self._end_round(search)

    def _answered(self, search: _Search, call: _Call, reply: Reply | None) -> None:
        """A node answered a lookup, or did not in time. Sends the lookups that follow, or ends the round."""
        answer = reply if isinstance(reply, wire.LookupReply) else None
        if not search.open:
            if answer is not None and answer.lease:
                self._peers.tell(call.node, wire.ReleaseLease((answer.lease,)))
            return
        search.awaited -= call.awaited
        if reply is None:
            search.found.silent.append(call.node)
        wanted: dict[NodeId, list[int]] = {}
        hot = [index for index in call.indices if index in search.copies] if search.copies else []
        absent: list[int] = []
        if answer is not None and len(answer.codes) == len(call.indices) >= answer.known_depth:
            codes = dict(zip(call.indices, answer.codes, strict=True)) if hot else {}
            self._take(search, call, answer, wanted)
            # A copy that answers UNKNOWN or DEFERRED may exist: perhaps it cannot be leased at the moment.
            absent = [index for index in hot if codes[index] in _NO_COPY]
            for index in [index for index in hot if codes[index] == _LOCAL]:
                del search.copies[index]
                hot.remove(index)
        if hot:
            self._ask_candidates(search, call.node, hot, wanted, absent)
        if search.own:
            self._ask_own(search, wanted)
        if wanted and self._context.now < search.deadline:
            self._send(search, {node: _Call(node, indices) for node, indices in wanted.items()})
        elif not search.awaited:
            self._end_round(search)

    def _take(self, search: _Search, call: _Call, reply: wire.LookupReply, wanted: dict[NodeId, list[int]]) -> None:
        """Note the leases and codes of an answer; the nodes that it names are added to `wanted`."""
        node, found = call.node, search.found
        if reply.known_depth:
            found.accesses.append((call.indices[reply.known_depth - 1], reply.last_access, reply.last_access_age_s))
        if reply.lease:
            found.leases.setdefault(node, []).append(reply.lease)
        named, codes, owners = iter(reply.nodes), found.codes, found.owners
        for index, code in zip(call.indices, reply.codes, strict=True):
            if code == _LOCAL:
                if owners[index] is None or search.redirects.get(index) == node:
                    owners[index] = node
                    codes[index] = _REMOTE
            elif code == _ELSEWHERE:
                owner = NodeId(next(named, ""))
                found.named[index] = (node, owner)
                if owners[index] is None and owner:
                    self._ask_owner(search, index, owner, wanted)
            elif code == _MISSING and search.candidates[index][0] != node:
                found.absent.add((index, node))
            elif code in _NOT_LEASED and code < codes[index]:
                codes[index] = code
        redirect = NodeId(reply.redirect)
        # A candidate is not asked twice: it has answered, or will.
        for index in call.indices if self._peers.usable(redirect) else ():
            unasked = redirect not in search.candidates[index] and (index, redirect) not in search.asked
            if owners[index] == node and unasked:
                search.asked.add((index, redirect))
                search.redirects[index] = redirect
                wanted.setdefault(redirect, []).append(index)

    # -- waiting

    def _end_round(self, search: _Search) -> None:
        """Every awaited answer has come: begin the round behind the probes, wait for the first missing segment, or
        finish."""
        if search.behind_probes:
            self._recheck(search)
            if self._ask_behind_probes(search):
                return
        wait = search.wait
        if wait is not None:
            self._recheck(search)
            gap = search.found.prefix(len(search.keys))
            wait.limit_to(len(search.keys) - gap)
            if self._may_wait(search, wait, gap):
                search.open = False
                if search.found.codes[gap] == _MISSING:
                    self._claim(search, wait, gap)
                else:
                    self._pause(search, wait, gap)
                return
        self._finish(search.match)

    def _may_wait(self, search: _Search, wait: Wait, gap: int) -> bool:
        codes = search.found.codes
        return search.match.process.alive and gap < len(codes) and self._waiting.may_wait(wait, codes[gap])

    def _pause(self, search: _Search, wait: Wait, gap: int) -> None:
        self._waiting.pause(wait, search.found.codes[gap], lambda: self._resume(search, wait, gap))

    def _resume(self, search: _Search, wait: Wait, gap: int) -> None:
        """After a pause. As long as nothing else has changed, only the directory node of the first missing key is
        asked."""
        self._recheck(search)
        reachable = all(node is None or self._peers.usable(node) for node in search.found.owners)
        if reachable and search.found.prefix(len(search.keys)) == gap and self._may_wait(search, wait, gap):
            self._claim(search, wait, gap)
        else:
            self._restart(search)

    def _claim(self, search: _Search, wait: Wait, gap: int) -> None:
        """Set the in-flight marker of the first missing key, unless another node has set it or stored the segment."""
        waited = search.found.codes[gap] != _MISSING

        def answered(code: Code) -> None:
            if code is Code.LOCAL or (code is Code.UNKNOWN and waited):
                # The segment is stored; or its directory node does not know, and the other candidate may.
                self._restart(search)
                return
            search.found.codes[gap] = code
            if code is Code.PENDING:
                self._pause(search, wait, gap)
            else:
                self._finish(search.match)

        self._waiting.claim(wait, search.tenant, search.keys[gap], search.candidates[gap][0], answered)

    def _restart(self, search: _Search) -> None:
        """Release the leases at other nodes and ask again for every key that this node lacks: after a wait many nodes
        read the same segments, and an owner may redirect this one."""
        for node, leases in search.found.leases.items():
            self._peers.tell(node, wire.ReleaseLease(tuple(leases)))
        search.found.forget_remote()
        search.asked.clear()
        search.redirects.clear()
        self._recheck(search)
        self._begin(search, search.found.missing())

    def _recheck(self, search: _Search) -> None:
        """Find the segments that arrived at this node since the keys were looked up here."""
        store, found = self._context.store, search.found
        if search.arrivals == store.arrivals:
            return
        search.arrivals = store.arrivals
        missing = found.missing()
        arrived = self._context.ready(search.tenant, search.keys_of(missing))
        for index, segment in zip(missing, arrived, strict=True):
            if segment is not None:
                store.pin(segment)
                found.segments[index] = segment
                found.codes[index] = _LOCAL

    # -- the result

    def _finish(self, match: _Match) -> None:
        """Lease the longest prefix that was found, release the rest, answer."""
        del self._under_way[match]
        result = self._conclude(match)
        process, session, hits = match.process, match.process.session, result.hits
        if hits < len(match.keys):
            session.recent.add(match.request.keys, result.access)
        lease: Lease | None = None
        if hits:
            number, hints = LeaseId(self._context.next_id()), with_access(match.request.hints, result.access)
            places = result.segments, result.owners, result.leases
            lease = Lease(number, match.keys[:hits], process.connection, hints, *places)
            self._grants.add_lease(session, lease)
        self._count(match, result)
        if match.request.request and session.segment_tokens:
            self._leave_trail(match, result, lease)
        if process.alive:
            packed = pack(result.segments, session.shards, checksums=match.request.checksums)
            lease_id = lease.id if lease is not None else 0
            matched = engine.Matched(match.request.id, lease_id, hits, result.codes, *packed)
            self._context.emit(Answer(process.connection, matched))

    def _conclude(self, match: _Match) -> MatchResult:
        """Decide the hits, unpin the segments beyond them, and release the leases at other nodes that no hit needs."""
        found, search, session = match.found, match.search, match.process.session
        if search is not None:
            search.open = False
            self._recheck(search)
            self._leave_out_dropped(found)
            self._report_stale(search)
        limit = self._grants.may_lease(session, found.segments, len(session.processes)) if match.process.alive else 0
        hits = found.prefix(limit) if search is not None else limit
        if hits == limit < len(match.keys) and found.codes[limit] <= _REMOTE:
            found.codes[limit] = Code.SESSION_LIMIT
        segments = tuple(found.segments[:hits])
        if hits < len(found.segments):
            self._context.store.unpin(*(segment for segment in found.segments[hits:] if segment is not None))
        access = access_of_match(self._context, session.tenant, match.keys, found.segments, hits, found.accesses)
        if search is None:
            return MatchResult(bytes(found.codes), segments, access)
        places = zip(segments, found.owners, strict=False)
        owners = tuple(owner if segment is None else None for segment, owner in places)
        leases: list[tuple[NodeId, int]] = []
        for node, granted in found.leases.items():
            if node in owners:
                leases += ((node, lease) for lease in granted)
            else:
                self._peers.tell(node, wire.ReleaseLease(tuple(granted)))
        return MatchResult(bytes(found.codes), segments, access, owners, tuple(leases), tuple(found.silent))

    def _leave_out_dropped(self, found: _Found) -> None:
        """Copies of this node that were found corrupt while other nodes were asked do not count."""
        for index, segment in enumerate(found.segments):
            if segment is not None and segment.state is _GONE:
                found.segments[index] = None
                found.codes[index] = _MISSING
                self._context.store.unpin(segment)

    def _report_stale(self, search: _Search) -> None:
        """Tell each directory node of the owners that it named and that have no copy; its entries are wrong."""
        found = search.found
        stale: dict[tuple[NodeId, NodeId], list[SegmentKey]] = {}
        for index, (directory_node, owner) in found.named.items():
            if found.codes[index] > _REMOTE and (index, owner) in found.absent:
                found.codes[index] = min(found.codes[index], _MISSING)
                stale.setdefault((directory_node, owner), []).append(search.keys[index])
        for (directory_node, owner), keys in stale.items():
            if directory_node == self._context.node:
                self._directory_node.gone(search.tenant, keys, owner)
            else:
                self._peers.tell(directory_node, wire.Evicted(search.tenant, join_keys(keys), owner))

    def _count(self, match: _Match, result: MatchResult) -> None:
        """Count the tokens that the match decides; those at other nodes are counted when they are fetched, shipped or
        skipped."""
        session, hits, keys = match.process.session, result.hits, len(match.keys)
        counters, size = self._context.counters, session.segment_tokens
        local = hits - result.segments.count(None) if result.owners else hits
        pending = int(hits < keys and result.codes[hits] in (Code.PENDING, Code.DEFERRED))
        counters.add(LOCAL, local * size)
        self._context.served(session.tenant, local * session.slot_bytes)
        self._replication.read_here(result.segments)
        counters.add(PENDING, pending * size)
        counters.add(MISSING, (keys - hits - pending) * size)

    def _leave_trail(self, match: _Match, result: MatchResult, lease: Lease | None) -> None:
        session = match.process.session
        trail = Trail(self._context.now, match.request, session.segment_tokens, session.slot_bytes)
        trail.hits = result.hits
        trail.elsewhere = Counter(owner for owner in result.owners if owner is not None)
        trail.silent = dict.fromkeys(result.silent)
        if lease is not None:
            lease.trail = trail
        self._explain.begin(session.tenant, trail, result.codes, match.keys)

    @property
    def matching(self) -> int:
        """Matches under way."""
        return len(self._under_way)

    def pinned(self) -> Iterator[Segment]:
        """A segment per pin of the matches under way; for integrity checks."""
        return (segment for match in self._under_way for segment in match.found.segments if segment is not None)

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"matches": len(self._under_way)}
