"""Asking other nodes, and this node's own directory, for what a match misses.

::

    Lookup to both candidates of every missing key, in parallel (of many nodes, to those of some keys first: `probing`);
    where it is hot to one copy, and to its candidates if that one is silent or has it no more
       |
       v
    own directory: what nobody was found to have
       |  a directory node names another node, or who has it names one that many should rather read
       v
    Lookup there (same deadline)

A lease exists only where the slot is, so whoever holds the bytes leases them while answering.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.match_under_way import MatchUnderWay
from tokenlake.core.peers import Peers, Reply
from tokenlake.core.pendings import Pendings
from tokenlake.core.probing import MANY_NODES, behind, probes
from tokenlake.core.replicas import Replicas
from tokenlake.core.replication import Replication
from tokenlake.identity import NodeId, TenantId
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys

__all__ = ["Rounds"]

OWN_SHARE = 0.25
"""Of a match's deadline: so long the own directory waits for the first answer of another node, and what was found
for the answer of whoever is to be asked rather."""
_DIRECTORY_ANSWERS = (Code.PENDING, Code.MISSING, Code.UNKNOWN)
"""What a lookup says of a key that is neither leased nor elsewhere."""
_NOT_THERE = (Code.PENDING, Code.MISSING, Code.ELSEWHERE)
"""What it says of a key of which there is no copy."""
# Looked up once: each access to a member of an enum costs Python 3.11 some 100 ns, and there is one per key.
_LOCAL, _REMOTE, _MISSING, _UNKNOWN, _ELSEWHERE = Code.LOCAL, Code.REMOTE, Code.MISSING, Code.UNKNOWN, Code.ELSEWHERE
_DEFERRED = Code.DEFERRED


class Rounds:
    """Of all matches. `ended` is called when everybody who was asked for one has answered, or is not waited for."""

    def __init__(
        self,
        context: Context,
        peers: Peers,
        directory_node: DirectoryNode,
        replicas: Replicas,
        replication: Replication,
        pendings: Pendings,
        ended: Callable[[MatchUnderWay], None],
    ) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._replicas = replicas
        self._replication = replication
        self._pendings = pendings
        self._ended = ended

    def begin(self, match: MatchUnderWay, indices: list[int]) -> None:
        """Ask about these keys, or first about some of them (`more`)."""
        match.deadline = self._context.now + self._limit_s(match)
        many = len(self._context.ring.members) >= MANY_NODES
        self._ask_about(match, probes(match, indices) if many else indices)

    def more(self, match: MatchUnderWay) -> bool:
        """Ask about those that were left for later, as far as they matter; False when that is nothing, or there is no
        time left: all rounds have one deadline, which is also that of the engine."""
        wanted = behind(match)
        if wanted and self._context.now < match.deadline:
            self._ask_about(match, wanted)
            return True
        for index in wanted:
            match.codes[index] = _UNKNOWN
        return False

    def _ask_about(self, match: MatchUnderWay, indices: list[int]) -> None:
        session, planned = match.process.session, match.request.planned
        match.hot = self._replicas.choose(session.tenant, match.keys, indices, session.slot_bytes, planned=planned)
        self._round(match, indices)

    def _limit_s(self, match: MatchUnderWay) -> float:
        """How long all rounds may take."""
        limit = self._context.config.match_deadline_s
        return min(limit, match.request.deadline_s) if match.request.deadline_s > 0 else limit

    def _round(self, match: MatchUnderWay, indices: list[int]) -> None:
        wanted: defaultdict[NodeId, list[int]] = defaultdict(list)
        for index in indices:
            directory_node, other = match.candidates[index]
            match.codes[index] = _UNKNOWN
            if index in match.hot:
                wanted[match.hot[index]].append(index)
                continue
            wanted[directory_node].append(index)
            if other != directory_node:
                wanted[other].append(index)
        match.own = wanted.pop(self._context.node, [])
        match.round, match.asking = wanted, True
        if wanted:
            # Mostly those who are asked have everything, and there is nothing left to look up here.
            self._context.after(OWN_SHARE * self._limit_s(match), lambda: self._ask_own(match, wanted))
            self._send(match, wanted)
        else:
            self._ask_own(match, wanted)

    def _ask_own(self, match: MatchUnderWay, asked: dict[NodeId, list[int]]) -> None:
        """Look up in this node's own directory what nobody was found to have yet, unless that was done. Of copies that
        were `asked` first and are still silent the candidates are asked, and nobody waits for what else they say."""
        if not match.asking or match.round is not asked:
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
        self._replication.missed(match.process.session.tenant, len(indices), absent, node)

    def _add_own(self, match: MatchUnderWay, wanted: dict[NodeId, list[int]]) -> None:
        own, match.own = match.own, []
        self._ask_here(match, [index for index in own if match.remotes[index] is None], wanted)

    def _ask_here(self, match: MatchUnderWay, indices: list[int], wanted: dict[NodeId, list[int]]) -> None:
        """This node's own directory answers on the spot; whom it names is added to those to be asked."""
        if not indices:
            return
        node, codes = self._context.node, match.codes
        answers = self._directory_node.ask(match.process.session.tenant, [match.keys[index] for index in indices])
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
        """Ask the `node` that a directory node named, unless it was asked."""
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
            self._ended(match)

    def _heard(self, match: MatchUnderWay, node: NodeId, indices: list[int], reply: Reply | None) -> None:
        """One node answered, or will not. Then the second round, or the end."""
        if not match.asking:
            # It was given up.
            if isinstance(reply, wire.LookupReply) and reply.lease:
                self._peers.tell(node, wire.ReleaseLease((reply.lease,)))
            return
        if not any(given_up is indices for given_up in match.given_up):
            match.waiting -= 1
        second: dict[NodeId, list[int]] = {}
        denied: list[int] = []
        if reply is None:
            match.silent.append(node)
        if isinstance(reply, wire.LookupReply) and len(reply.codes) == len(indices) >= reply.known:
            if reply.known:
                match.known_accesses.append((indices[reply.known - 1], reply.last_access, reply.last_access_age_s))
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
            self._ended(match)

    def _take(
        self,
        match: MatchUnderWay,
        node: NodeId,
        indices: list[int],
        reply: wire.LookupReply,
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
            elif code == _DEFERRED:
                codes[index] = min(codes[index], Code.PENDING)
            elif code in _DIRECTORY_ANSWERS and code < codes[index]:
                codes[index] = code
        rather = NodeId(reply.redirect)
        # A candidate was asked, and has answered or will.
        for index in indices if self._peers.usable(rather) else ():
            if remotes[index] == node and rather not in match.candidates[index] and (index, rather) not in match.asked:
                match.asked.add((index, rather))
                match.rather[index] = rather
                second.setdefault(rather, []).append(index)


def _lookup(call: int, *, tenant: TenantId, keys: bytes, request: str, patient: bool) -> wire.Lookup:
    return wire.Lookup(call, tenant, keys, request, patient=patient)
