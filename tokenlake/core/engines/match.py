"""Match: find the longest prefix of a prompt that the pool has, or all independent keys that it has, and lease them.

::

    Match -> copies of this node: the whole prompt ------------------------------------------> Matched
                |  some keys are missing
                v
             ask the directory nodes of some missing keys (`_probes`), in parallel; the own directory at once
                |  all have answered, or a part of the deadline has passed
                v
             ask the owners that they named, each also for the missing keys between those that it owns
                |  fetches from an owner fail: ask the other nodes that may have a copy
                |  an owner lacks a key between: ask the key's directory node, then the owner that it names
                v
             may the match wait, and is the first missing segment being computed or deferred, or a node silent?
                |  no                              yes: wait (`waiting`), then ask again
                v
             Matched: the prefix without a gap is leased, here or at other nodes; the rest is released

A lease exists only where the slot is: the node that has the bytes grants it in its answer to the lookup. DEFERRED is
the answer of an owner that has the segment and is busy with sends to other nodes: ask again later. All lookups before a
wait have one deadline, that of the engine's request.

A request computes consecutive segments on one node, so the owner of a segment mostly has its neighbours. The first
lookups therefore ask for the missing keys at places 0, 1, 3, 7, 15, ... only, and the owner that they name is asked for
the rest; a prompt that no node knows costs a few lookups. A match finds most segments although a directory node does
not answer, because the owner of the neighbouring segments is asked for them. Here the pool has the keys 0 to 7 of 16::

    missing keys         0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
    directory nodes      0 1   3       7                     15 <- not known
    owner of 0, 1, 3, 7  0 1 2 3 4 5 6 7
    directory nodes                      8 9 10 11 12 13 14

A segment of independent keys is useful without the others. The first lookups ask for all missing keys, at their
directory nodes; the next ones ask each owner for the segments that it was named for. The lease is of all segments that
were found, and such a match does not wait for a segment in flight.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.fetch import CopiesOf
from tokenlake.core.cluster.peers import Peers, Reply
from tokenlake.core.context import Context, KnownAccess
from tokenlake.core.engines.access import access_of_match, with_access
from tokenlake.core.engines.grants import Grants, Lease, pack
from tokenlake.core.engines.sessions import Process
from tokenlake.core.engines.waiting import Wait, WaitingMatches
from tokenlake.core.instructions import Answer
from tokenlake.core.report.account import Account
from tokenlake.core.report.explain import Explain, Trail
from tokenlake.core.report.misses import NO_NODES, Beyond, UnheardNodes, only_other_layouts, unheard_nodes
from tokenlake.hints import AccessRecord
from tokenlake.identity import LeaseId, NodeId, SegmentKey, TenantId
from tokenlake.memory import Segment, State
from tokenlake.metrics import Metric
from tokenlake.wire import Code, engine
from tokenlake.wire import peer as wire
from tokenlake.wire.engine import MAX_KEYS
from tokenlake.wire.funnel import MissReason
from tokenlake.wire.match_deadline import match_deadline_s
from tokenlake.wire.slots import join_keys, split_keys

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

PART_OF_DEADLINE = 0.25
"""Fraction of a match's deadline. For that time the match waits for the answers to all lookups that it sent together;
then it sends the next lookups without the missing answers. It waits as long for a node to which an owner redirected
it."""
# Constants, because in Python 3.11 each access to a member of an enum costs some 100 ns, and a match compares these
# codes for each key.
_LOCAL, _REMOTE, _MISSING, _UNKNOWN, _ELSEWHERE = Code.LOCAL, Code.REMOTE, Code.MISSING, Code.UNKNOWN, Code.ELSEWHERE
_NO_COPY = (Code.PENDING, Code.MISSING, Code.ELSEWHERE)
"""Codes by which a node answers a lookup of a segment of which it has no copy."""
_GONE = State.GONE
_NO_KEYS: list[SegmentKey] = []


class MatchResult(NamedTuple):
    """The outcome of one match of an engine. A hit is a segment that the match leases."""

    codes: bytes
    """One `Code` per key of the prompt: LOCAL or REMOTE for each hit, otherwise the reason why the segment is not
    leased."""
    segments: tuple[Segment | None, ...]
    """The pinned segment of this node for each hit; None for a hit that is leased at another node."""
    access: AccessRecord
    owners: tuple[NodeId | None, ...] = ()
    """The other node where each hit is leased, None for a hit on this node. Empty if all hits are on this node."""
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


class _Found:
    """The copies, owners and codes that one match has found so far, by index of the key in the prompt."""

    __slots__ = ("accesses", "codes", "disk", "disk_s", "here", "leases", "named", "owners", "segments", "silent")

    def __init__(self, segments: list[Segment | None], here: NodeId, disk: Sequence[int] = ()) -> None:
        """`segments`: the copy of this node for each key, pinned for the match; None where this node has none. `disk`:
        the indices of the keys whose segments are on disk here, and not in memory."""
        self.segments = segments
        self.here = here
        self.disk = list(disk)
        self.accesses: list[KnownAccess] = []
        """From each node that answered: the deepest segment of the prompt whose last access it knows, and that
        access."""
        self.forget_remote()

    def forget_remote(self) -> None:
        """Forget the owners and leases at other nodes, and which nodes did not answer; the copies of this node stay."""
        self.silent: list[NodeId] = []
        """Nodes that did not answer a lookup of the match, or have segments of it and deliver none. Lookups before a
        wait do not count."""
        self.codes = bytearray(_LOCAL if segment is not None else _UNKNOWN for segment in self.segments)
        self.owners: list[NodeId | None] = [None] * len(self.segments)
        """The other node where each segment is leased; None where it is not leased elsewhere."""
        for index in self.disk:
            self.codes[index], self.owners[index] = _REMOTE, self.here
        self.disk_s: dict[NodeId, float] = {}
        """By node: the seconds that it takes to read segments that it leased from its disk, if there are such."""
        self.leases: dict[NodeId, list[int]] = {}
        """Ids of all leases that other nodes granted to this match, by node."""
        self.named: dict[int, tuple[NodeId, NodeId]] = {}
        """For the index of a key: (directory node, owner that the directory node named)."""

    def missing(self) -> list[int]:
        """Indices of the keys without a copy at this node, ascending."""
        disk = frozenset(self.disk)
        return [index for index, segment in enumerate(self.segments) if segment is None and index not in disk]

    def prefix(self, limit: int) -> int:
        """Returns how many of the first `limit` segments, up to the first missing one, are on this node or leased at
        another."""
        places = zip(self.segments[:limit], self.owners, strict=False)
        gaps = (index for index, (segment, owner) in enumerate(places) if segment is None and owner is None)
        return next(gaps, limit)

    def places(self) -> list[int]:
        """Indices of the segments that are on this node or leased at another, ascending."""
        places = zip(self.segments, self.owners, strict=True)
        return [index for index, (segment, owner) in enumerate(places) if segment is not None or owner is not None]

    def set_codes_behind(self, gap: int, answered: set[int]) -> None:
        """Set the code MISSING for the keys behind `gap` (the index of the first missing segment, whose code is known)
        that are UNKNOWN because their directory nodes were not asked. `answered`: the indices of the keys whose
        directory nodes have answered."""
        codes = self.codes
        if gap < len(codes) and codes[gap] != _UNKNOWN:
            for index in range(gap + 1, len(codes)):
                if codes[index] == _UNKNOWN and index not in answered:
                    codes[index] = _MISSING


@dataclass(eq=False, slots=True)
class _Match:
    """One match under way: the request of an engine's process, and the copies found so far."""

    process: Process
    request: engine.Match
    keys: list[SegmentKey]
    found: _Found
    began: float
    """Time in seconds of the request."""
    search: _Search | None = None
    """The lookups at other nodes; None when this node has every segment of the prompt."""
    waited: bool = False
    """True if the match waited for a segment in flight."""


@dataclass(eq=False, slots=True)
class _Search:
    """The lookups by which one match looks for the segments that this node lacks: at other nodes, and in this node's
    own directory."""

    match: _Match
    keys: list[SegmentKey]
    found: _Found
    limit_s: float
    """Seconds that the lookups may take in all, until the match is answered or waits for a segment in flight."""
    wait: Wait | None
    """How long the match may still wait for a segment in flight; None when the engine allowed no wait."""
    arrivals: int
    """Value of `SegmentStore.arrivals` when the missing keys were last looked up on this node: if it has not changed,
    no segment has arrived since."""
    directory_nodes: dict[int, NodeId] = field(default_factory=dict)
    """The node that keeps the directory entry of each missing key, by index of the key, ascending."""
    previous: dict[int, NodeId] = field(default_factory=dict)
    """The node that kept the entry of a missing key before the last change of the ring, by index of the key, where that
    is another node than now. Empty `previous_ring_s` after the change."""
    marked: dict[int, NodeId] = field(default_factory=dict)
    """By index of a key: the previous directory node that has its in-flight marker."""
    deadline: float = 0.0
    unanswered: set[NodeId] = field(default_factory=set)
    """Nodes that did not answer a lookup since the search began, or began again after a wait."""
    open: bool = False
    """True while answers to lookups are used. An answer that arrives at another time is ignored, and its leases are
    released."""
    awaited: int = 0
    """Number of lookups that were sent and are not answered yet."""
    rounds: int = 0
    hurries: bool = False
    """True after lookups that were sent together have taken `PART_OF_DEADLINE`: from then on the match sends the next
    lookups after each answer instead of waiting for all."""
    asked: set[tuple[int, NodeId]] = field(default_factory=set)
    """(index of a key, node): the node was sent a lookup of this key."""
    denied: set[tuple[int, NodeId]] = field(default_factory=set)
    """(index of a key, node): the node did not lease the segment, or did not answer."""
    absent: set[tuple[int, NodeId]] = field(default_factory=set)
    """(index of a key, node): the node answered that it has no copy of the segment."""
    answered: set[int] = field(default_factory=set)
    """Indices of the keys whose directory node has answered."""
    undelivered: set[int] = field(default_factory=set)
    """Indices of the keys whose segments a node has that answers lookups and delivers no segment (`Peers.delivers`)."""
    redirects: dict[int, NodeId] = field(default_factory=dict)
    """By index of a key: the node to which the owner that leased the segment redirects this reader."""

    @property
    def tenant(self) -> TenantId:
        return self.match.process.session.tenant

    def keys_of(self, indices: list[int]) -> list[SegmentKey]:
        return [self.keys[index] for index in indices]

    def previous_left(self, index: int) -> bool:
        """True if the key has a previous directory node that was not asked."""
        return index in self.previous and (index, self.previous[index]) not in self.asked

    def named_owner(self, index: int) -> NodeId | None:
        """Returns the owner that a directory node named for a segment that is not leased yet, unless that owner has
        denied a lease; else None."""
        named = self.found.named.get(index)
        return None if named is None or (index, named[1]) in self.denied else named[1]


class Matches:
    """Finds and leases the longest prefix of a prompt that the pool has, for the engines of this node."""

    def __init__(
        self,
        context: Context,
        grants: Grants,
        peers: Peers,
        directory_node: DirectoryNode,
        waiting: WaitingMatches,
        explain: Explain,
        copies_of: CopiesOf,
    ) -> None:
        self._context = context
        self._grants = grants
        self._peers = peers
        self._directory_node = directory_node
        self._waiting = waiting
        self._explain = explain
        self._copies_of = copies_of
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
        match = _Match(process, request, keys, _Found(segments, self._context.node, disk), self._context.now)
        self._under_way[match] = None
        self._context.store.pin(*here)
        if disk:
            access, age_s = tier.last_access(entries[disk[-1]], self._context.now)
            match.found.accesses.append((disk[-1], access, age_s))
        if len(here) + len(disk) < len(keys):
            self._search(match)
        else:
            self._finish(match)

    def _search(self, match: _Match) -> None:
        request, now = match.request, self._context.now
        limit_s = match_deadline_s(self._context.config.match_deadline_s, len(match.keys))
        if request.deadline_s > 0:
            limit_s = min(limit_s, request.deadline_s)
        wait_s = request.in_flight_wait_s
        may_wait = wait_s and not request.independent
        limits = wait_s, request.in_flight_wait_per_segment_s, request.in_flight_expected_s
        wait = Wait(now, *limits) if may_wait else None
        match.search = _Search(match, match.keys, match.found, limit_s, wait, self._context.store.arrivals)
        self._begin(match.search)

    # -- lookups

    def _begin(self, search: _Search) -> None:
        """Begin to look for the segments that this node lacks; the deadline of the lookups counts from now. The
        directory of this node is asked first, which takes no message."""
        missing = search.found.missing()
        keys = join_keys(search.keys_of(missing))
        directory_nodes = self._peers.directory_nodes(keys)
        search.directory_nodes = dict(zip(missing, directory_nodes, strict=True))
        previous = self._peers.previous_directory_nodes(keys, directory_nodes)
        search.previous = {missing[at]: node for at, node in previous.items()}
        search.deadline = self._context.now + search.limit_s
        search.open, search.hurries, search.rounds = True, False, 0
        here = self._context.node
        own = [index for index, node in search.directory_nodes.items() if node == here]
        answers = self._directory_node.answers(search.tenant, search.keys_of(own)) if own else ()
        known = self._directory_node.last_access(search.tenant, search.keys_of(own))
        if known is not None:
            search.found.accesses.append((own[known[0]], *known[1:]))
        for index, (code, owner) in zip(own, answers, strict=True):
            search.answered.add(index)
            if owner is None:
                search.found.codes[index] = code
            else:
                search.found.named[index] = (here, owner)
        if search.previous:
            self._ask_own_previous(search)
        self._continue(search)

    def _ask_own_previous(self, search: _Search) -> None:
        """Ask this node's directory for the keys that moved away from it."""
        here = self._context.node
        own = [index for index, node in search.previous.items() if node == here]
        answers = self._directory_node.answers(search.tenant, search.keys_of(own)) if own else ()
        for index, (code, owner) in zip(own, answers, strict=True):
            search.asked.add((index, here))
            if owner is not None:
                search.found.named[index] = (here, owner)
            elif code is Code.PENDING:
                self._marked(search, index, here)

    def _continue(self, search: _Search) -> None:
        """Send the lookups that follow from the answers so far. When there are no further lookups and no answer is
        awaited, the match waits for a segment in flight or is answered."""
        calls = self._next_calls(search) if self._context.now < search.deadline else {}
        if calls:
            search.rounds += 1
            self._context.after(PART_OF_DEADLINE * search.limit_s, partial(self._hurry, search, search.rounds))
            self._send(search, calls)
        elif not search.awaited:
            self._end(search)

    def _next_calls(self, search: _Search) -> dict[NodeId, list[int]]:
        """Returns, for each node, the ascending indices of the keys to look up there next, and records them as asked.

        A missing key is looked up at its owner; if that is not known, at the owner of the neighbouring segments; else
        at its directory node. Keys after the first segment that no node has are not looked up. In the first lookups,
        keys after the last one with a known owner are looked up both at that owner, which mostly has some of them, and
        at their directory nodes. Independent keys are all looked up, each at its own owner or directory node.
        """
        independent = search.match.request.independent
        found, asked, directory_nodes = search.found, search.asked, search.directory_nodes
        answered, first_round = search.answered, not search.rounds
        # (index, its owner, or else that of the nearest segment with a known owner: an earlier one if there is one)
        missing: list[tuple[int, NodeId | None]] = []
        nearest: NodeId | None = None
        last = -1
        for index in directory_nodes:
            owner = found.owners[index]
            if owner is None and found.segments[index] is None:
                owner = search.named_owner(index)
                if owner is None and index in search.undelivered:
                    copies = self._copies_of(search.tenant, [search.keys[index]])[0]
                    owner = next((node for node in copies if (index, node) not in search.denied), None)
                if owner is None and index in answered and not search.previous_left(index):
                    if independent:
                        continue
                    break
                missing.append((index, owner or nearest))
            if owner is not None and not independent:
                if nearest is None:
                    # The keys before the first known owner, and this one if it is not leased.
                    missing = [(each, owner) for each, _ in missing]
                nearest, last = owner, index
        calls: dict[NodeId, list[int]] = {}
        to_directory: list[int] = []
        for index, node in missing:
            if node is not None and (index, node) not in asked:
                asked.add((index, node))
                calls.setdefault(node, []).append(index)
                if independent or not (first_round and index > last):
                    continue
            if (index not in answered and (index, directory_nodes[index]) not in asked) or search.previous_left(index):
                to_directory.append(index)
        for index in _probes(to_directory) if first_round and not independent else to_directory:
            if index not in answered and (index, directory_nodes[index]) not in asked:
                asked.add((index, directory_nodes[index]))
                calls.setdefault(directory_nodes[index], []).append(index)
            if search.previous_left(index):
                asked.add((index, search.previous[index]))
                calls.setdefault(search.previous[index], []).append(index)
        return {node: sorted(indices) for node, indices in calls.items()}

    def _hurry(self, search: _Search, number: int) -> None:
        """Send the next lookups without the answers that are still missing, because those that were sent together have
        taken `PART_OF_DEADLINE`. `number`: the number of the round in which they were sent; the call has no effect
        after a later round has begun."""
        if search.open and search.rounds == number and not search.hurries:
            search.hurries = True
            self._continue(search)

    def _send(self, search: _Search, calls: dict[NodeId, list[int]]) -> None:
        """Send a lookup to each node of `calls`, for the keys at its indices."""
        may_defer = search.wait is not None and self._waiting.may_be_deferred(search.wait)
        search.awaited += len(calls)
        for node, indices in calls.items():
            limit_s = search.deadline - self._context.now
            if search.redirects and all(search.redirects.get(index) == node for index in indices):
                # All segments of this lookup are leased at their owner already, so the match does not spend its whole
                # deadline on the node that the owner redirected it to.
                limit_s = min(limit_s, PART_OF_DEADLINE * search.limit_s)
            keys, request = join_keys(search.keys_of(indices)), search.match.request.request
            ring = self._context.ring_version
            lookup = partial(
                wire.Lookup, tenant=search.tenant, keys=keys, request=request, may_defer=may_defer, ring=ring
            )
            self._peers.call(node, lookup, limit_s, partial(self._answered, search, node, indices))

    def _answered(self, search: _Search, node: NodeId, indices: list[int], reply: Reply | None) -> None:
        """Handle the answer of `node` to a lookup of the keys at `indices`. `reply`: None if the node did not answer in
        time or cannot be called."""
        answer = reply if isinstance(reply, wire.LookupReply) else None
        if not search.open:
            if answer is not None and answer.lease:
                self._peers.tell(node, wire.ReleaseLease((answer.lease,)))
            return
        search.awaited -= 1
        if answer is None:
            search.found.silent.append(node)
            search.unanswered.add(node)
            search.denied.update((index, node) for index in indices)
        elif len(answer.codes) == len(indices) >= answer.known_depth:
            redirected = self._take(search, node, indices, answer)
            if redirected and self._context.now < search.deadline:
                self._send(search, {NodeId(answer.redirect): redirected})
        # If the node of the redirect cannot be called, `_send` has already handled its missing answer, which may have
        # ended the search.
        if search.open and (search.hurries or not search.awaited):
            self._continue(search)

    def _take(self, search: _Search, node: NodeId, indices: list[int], reply: wire.LookupReply) -> list[int]:
        """Record the leases and codes of a node's answer to a lookup. Returns the indices of the keys to look up at the
        node to which the answer redirects."""
        found, owners = search.found, search.found.owners
        if reply.known_depth:
            found.accesses.append((indices[reply.known_depth - 1], reply.last_access, reply.last_access_age_s))
        if reply.lease:
            found.leases.setdefault(node, []).append(reply.lease)
        if reply.disk_s:
            found.disk_s[node] = max(reply.disk_s, found.disk_s.get(node, 0.0))
        named = iter(reply.nodes)
        delivers = self._peers.delivers(node)
        if not delivers and _LOCAL in reply.codes:
            found.silent.append(node)
        for index, code in zip(indices, reply.codes, strict=True):
            if code == _LOCAL and not delivers:
                # The lease is released when the match ends, since no segment of the match is leased there.
                search.denied.add((index, node))
                search.undelivered.add(index)
                if search.directory_nodes[index] == node:
                    search.answered.add(index)
                continue
            if code == _LOCAL:
                if owners[index] is None or search.redirects.get(index) == node:
                    owners[index] = node
                    found.codes[index] = _REMOTE
                continue
            owner = NodeId(next(named, "")) if code == _ELSEWHERE else None
            self._heard(search, index, node, code, owner)
        redirect = NodeId(reply.redirect)
        redirected: list[int] = []
        for index in indices if self._peers.delivers(redirect) else ():
            if owners[index] == node and (index, redirect) not in search.asked:
                search.asked.add((index, redirect))
                search.redirects[index] = redirect
                redirected.append(index)
        return redirected

    def _heard(self, search: _Search, index: int, node: NodeId, code: int, owner: NodeId | None) -> None:
        """Record that `node` does not lease a segment to this match: it answered with `code`. `owner`: the owner that
        it named as directory node, if it named one."""
        found = search.found
        search.denied.add((index, node))
        if code in _NO_COPY:
            search.absent.add((index, node))
        elif code == Code.DEFERRED:
            found.codes[index] = min(found.codes[index], code)
        if search.directory_nodes[index] != node:
            # Only the directory node of a key knows whether another node has the segment. A previous one may know too.
            if search.previous.get(index) == node:
                if owner is not None and search.named_owner(index) is None:
                    self._named(search, index, node, owner)
                elif code == Code.PENDING:
                    self._marked(search, index, node)
            return
        search.answered.add(index)
        if owner is not None:
            self._named(search, index, node, owner)
        elif code < found.codes[index]:
            found.codes[index] = code

    def _marked(self, search: _Search, index: int, node: NodeId) -> None:
        """Note that `node`, a directory node of segment `index` on the previous ring, has an in-flight marker for it:
        the segment is PENDING. The directory node on the present ring may not have the marker."""
        if search.found.codes[index] > Code.PENDING:
            search.found.codes[index] = Code.PENDING
            search.marked[index] = node

    def _named(self, search: _Search, index: int, node: NodeId, owner: NodeId) -> None:
        """Record that the directory node `node` named `owner` as the owner of segment `index`. If it named this node,
        its entry is stale: this node lacks the segment."""
        search.found.named[index] = (node, owner)
        if owner == self._context.node:
            search.denied.add((index, owner))
            search.absent.add((index, owner))

    # -- waiting

    def _end(self, search: _Search) -> None:
        """No further lookup would find more segments: wait for the first missing segment to be computed, or answer the
        match."""
        wait = search.wait
        if wait is not None:
            if self._recheck(search):
                # The keys behind the segments that arrived were not looked up yet.
                self._continue(search)
                return
            gap = search.found.prefix(len(search.keys))
            wait.limit_to(len(search.keys) - gap)
            if self._may_wait(search, wait, gap):
                search.open = False
                if search.found.codes[gap] == _MISSING and self._context.now >= wait.expects_until:
                    self._request_marker(search, wait, gap)
                else:
                    self._pause(search, wait, gap)
                return
        self._finish(search.match)

    def _may_wait(self, search: _Search, wait: Wait, gap: int) -> bool:
        found = search.found
        if gap == len(found.codes) or not search.match.process.alive:
            return False
        code = found.codes[gap]
        if code == _UNKNOWN:
            # Another lookup helps only where a node may answer it that did not answer the last one.
            stale = gap in found.named and (gap, found.named[gap][1]) in search.absent
            if stale or not any(map(self._peers.reachable, search.unanswered)):
                return False
        return self._waiting.may_wait(wait, code)

    def _pause(self, search: _Search, wait: Wait, gap: int) -> None:
        """Let the match wait for the segment at index `gap`, unless too many matches of its tenant wait. It looks up
        its segments again when the segment is there, or a node that leased some of the others delivers no segments."""
        match, found = search.match, search.found
        if not self._waiting.has_room(search.tenant):
            self._finish(match)
            return
        match.waited = True

        def sound() -> bool:
            return match.process.alive and all(self._peers.delivers(node) for node in found.leases)

        def resume(code: Code) -> None:
            if code is Code.MISSING or not match.process.alive:
                # With MISSING this node has the marker: the engine of the match computes the segment.
                if code is Code.MISSING:
                    self._withdraw_unused(search, gap)
                found.codes[gap] = _MISSING
                self._finish(match)
            else:
                self._restart(search)

        key, directory_node = search.keys[gap], search.marked.get(gap, search.directory_nodes[gap])
        self._waiting.pause(wait, search.tenant, key, directory_node, found.codes[gap], sound, resume)

    def _request_marker(self, search: _Search, wait: Wait, gap: int) -> None:
        """Ask for the in-flight marker of the first missing segment (at index `gap`). If this node gets it, the match
        is answered and its engine computes the segment; if another node has it, the match waits."""

        def answered(code: Code) -> None:
            if code is Code.LOCAL:
                # The segment is stored by now.
                self._restart(search)
                return
            search.found.codes[gap] = code
            if code is Code.PENDING:
                self._pause(search, wait, gap)
                return
            if code is Code.MISSING:
                self._withdraw_unused(search, gap)
            self._finish(search.match)

        self._waiting.request_marker(wait, search.tenant, search.keys[gap], search.directory_nodes[gap], answered)

    def _withdraw_unused(self, search: _Search, gap: int) -> None:
        """Withdraw the in-flight marker that this node got for the match, if its process died meanwhile: no engine
        computes the segment, unless another one of this node has stored it or is writing it."""
        key = search.keys[gap]
        if not search.match.process.alive and self._context.store.get(search.tenant, key) is None:
            self._directory_node.withdraw(search.tenant, [key])

    def _restart(self, search: _Search) -> None:
        """Release the leases at other nodes, and ask again for every key of which this node has no copy. After a wait
        many nodes read the same segments, and their owner may redirect this node to a copy."""
        for node, leases in search.found.leases.items():
            self._peers.tell(node, wire.ReleaseLease(tuple(leases)))
        search.found.forget_remote()
        answers = search.answered, search.undelivered, search.redirects, search.marked
        for known in (search.asked, search.denied, search.absent, search.unanswered, *answers):
            known.clear()
        self._recheck(search)
        self._begin(search)

    def _recheck(self, search: _Search) -> bool:
        """Find and pin the missing segments that arrived at this node since the match last looked them up here. Returns
        whether there are any."""
        store, found = self._context.store, search.found
        if search.arrivals == store.arrivals:
            return False
        search.arrivals = store.arrivals
        missing = found.missing()
        arrived = self._context.ready(search.tenant, search.keys_of(missing))
        for index, segment in zip(missing, arrived, strict=True):
            if segment is not None:
                store.pin(segment)
                found.segments[index] = segment
                found.codes[index] = _LOCAL
        return any(segment is not None for segment in arrived)

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
        (self._wait_seconds if match.waited else self._match_seconds).add(self._context.now - match.began)
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
            search.open = False
            self._recheck(search)
            self._leave_out_dropped(found)
            self._leave_out_evicted(match)
            self._report_stale(search)
            if not independent:
                found.set_codes_behind(found.prefix(len(match.keys)), search.answered)
        places = found.places() if independent else None
        candidates = found.segments if places is None else [found.segments[index] for index in places]
        limit = self._grants.may_lease(session, candidates, len(session.processes)) if match.process.alive else 0
        if places is None:
            hits = found.prefix(limit) if search is not None else limit
            self._hold(match, range(hits))
            if hits == limit < len(match.keys) and found.codes[limit] <= _REMOTE:
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

    def _leave_out_dropped(self, found: _Found) -> None:
        """Count a copy of this node as missing if it was dropped for wrong bytes while other nodes were asked."""
        for index, segment in enumerate(found.segments):
            if segment is not None and segment.state is _GONE:
                found.segments[index] = None
                found.codes[index] = _MISSING
                self._context.store.unpin(segment)

    def _leave_out_evicted(self, match: _Match) -> None:
        """Count a segment on disk as missing if it left the disk while other nodes were asked."""
        found = match.found
        for index in [at for at in found.disk if self._entry(match, at) < 0]:
            found.disk.remove(index)
            found.owners[index], found.codes[index] = None, _MISSING

    def _entry(self, match: _Match, index: int) -> int:
        return self._context.disk.find(match.process.session.tenant, match.keys[index])

    def _hold(self, match: _Match, hits: Sequence[int]) -> None:
        """Keep those hits that are on disk there until the engine has had time to fetch them."""
        if match.found.disk:
            chosen, until = frozenset(hits), self._context.now + self._context.config.peer_lease_s
            for index in match.found.disk:
                if index in chosen:
                    self._context.disk.hold(self._entry(match, index), until)

    def _report_stale(self, search: _Search) -> None:
        """Tell the directory nodes which of the owners that they named have no copy of the segment, so that they ask
        these owners, and drop the entries if they confirm it."""
        found = search.found
        stale: dict[tuple[NodeId, NodeId], list[SegmentKey]] = {}
        for index, (directory_node, owner) in found.named.items():
            if found.codes[index] > _REMOTE and (index, owner) in search.absent:
                found.codes[index] = min(found.codes[index], _MISSING)
                stale.setdefault((directory_node, owner), []).append(search.keys[index])
        for (directory_node, owner), keys in stale.items():
            if directory_node == self._context.node:
                self._directory_node.ask_owner(search.tenant, keys, owner)
            else:
                self._peers.tell(directory_node, wire.Unfound(search.tenant, join_keys(keys), owner))

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
            beyond = Beyond(codes, at, known, unheard.reason, other_layout)
            if not match.process.alive:
                beyond = Beyond(bytes([_UNKNOWN]) * len(codes), at, 0, MissReason.UNREPORTED)
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
                trail.disks[node] = f"the disk of {node}"
            elif node in match.found.disk_s:
                trail.disks[node] = f"{node}, in part from its disk,"
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
        """Yields a segment once for each pin that unanswered matches hold on it; for integrity checks."""
        return (segment for match in self._under_way for segment in match.found.segments if segment is not None)

    def census(self) -> dict[str, int]:
        """How many objects this part of the rules keeps, by kind: for gauges, and for tests that look for leaks."""
        return {"matches": len(self._under_way)}


def _probes(indices: list[int]) -> list[int]:
    """Returns the items of `indices` at places 0, 1, 3, 7, 15 and so on. Lookups of these keys alone tell the length of
    the prefix that the pool has to within a factor of two."""
    places = ((1 << power) - 1 for power in range(len(indices).bit_length()))
    return [indices[place] for place in places]
