"""What became of a request, for whoever asks later: `tokenlake explain`.

::

    Match --> trail, in a ring --> what is fetched, given back, lost
                                        |  Asked
                                        v
                   history of this node --- not there ---> AskWhy to the directory nodes of what was missing
                                        v
                                     Explained
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from tokenlake.core.context import Context
from tokenlake.core.instructions import Answer
from tokenlake.core.peers import Peers, Reply
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.keys import KEY_BYTES
from tokenlake.store.history import CACHED_RULE, Gone
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.funnel import MAX_EXPLAINED_NAMES, Funnel, Missed, Why
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["Explain", "Trail"]

MAX_TRAILS = 1024
"""Requests that are remembered; the oldest are forgotten first."""
MAX_KEYS = 1 << 16
"""Missing segments of all of them that are remembered by name, and what else takes as much memory as a key."""
MISSING_EACH = 1024
"""Of one of them."""
WHY_S = 0.1
"""A directory node that does not say within this what became of a segment does not know."""
NAMES = 3
"""Nodes that a reason lists."""


class Trail:
    """One request with a name, from its newest match on. In segments, but for `tokens`. One is made for each match, so
    it begins with next to nothing."""

    __slots__ = (
        "at",
        "beyond",
        "elsewhere",
        "fetched",
        "hits",
        "lost",
        "missing",
        "name",
        "refused",
        "segment_tokens",
        "silent",
        "skipped",
        "slot_bytes",
        "tokens",
        "unconnected",
        "useful",
    )

    def __init__(self, at: float, request: engine.Match, segment_tokens: int, slot_bytes: int) -> None:
        self.at = at
        self.name = request.request
        self.tokens = request.tokens
        """Of the prompt; 0 when it was not said."""
        self.segment_tokens = segment_tokens
        self.slot_bytes = slot_bytes
        self.hits = 0
        self.beyond = b""
        """The codes of what is behind the hits."""
        self.missing: list[SegmentKey] = []
        """Of these, the first that nobody was found to have."""
        self.elsewhere: dict[NodeId, int] = {}
        """Hits by the node that had them."""
        self.silent: dict[NodeId, None] = {}
        """Nodes that did not answer in time."""
        self.unconnected: frozenset[NodeId] = frozenset()
        """Of these, the nodes that were not connected when they were needed."""
        self.fetched = self.useful = self.skipped = 0
        self.lost: dict[tuple[Why, str], int] = {}
        """Hits that did not come, by reason and detail."""
        self.refused: Code | None = None
        """Why some that were asked for could not come."""

    @property
    def keys(self) -> int:
        """Its share of `MAX_KEYS`."""
        return len(self.missing) + len(self.beyond) // KEY_BYTES

    def given_back(self, read: int, shipped: int, unfetched: Iterable[NodeId | None]) -> None:
        """Nobody holds these any more: what was here, what was attended to where it lay, and the owners of the
        rest."""
        self.useful += read + shipped
        for node in unfetched:
            if node in self.unconnected:
                self._lose(Why.UNREACHABLE, f"{node} is not connected")
            elif node in self.silent:
                self._lose(Why.TOO_SLOW, f"{node} did not answer")
            elif node is not None:
                self.skipped += 1

    def did_not_come(self, node: NodeId, *, late: bool, wrong: bool = False) -> None:
        """A hit at `node` was to be fetched, and was not. `wrong`: its bytes were wrong on arrival."""
        if wrong:
            self._lose(Why.LOST, f"{node} sent wrong bytes")
        elif late:
            self._lose(Why.TOO_SLOW, f"{node} did not send it in time")
        else:
            self._lose(Why.LOST, f"{node} did not have it any more")

    def _lose(self, why: Why, detail: str) -> None:
        self.lost[why, detail] = self.lost.get((why, detail), 0) + 1


class _Question(NamedTuple):
    """An `Explain` under way."""

    connection: int
    number: int
    tenant: TenantId
    trail: Trail
    found: dict[SegmentKey, tuple[str, str, float, float]]
    """(rule, node, seconds ago, seconds unused) of what is known to have left."""
    silent: dict[NodeId, None]
    """Homes that did not say."""


class Explain:
    """Trails by tenant and name."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._trails: OrderedDict[tuple[TenantId, str], Trail] = OrderedDict()
        self._keys = 0

    def begin(self, tenant: TenantId, trail: Trail, codes: bytes, keys: Sequence[SegmentKey]) -> None:
        """A match was answered with `codes`; `trail` has its hits. Takes the place of an earlier one of that name."""
        if trail.silent:
            trail.unconnected = frozenset(node for node in trail.silent if not self._peers.connected(node))
        trail.beyond = codes[trail.hits :]
        missing = Code.MISSING
        for key, code in zip(keys[trail.hits :], trail.beyond, strict=True):
            if code == missing:
                trail.missing.append(key)
                if len(trail.missing) == MISSING_EACH:
                    break
        previous_owner = self._trails.pop((tenant, trail.name), None)
        self._trails[tenant, trail.name] = trail
        self._keys += trail.keys - (previous_owner.keys if previous_owner is not None else 0)
        while len(self._trails) > MAX_TRAILS or self._keys > MAX_KEYS:
            _, oldest = self._trails.popitem(last=False)
            self._keys -= oldest.keys

    # -- questions

    def asked(self, connection: int, tenant: TenantId, message: engine.Explain) -> None:
        """Answered when all directory nodes said what became of what was missing, after `WHY_S` at the latest."""
        trail = self._trails.get((tenant, message.request)) if message.request else None
        if trail is None:
            names = self._matching(tenant, message.request)
            if len(names) != 1 or not message.request:
                self._context.emit(Answer(connection, engine.Explained(message.id, None, names)))
                return
            trail = self._trails[tenant, names[0]]
        question = _Question(connection, message.id, tenant, trail, {}, {})
        unknown = []
        for key in trail.missing:
            gone = self._context.history.get(tenant, key)
            if gone is not None:
                question.found[key] = self._told(gone)
            if gone is None or gone.rule == CACHED_RULE:
                # That its primary copy went as well says more.
                unknown.append(key)
        directory_nodes = dict(self._context.by_directory_node(unknown))
        directory_nodes.pop(self._context.node, None)
        waiting = len(directory_nodes)

        def heard(directory_node: NodeId, keys: list[SegmentKey], reply: Reply | None) -> None:
            nonlocal waiting
            waiting -= 1
            told = (reply.rules, reply.nodes, reply.ago_s) if isinstance(reply, peer.ToldWhy) else ()
            if [len(each) for each in told] != 3 * [len(keys)]:
                question.silent[directory_node] = None
            else:
                for key, (rule, node, ago) in zip(keys, zip(*told, strict=True), strict=True):
                    if rule:
                        question.found[key] = rule, node, ago, 0.0
            if not waiting:
                self._answer(question)

        for directory_node, keys in directory_nodes.items():
            ask = partial(_ask_why, tenant=tenant, keys=join_keys(keys))
            self._peers.call(directory_node, ask, WHY_S, partial(heard, directory_node, keys), proves_life=False)
        if not directory_nodes:
            self._answer(question)

    def _matching(self, tenant: TenantId, prefix: str) -> tuple[str, ...]:
        """Names of the tenant's requests that begin with `prefix`, newest first."""
        found = (name for owner, name in reversed(self._trails) if owner == tenant and name.startswith(prefix))
        return tuple(islice(found, MAX_EXPLAINED_NAMES))

    def _told(self, gone: Gone) -> tuple[str, str, float, float]:
        return gone.rule, gone.node or self._context.node, self._context.since(gone.at), gone.unused_s

    def ask(self, node: NodeId, message: peer.AskWhy) -> None:
        """Another node misses segments of which this one is the home."""
        tenant = TenantId(message.tenant)
        gone = [self._context.history.get(tenant, key) for key in split_keys(message.keys)]
        told = [("", "", 0.0, 0.0) if each is None else self._told(each) for each in gone]
        rules, nodes, ago_s = tuple(t[0] for t in told), tuple(t[1] for t in told), tuple(t[2] for t in told)
        self._peers.tell(node, peer.ToldWhy(message.call, rules, nodes, ago_s))

    def gone(self, tenant: TenantId, keys: Iterable[SegmentKey], message: peer.Evicted) -> None:
        """A node told this one, their directory node, by which rule these left it."""
        if message.rule:
            for key in keys:
                self._context.history.add(tenant, key, Gone(self._context.now, message.rule, message.node))

    # -- answers

    def _answer(self, question: _Question) -> None:
        trail, size = question.trail, question.trail.segment_tokens
        asked = trail.hits + len(trail.beyond)
        missed = self._beyond(question)
        missed += [(*reason, count) for reason, count in trail.lost.items()]
        if trail.skipped:
            why, detail = (Why.SKIPPED, "") if trail.refused is None else (Why.LIMIT, trail.refused.name)
            missed.append((why, detail, trail.skipped))
        ended = trail.useful + trail.skipped + sum(trail.lost.values())
        reasons = [Missed(why, count * size, detail) for why, detail, count in missed]
        ideal = max(trail.tokens, asked * size)
        if ideal > asked * size:
            reasons.append(Missed(Why.TOO_SHORT, ideal - asked * size))
        funnel = Funnel(
            trail.name,
            self._context.node,
            max(0.0, self._context.now - trail.at),
            size,
            ideal,
            (trail.hits - sum(trail.elsewhere.values())) * size,
            tuple((str(node), count * size) for node, count in sorted(trail.elsewhere.items())),
            trail.fetched * size,
            trail.useful * size,
            max(0, trail.hits - ended) * size,
            tuple(reasons),
        )
        self._context.emit(Answer(question.connection, engine.Explained(question.number, funnel)))

    def _beyond(self, question: _Question) -> list[tuple[Why, str, int]]:
        """(why, detail, segments) of what is behind the hits."""
        codes = Counter(question.trail.beyond)
        missing = codes.pop(Code.MISSING, 0)
        unconnected = question.trail.unconnected
        silent = _names(node for node in question.trail.silent if node not in unconnected)
        no_answer = (
            (Why.TOO_SLOW, f"no answer from {silent}")
            if silent
            else (Why.UNREACHABLE, f"no connection with {_names(sorted(unconnected))}")
            if unconnected
            else (Why.UNKNOWN, "")
        )
        reasons: Counter[tuple[Why, str]] = Counter()
        for number, count in sorted(codes.items()):
            code = Code(number)
            if code in (Code.LOCAL, Code.REMOTE):
                reasons[Why.BEHIND_A_GAP, ""] += count
            elif code is Code.PENDING:
                reasons[Why.PENDING, ""] += count
            elif code is Code.UNKNOWN:
                reasons[no_answer] += count
            else:
                reasons[Why.LIMIT, code.name] += count
        found = [(*reason, count) for reason, count in reasons.items()]
        return found + self._evicted(question) + self._unknown(question, missing)

    def _evicted(self, question: _Question) -> list[tuple[Why, str, int]]:
        by_rule: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for rule, node, ago, unused in question.found.values():
            by_rule.setdefault((rule, node), []).append((ago, unused))
        evicted = []
        for (rule, node), times in by_rule.items():
            detail = f"{rule}, at {node} {_span([ago for ago, _ in times])} ago"
            if any(unused for _, unused in times):
                detail += f", unused for {_span([unused for _, unused in times])}"
            evicted.append((Why.EVICTED, detail, len(times)))
        return evicted

    def _unknown(self, question: _Question, missing: int) -> list[tuple[Why, str, int]]:
        """What nobody remembers, of so many that are missing."""
        trail = question.trail
        keys = [key for key in trail.missing if key not in question.found]
        directory_nodes: dict[NodeId, int] = {
            directory_node: len(its_keys) for directory_node, its_keys in self._context.by_directory_node(keys).items()
        }
        silent = {
            directory_node: directory_nodes.pop(directory_node)
            for directory_node in question.silent
            if directory_node in directory_nodes
        }
        pools = {pool.slot_bytes: pool for pool in self._context.store.pools() if pool.tenant == question.tenant}
        mine = pools.pop(trail.slot_bytes, None)
        other_layout = (mine is None or not any(mine.counts)) and any(any(pool.counts) for pool in pools.values())
        reasons: list[tuple[Why, str, int]] = []
        if directory_nodes:
            detail = f"not known to {_names(directory_nodes)}"
            reasons.append(
                (Why.OTHER_LAYOUT if other_layout else Why.NEVER_STORED, detail, sum(directory_nodes.values()))
            )
        if silent:
            reasons.append((Why.UNKNOWN, f"no answer from {_names(silent)}", sum(silent.values())))
        if missing > len(trail.missing):
            reasons.append((Why.UNKNOWN, f"behind the first {len(trail.missing)}", missing - len(trail.missing)))
        return reasons

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {
            "explained requests": len(self._trails),
            "segments they missed": self._keys,
            "segments that went": len(self._context.history),
        }

    def check_integrity(self) -> None:
        """AssertionError when the count of keys is wrong."""
        assert self._keys == sum(trail.keys for trail in self._trails.values())


def _ask_why(call: int, *, tenant: TenantId, keys: bytes) -> peer.AskWhy:
    return peer.AskWhy(call, tenant, keys)


def _names(nodes: Iterable[NodeId]) -> str:
    names = [str(node) for node in nodes]
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more


def _span(seconds: Sequence[float]) -> str:
    least, most = f"{min(seconds):.0f}", f"{max(seconds):.0f}"
    return f"{least} s" if least == most else f"{least} to {most} s"
