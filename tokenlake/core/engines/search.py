"""The lookups of one match: which other nodes have the segments that this node lacks, and will they lease them?

::

    ask the directory nodes of some missing keys (`_probes`), in parallel; the own directory at once
       |  all have answered, or a part of the deadline has passed
       v
    ask the owners that they named, each also for the missing keys between those that it owns
       |  fetches from an owner fail: ask the other nodes that may have a copy
       |  an owner lacks a key between: ask the key's directory node, then the owner that it names
       v
    ask the index of the cold tier for what is still missing; ask the directory nodes of those that it has
       |  no other node has them, and reading them is cheaper than computing: they are read from there
       v
    may the match wait, and is the first missing segment being computed or deferred, or a node silent?
       |  no                              yes: wait (`waiting`), then ask again
       v
    done

DEFERRED is the answer of an owner that has the segment and is busy with sends to other nodes: ask again later. All
lookups before a wait have one deadline, that of the engine's request.

A request computes consecutive segments on one node, so the owner of a segment mostly has its neighbours. The first
lookups therefore ask for the missing keys at places 0, 1, 3, 7, 15, ... only, and the owner that they name is asked for
the rest; a prompt that no node knows costs a few lookups. A match finds most segments although a directory node does
not answer, because the owner of the neighbouring segments is asked for them. Here the pool has the keys 0 to 7 of 16::

    missing keys         0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
    directory nodes      0 1   3       7                     15 <- not known
    owner of 0, 1, 3, 7  0 1 2 3 4 5 6 7
    directory nodes                      8 9 10 11 12 13 14

A segment of independent keys is useful without the others. The first lookups ask for all missing keys, at their
directory nodes; the next ones ask each owner for the segments that it was named for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cold_reads import ColdReads
from tokenlake.core.context import Context
from tokenlake.core.engines.found import Found
from tokenlake.core.engines.sessions import Process
from tokenlake.core.engines.waiting import Wait, WaitingMatches
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.memory import PoolId, State
from tokenlake.wire import Code, engine
from tokenlake.wire import peer as wire
from tokenlake.wire.match_deadline import match_deadline_s
from tokenlake.wire.slots import join_keys

PART_OF_DEADLINE = 0.25
"""Fraction of a match's deadline. For that time the match waits for the answers to all lookups that it sent together;
then it sends the next lookups without the missing answers. It waits as long for a node to which an owner redirected
it."""
# Constants, because in Python 3.11 each access to a member of an enum costs some 100 ns, and a search compares these
# codes for each key.
_LOCAL, _REMOTE, _MISSING, _UNKNOWN, _ELSEWHERE = Code.LOCAL, Code.REMOTE, Code.MISSING, Code.UNKNOWN, Code.ELSEWHERE
_GONE = State.GONE
_NO_COPY = (Code.PENDING, Code.MISSING, Code.ELSEWHERE)
"""Codes by which a node answers a lookup of a segment of which it has no copy."""


class Parts(NamedTuple):
    """The parts of a node's rules that a search asks."""

    context: Context
    peers: Peers
    directory_node: DirectoryNode
    waiting: WaitingMatches
    cold: ColdReads


@dataclass(eq=False, slots=True)
class _Row:
    """What a search knows of one key that this node lacks, from its begin or its last wait on."""

    index: int
    key: SegmentKey
    directory: NodeId
    """The node that keeps the directory entry of the key."""
    answered: bool = False
    """The directory node has answered."""
    named: tuple[NodeId, NodeId] | None = None
    """(directory node, owner that it named)."""
    # Tuples: they are short, and a row of a match that waits takes little memory.
    asked: tuple[NodeId, ...] = ()
    denied: tuple[NodeId, ...] = ()
    """Nodes that did not lease the segment, or did not answer."""
    absent: tuple[NodeId, ...] = ()
    """Nodes that answered that they have no copy."""
    undelivered: bool = False
    """A node has the segment that answers lookups and delivers no segment (`Peers.delivers`)."""
    redirect: NodeId | None = None
    """The node to which the owner that leased the segment redirects this reader."""

    @property
    def owner(self) -> NodeId | None:
        """The owner that a directory node named, unless it has denied a lease."""
        return None if self.named is None or self.named[1] in self.denied else self.named[1]

    @property
    def stale(self) -> bool:
        """The owner that a directory node named has no copy."""
        return self.named is not None and self.named[1] in self.absent

    @property
    def directory_left(self) -> bool:
        """The directory node was not asked yet."""
        return not self.answered and self.directory not in self.asked


class _State(Enum):
    LOOKING = auto()
    """Lookups are under way."""
    WAITING = auto()
    """The match waits for a segment in flight."""
    ENDED = auto()
    """An answer that still arrives is ignored, and its leases are released."""


class Search:
    """The search of one match at other nodes, and in this node's own directory. It changes `found`, and calls `done`
    once, when no further lookup or wait would find more."""

    def __init__(
        self,
        parts: Parts,
        process: Process,
        request: engine.Match,
        keys: list[SegmentKey],
        found: Found,
        done: Callable[[], None],
    ) -> None:
        self._parts, self._context = parts, parts.context
        self._process, self._request = process, request
        self._tenant: TenantId = process.session.tenant
        self._keys = keys
        self._found = found
        self._done = done
        limit_s = match_deadline_s(self._context.config.match_deadline_s, len(keys))
        self._limit_s = min(limit_s, request.deadline_s) if request.deadline_s > 0 else limit_s
        """Seconds that the lookups may take in all, until the search ends or waits."""
        self._wait: Wait | None = None
        """How long the match may still wait for a segment in flight; None when it may not."""
        if request.in_flight_wait_s and not request.independent:
            per_segment_s, expected_s = request.in_flight_wait_per_segment_s, request.in_flight_expected_s
            self._wait = Wait(self._context.now, request.in_flight_wait_s, per_segment_s, expected_s)
        self._arrivals = self._context.store.arrivals
        """Value of `SegmentStore.arrivals` when the missing keys were last looked up on this node."""
        self._state = _State.LOOKING
        self._rows: dict[int, _Row] = {}
        """The keys that this node lacked at the begin, by index, ascending."""
        self._unanswered: set[NodeId] = set()
        self._cold: dict[int, None] | None = None
        """The indices of the keys that the cold tier has and that are not taken yet; None before it was asked."""
        self._deadline = 0.0
        self._awaited = 0
        """Number of lookups that were sent and are not answered yet."""
        self._rounds = 0
        self._hurries = False
        """True after lookups that were sent together have taken `PART_OF_DEADLINE`: from then on the next lookups are
        sent after each answer instead of after all."""
        self.waited = False
        """True if the match waited for a segment in flight."""

    # -- from the begin to the end

    def begin(self) -> None:
        """Look for the segments that this node lacks; the deadline of the lookups counts from now."""
        missing = self._found.missing()
        keys = [self._keys[index] for index in missing]
        packed = join_keys(keys)
        directories = self._parts.peers.directory_nodes(packed)
        self._rows = {row.index: row for row in map(_Row, missing, keys, directories)}
        self._unanswered.clear()
        self._cold = None
        self._deadline = self._context.now + self._limit_s
        self._state, self._hurries, self._rounds = _State.LOOKING, False, 0
        self._ask_own_directory()
        self._look_on()

    def _ask_own_directory(self) -> None:
        """Ask the directory of this node, which takes no message."""
        here, directory = self._context.node, self._parts.directory_node
        own = [row for row in self._rows.values() if row.directory == here]
        known = directory.last_access(self._tenant, [row.key for row in own])
        if known is not None:
            self._found.accesses.append((own[known[0]].index, *known[1:]))
        answers = directory.answers(self._tenant, [row.key for row in own]) if own else ()
        for row, (code, owner) in zip(own, answers, strict=True):
            row.answered = True
            if owner is None:
                self._found.codes[row.index] = code
            else:
                row.named = (here, owner)

    def _look_on(self) -> None:
        """Send the lookups that follow from the answers so far. When there are none and no answer is awaited, ask the
        cold tier, wait for a segment in flight, or end."""
        lookups = self._next_lookups() if self._context.now < self._deadline else {}
        if lookups:
            self._rounds += 1
            self._context.after(PART_OF_DEADLINE * self._limit_s, partial(self._hurry, self._deadline, self._rounds))
            self._send(lookups)
        elif not self._awaited and not self._looks_into_cold() and not self._waits():
            self._end()

    def _hurry(self, deadline: float, number: int) -> None:
        """Send the next lookups without the answers that are still missing. `deadline`, `number`: the round that has
        taken `PART_OF_DEADLINE`; the call has no effect after a later one has begun."""
        now = self._deadline, self._rounds
        if self._state is _State.LOOKING and now == (deadline, number) and not self._hurries:
            self._hurries = True
            self._look_on()

    def conclude(self) -> None:
        """Bring `found` up to date when the match takes it: segments arrived, were dropped or left the disk meanwhile,
        and keys behind the first gap have no code. Reports owners that have no copy to the directory nodes that named
        them."""
        self._state = _State.ENDED
        self._pin_arrived()
        self._leave_out_gone()
        self._report_stale()
        codes, gap = self._found.codes, self._found.prefix(len(self._keys))
        if not self._request.independent and gap < len(codes) and codes[gap] != _UNKNOWN:
            # The directory nodes of most keys behind a key that no node has were not asked.
            for row in self._rows.values():
                if row.index > gap and codes[row.index] == _UNKNOWN and not row.answered:
                    codes[row.index] = _MISSING

    def _end(self) -> None:
        self._state = _State.ENDED
        self._done()

    # -- lookups

    def _next_lookups(self) -> dict[NodeId, list[_Row]]:
        """Returns, for each node, the rows to look up there next, in the order of the prompt, and notes them as asked.

        In the first lookups, keys after the last one with a known owner are looked up both at that owner, which mostly
        has some of them, and at some of their directory nodes.
        """
        independent, first = self._request.independent, not self._rounds
        wanted, last = self._wanted()
        lookups: dict[NodeId, list[_Row]] = {}
        to_directory: list[_Row] = []
        for row, node in wanted:
            at_owner = node is not None and node not in row.asked
            if node is not None and at_owner:
                row.asked += (node,)
                lookups.setdefault(node, []).append(row)
            if not at_owner or (first and not independent and row.index > last):
                to_directory.append(row)
        to_directory = [row for row in to_directory if row.directory_left]
        for row in _probes(to_directory) if first and not independent else to_directory:
            row.asked += (row.directory,)
            lookups.setdefault(row.directory, []).append(row)
        return {node: sorted(rows, key=lambda row: row.index) for node, rows in lookups.items()}

    def _wanted(self) -> tuple[list[tuple[_Row, NodeId | None]], int]:
        """Returns the rows to look up, each with its owner, or else with that of the nearest segment with a known owner
        (an earlier one if there is one); and the index of the last key with a known owner, -1 without one. Keys after
        the first segment that no node has are left out, unless they are independent."""
        independent, found = self._request.independent, self._found
        wanted: list[tuple[_Row, NodeId | None]] = []
        nearest: NodeId | None = None
        last = -1
        for row in self._rows.values():
            owner = found.owners[row.index]
            if owner is None and found.segments[row.index] is None:
                owner = row.owner or self._other_copy(row)
                if owner is None and row.answered:
                    if independent or (self._cold is not None and row.index in self._cold):
                        continue
                    break
                wanted.append((row, owner or nearest))
            if owner is not None and not independent:
                if nearest is None:
                    # The keys before the first known owner, and this one if it is not leased.
                    wanted = [(each, owner) for each, _ in wanted]
                nearest, last = owner, row.index
        return wanted, last

    def _other_copy(self, row: _Row) -> NodeId | None:
        """Another node that may have a copy of a segment whose node delivers none."""
        copies = self._parts.directory_node.copies_of(self._tenant, [row.key])[0] if row.undelivered else []
        return next((node for node in copies if node not in row.denied), None)

    def _send(self, lookups: dict[NodeId, list[_Row]]) -> None:
        may_defer = self._wait is not None and self._parts.waiting.may_be_deferred(self._wait)
        self._awaited += len(lookups)
        for node, rows in lookups.items():
            limit_s = self._deadline - self._context.now
            if all(row.redirect == node for row in rows):
                # All these segments are leased at their owner already, so the match does not spend its whole deadline
                # on the node that the owner redirected it to.
                limit_s = min(limit_s, PART_OF_DEADLINE * self._limit_s)
            self._parts.peers.look_up(
                node,
                self._tenant,
                [row.key for row in rows],
                limit_s,
                partial(self._answered, node, rows),
                request=self._request.request,
                may_defer=may_defer,
            )

    # -- answers

    def _answered(self, node: NodeId, rows: list[_Row], answer: wire.LookupReply | None) -> None:
        """Handle the answer of `node` to a lookup; None if the node did not answer in time or cannot be called."""
        if self._state is not _State.LOOKING:
            if answer is not None and answer.lease:
                self._parts.peers.tell(node, wire.ReleaseLease((answer.lease,)))
            return
        self._awaited -= 1
        if answer is None:
            self._found.silent.append(node)
            self._unanswered.add(node)
            for row in rows:
                row.denied += (node,)
        else:
            self._take(node, rows, answer)
            redirected = self._redirected(node, NodeId(answer.redirect), rows)
            if redirected and self._context.now < self._deadline:
                self._send({NodeId(answer.redirect): redirected})
        # If the node of the redirect cannot be called, `_send` has handled its missing answer already, which may have
        # ended the search.
        if self._state is _State.LOOKING and (self._hurries or not self._awaited):
            self._look_on()

    def _take(self, node: NodeId, rows: list[_Row], reply: wire.LookupReply) -> None:
        """Take the leases, codes and names of a node's answer."""
        found = self._found
        if reply.known_depth:
            found.accesses.append((rows[reply.known_depth - 1].index, reply.last_access, reply.last_access_age_s))
        if reply.lease:
            found.leases.setdefault(node, []).append(reply.lease)
        if reply.disk_s:
            found.disk_s[node] = max(reply.disk_s, found.disk_s.get(node, 0.0))
        delivers = self._parts.peers.delivers(node)
        if not delivers and _LOCAL in reply.codes:
            found.silent.append(node)
        named = iter(reply.nodes)
        for row, code in zip(rows, reply.codes, strict=True):
            if code != _LOCAL:
                self._take_denial(row, node, code, NodeId(next(named, "")) if code == _ELSEWHERE else None)
            elif not delivers:
                # The lease is released when the match ends, since no segment of the match is leased there.
                row.denied += (node,)
                row.undelivered = True
                row.answered = row.answered or row.directory == node
            elif found.owners[row.index] is None or row.redirect == node:
                found.owners[row.index] = node
                found.codes[row.index] = _REMOTE

    def _take_denial(self, row: _Row, node: NodeId, code: int, owner: NodeId | None) -> None:
        """Take the code of a node that does not lease a segment. `owner`: the owner that it named as directory node."""
        codes = self._found.codes
        row.denied += (node,)
        if code in _NO_COPY:
            row.absent += (node,)
        elif code == Code.DEFERRED:
            codes[row.index] = min(codes[row.index], code)
        # Only the directory node of a key knows whether another node has the segment.
        if row.directory == node:
            row.answered = True
            if owner is not None:
                self._name(row, node, owner)
            elif code < codes[row.index]:
                codes[row.index] = code

    def _name(self, row: _Row, node: NodeId, owner: NodeId) -> None:
        """Note that the directory node `node` named an owner. If that is this node, its entry is stale: this node lacks
        the segment."""
        row.named = (node, owner)
        if owner == self._context.node:
            row.denied += (owner,)
            row.absent += (owner,)

    def _redirected(self, node: NodeId, redirect: NodeId, rows: list[_Row]) -> list[_Row]:
        """Returns the rows that `node` leases and that are to be looked up at the node to which it redirects."""
        if not self._parts.peers.delivers(redirect):
            return []
        redirected = [row for row in rows if self._found.owners[row.index] == node and redirect not in row.asked]
        for row in redirected:
            row.asked += (redirect,)
            row.redirect = redirect
        return redirected

    # -- the cold tier

    def _looks_into_cold(self) -> bool:
        """Ask the cold tier for the segments that are still missing or, once it has answered, take those that it has.
        Returns False where neither helps."""
        if self._cold is not None:
            return self._take_cold()
        cold, now = self._parts.cold.tier, self._context.now
        if now >= self._deadline or not cold.readable:
            return False
        first = 0 if self._request.independent else self._found.prefix(len(self._keys))
        rows = [row for row in self._rows.values() if row.index >= first and not self._found.has(row.index)]
        if not rows:
            return False
        self._awaited += 1
        deadline = self._deadline

        def heard(found: list[bool] | None) -> None:
            nonlocal deadline
            timer.cancel()
            if deadline != self._deadline or self._state is not _State.LOOKING or self._cold is not None:
                return
            deadline = -1.0
            self._awaited -= 1
            has = (row.index for row, each in zip(rows, found or (), strict=False) if each)
            self._cold = dict.fromkeys(has)
            self._look_on()

        limit_s = min(self._deadline - now, PART_OF_DEADLINE * self._limit_s)
        timer = self._context.after(limit_s, partial(heard, None))
        session = self._process.session
        cold.look(self._tenant, session.slot_bytes, session.shards, [row.key for row in rows], heard)
        return True

    def _take_cold(self) -> bool:
        """Take the segments of the cold tier that no other node has, if that is cheaper than computing them. Returns
        whether there are any."""
        found, cold = self._found, self._cold
        assert cold is not None
        self._cold = {}
        wanted = [index for index in cold if not found.has(index)]
        session = self._process.session
        if not wanted or not self._parts.cold.tier.readable:
            return False
        if not self._parts.cold.pays(PoolId(self._tenant, session.slot_bytes), len(wanted)):
            found.slow = frozenset(wanted)
            return False
        found.cold += wanted
        for index in wanted:
            found.owners[index], found.codes[index] = found.here, _REMOTE
        self._look_on()
        return True

    # -- waiting

    def _waits(self) -> bool:
        """Wait for the first missing segment, if the match may. Returns False if the search is to end."""
        wait = self._wait
        if wait is None:
            return False
        if self._pin_arrived():
            # The keys behind the segments that arrived were not looked up yet.
            self._look_on()
            return True
        gap = self._found.prefix(len(self._keys))
        wait.limit_to(len(self._keys) - gap)
        if not self._may_wait(wait, gap):
            return False
        row = self._rows[gap]
        self._state = _State.WAITING
        if self._found.codes[gap] == _MISSING and self._context.now >= wait.expects_until:
            granted = partial(self._marker_answered, wait, row)
            self._parts.waiting.request_marker(wait, self._tenant, row.key, granted)
        else:
            self._pause(wait, row)
        return True

    def _may_wait(self, wait: Wait, gap: int) -> bool:
        if gap == len(self._keys) or not self._process.alive:
            return False
        code = self._found.codes[gap]
        # Where the directory node did not answer, another lookup helps only if a node may answer it that did not yet.
        hopeless = self._rows[gap].stale or not any(map(self._parts.peers.reachable, self._unanswered))
        return not (code == _UNKNOWN and hopeless) and self._parts.waiting.may_wait(wait, code)

    def _pause(self, wait: Wait, row: _Row) -> None:
        """Wait for a segment, unless too many matches of the tenant wait: then look again when the segment is there, or
        when a node that leased some of the others delivers no segments."""
        if not self._parts.waiting.has_room(self._tenant):
            self._end()
            return
        self.waited = True

        def sound() -> bool:
            return self._process.alive and all(map(self._parts.peers.delivers, self._found.leases))

        def resume(code: Code) -> None:
            if code is Code.MISSING or not self._process.alive:
                self._engine_computes(row, granted=code is Code.MISSING)
            else:
                self._look_again()

        code = self._found.codes[row.index]
        self._parts.waiting.pause(wait, self._tenant, row.key, code, sound, resume)

    def _marker_answered(self, wait: Wait, row: _Row, code: Code) -> None:
        """The directory node was asked for the in-flight marker of the first missing segment. Whoever gets it computes
        the segment, and the others wait."""
        if code is Code.LOCAL:
            # The segment is stored by now.
            self._look_again()
            return
        self._found.codes[row.index] = code
        if code is Code.PENDING:
            self._pause(wait, row)
        elif code is Code.MISSING:
            self._engine_computes(row, granted=True)
        else:
            self._end()

    def _engine_computes(self, row: _Row, *, granted: bool) -> None:
        """End: the engine of the match computes the segment. `granted`: this node has the in-flight marker."""
        if granted and self._wait is not None:
            self._parts.waiting.markers.granted(self._process, row.key, self._wait.in_flight_wait_s)
        self._found.codes[row.index] = _MISSING
        self._end()

    def _look_again(self) -> None:
        """Release the leases at other nodes, and ask again for every key of which this node has no copy. After a wait
        many nodes read the same segments, and their owner may redirect this node to a copy."""
        for node, leases in self._found.leases.items():
            self._parts.peers.tell(node, wire.ReleaseLease(tuple(leases)))
        self._found.forget_remote()
        self._pin_arrived()
        self.begin()

    # -- what changed meanwhile

    def _pin_arrived(self) -> bool:
        """Find and pin the missing segments that arrived at this node since they were last looked up here. Returns
        whether there are any."""
        store, found = self._context.store, self._found
        if self._arrivals == store.arrivals:
            return False
        self._arrivals = store.arrivals
        missing = found.missing()
        arrived = self._context.ready(self._tenant, [self._keys[index] for index in missing])
        for index, segment in zip(missing, arrived, strict=True):
            if segment is not None:
                store.pin(segment)
                found.segments[index] = segment
                found.codes[index] = _LOCAL
        return any(segment is not None for segment in arrived)

    def _leave_out_gone(self) -> None:
        """Count as missing the copies of this node that were dropped for wrong bytes, the segments that left the disk,
        and those of a cold tier that went, while other nodes were asked."""
        found, disk = self._found, self._context.disk
        for index, segment in enumerate(found.segments):
            if segment is not None and segment.state is _GONE:
                found.segments[index] = None
                found.codes[index] = _MISSING
                self._context.store.unpin(segment)
        for index in [at for at in found.disk if disk.find(self._tenant, self._keys[at]) < 0]:
            found.disk.remove(index)
            found.owners[index], found.codes[index] = None, _MISSING
        if found.cold and not self._parts.cold.tier.readable:
            for index in found.cold:
                found.owners[index], found.codes[index] = None, _MISSING
            found.cold = []

    def _report_stale(self) -> None:
        """Tell the directory nodes which of the owners that they named have no copy of the segment, so that they ask
        these owners, and drop the entries if they confirm it."""
        codes = self._found.codes
        stale: dict[tuple[NodeId, NodeId], list[SegmentKey]] = {}
        for row in self._rows.values():
            if row.named is not None and row.stale and codes[row.index] > _REMOTE:
                codes[row.index] = min(codes[row.index], _MISSING)
                stale.setdefault(row.named, []).append(row.key)
        for (directory, owner), keys in stale.items():
            if directory == self._context.node:
                self._parts.directory_node.ask_owner(self._tenant, keys, owner)
            else:
                self._parts.peers.tell(directory, wire.Unfound(self._tenant, join_keys(keys), owner))


def _probes(rows: list[_Row]) -> list[_Row]:
    """Returns the items of `rows` at places 0, 1, 3, 7, 15 and so on. Lookups of these keys alone tell the length of
    the prefix that the pool has to within a factor of two."""
    places = ((1 << power) - 1 for power in range(len(rows).bit_length()))
    return [rows[place] for place in places]
