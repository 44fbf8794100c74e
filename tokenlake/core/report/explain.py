"""How a request used the pool and why segments were missed, for `tokenlake explain`. The record of one request is its
trail.

::

    Match --> trail, in a bounded map --> updated by its fetches and releases
                                               |  ExplainRequested
                                               v
                     history of this node --- key not in it ---> ExplainMissing to its directory node
                                               v
                                           Explained
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from tokenlake.core.cluster.peers import Peers, Reply
from tokenlake.core.context import Context, Part
from tokenlake.core.instructions import Answer
from tokenlake.core.report.account import Account, Lost
from tokenlake.core.report.misses import only_other_layouts, reason_of
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.keys import KEY_BYTES
from tokenlake.memory.removals import CACHED_RULE, Removal
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.funnel import MAX_EXPLAINED_NAMES, Funnel, Missed, MissReason
from tokenlake.wire.slots import join_keys, split_keys

MAX_TRAILS = 1024
"""Maximum number of requests that are remembered for `tokenlake explain`; the oldest are forgotten first."""
MAX_KEYS = 1 << 16
"""Maximum number of keys of missing segments that are remembered for all requests together; the memory of a request's
codes counts as well."""
MAX_MISSING = 1024
"""Maximum number of keys of missing segments that are remembered for one request."""
REPLY_S = 0.1
"""Seconds within which directory nodes must say how missing segments left the pool."""
MAX_NAMES = 3
"""Maximum number of nodes that the explanation of a miss names."""

RemovalReport = tuple[str, str, float, float]
"""How a segment left a node: (rule of eviction, node, seconds since then, seconds that the segment had been unused)."""
Count = tuple[MissReason, str, int]
"""How many tokens were missed for one reason: (reason, detail for the user, number of tokens)."""


@dataclass(eq=False, slots=True)
class Trail:
    """The record of one named request, from its newest match on. Counts are in segments. Every match of a named request
    makes a trail, so a new one takes little memory."""

    at: float
    request: InitVar[engine.Match]
    account: Account
    """The tokens of the match."""
    name: str = field(init=False)
    first: bytes = field(init=False)
    """Key of the first segment of the prompt."""
    match_s: float = 0.0
    fetch_s: float = 0.0
    """`match_s`: seconds from the request to the answer of the match. `fetch_s`: seconds of the slowest fetch of its
    hits; 0 without one."""
    hits: int = 0
    missing: list[SegmentKey] = field(default_factory=list)
    """Keys of the prompt's segments that no node had (code MISSING), at most the first `MAX_MISSING`. `Explain` asks
    directory nodes how these segments left the pool."""
    slow: frozenset[SegmentKey] = frozenset()
    """Those of the `missing` that are in the cold tier and cheaper to compute."""
    elsewhere: dict[NodeId, int] = field(default_factory=dict)
    """Number of hits of the match that are leased at each other node."""
    disks: dict[NodeId, str] = field(default_factory=dict)
    """How the explanation names each node that has hits of the match on its disk."""
    silent: dict[NodeId, None] = field(default_factory=dict)
    """Nodes that did not answer the match or a fetch within the deadline."""
    unconnected: frozenset[NodeId] = frozenset()
    """Those of the `silent` nodes that had no connection to this node at that time."""
    fetched: int = 0
    refused: Code | None = None
    """Code of the latest refusal to give a hit a slot for its fetch, or PENDING where an engine of this node was
    writing the segment; None without one."""

    def __post_init__(self, request: engine.Match) -> None:
        self.name = request.request
        self.first = request.keys[:KEY_BYTES]

    @property
    def charged_keys(self) -> int:
        """Number of keys that this trail counts for `MAX_KEYS`: its missing keys, twice if they are `slow`, and its
        other codes at one key per 32, those of hits three times."""
        return len(self.missing) + len(self.slow) + (len(self.account.beyond.codes) + 3 * self.hits) // KEY_BYTES

    def not_fetched(self, node: NodeId) -> Lost:
        """Why a hit at `node` was given back without being fetched."""
        if node in self.unconnected:
            return MissReason.UNREACHABLE, f"{node} is not connected"
        if node in self.silent:
            return MissReason.TOO_SLOW, f"{node} did not answer"
        if self.refused is Code.PENDING:
            return MissReason.PENDING, "an engine of the reader's node was writing it"
        if self.refused is not None:
            return MissReason.LIMIT, self.refused.name
        return MissReason.SKIPPED, ""

    def place(self, node: NodeId) -> str:
        """How the explanation names the place of hits that were not in memory here."""
        return self.disks.get(node, str(node))

    def did_not_come(self, node: NodeId, *, late: bool, wrong: bool = False, rule: str = "") -> Lost:
        """Why the fetch of a hit from `node`, or from its disk, failed. `late`: it missed the deadline. `wrong`: its
        bytes had a wrong checksum. `rule`: how it left this node, if that is known."""
        place = self.place(node)
        if wrong:
            return MissReason.LOST, f"{place} sent wrong bytes"
        if late:
            return MissReason.TOO_SLOW, f"{place} did not send it in time"
        return MissReason.LOST, f"{place} did not have it any more" + (f": {rule}" if rule else "")


def _alone(first: Iterable[bytes]) -> int:
    """How many requests begin with a segment that no other one has. `first`: the key of the first segment of each."""
    return sum(count == 1 for count in Counter(first).values())


class RecentRequest(NamedTuple):
    """One of the newest requests of this node, in short."""

    tenant: TenantId
    name: str
    age_s: float
    first: bytes
    """Key of the first segment of the prompt; empty where it has none."""
    asked: int
    supplied: int
    engine_had: int
    """`asked`: tokens of the prompt. `supplied`: those of them that the engine read from the pool. `engine_had`: those
    that its own cache had."""
    match_s: float
    fetch_s: float
    """`match_s`, `fetch_s`: as in `Trail`."""


class _Question(NamedTuple):
    """A request for an explanation (`engine.Explain`) that waits for answers of directory nodes."""

    connection: int
    number: int
    tenant: TenantId
    trail: Trail
    removals: dict[SegmentKey, RemovalReport]
    """For each missing segment of which a node remembers it, by key: how the segment left the pool."""
    silent: dict[NodeId, None]
    """Directory nodes that did not answer in time."""


class _Weights:
    """The tokens of the segments of a request that are no hits, without those that the engine had."""

    def __init__(self, trail: Trail) -> None:
        account = trail.account
        first, end, self._had = account.missed_part()
        self._short = account.short(account.beyond.places) if first < end else 0
        codes = account.beyond.codes
        self.codes = codes[first:end]
        """The `Code` of each segment with tokens that count."""
        self.missing = trail.missing[codes.count(Code.MISSING, 0, first) : codes.count(Code.MISSING, 0, end)]
        """The keys of those with the code MISSING; they may be fewer."""
        self._size = account.size

    def of_code(self, code: int) -> int:
        """Number of tokens of the segments with this code."""
        tokens = self.codes.count(code) * self._size
        if tokens:
            tokens -= self._had if self.codes[0] == code else 0
            tokens -= self._short if self.codes[-1] == code else 0
        return tokens

    def of_keys(self, keys: Sequence[SegmentKey]) -> int:
        """Number of tokens of some of the `missing` segments."""
        tokens = len(keys) * self._size
        if keys:
            tokens -= self._had if self.codes[0] == Code.MISSING and self.missing[0] in keys else 0
            listed = self.codes.count(Code.MISSING) == len(self.missing)
            tokens -= self._short if listed and self.codes[-1] == Code.MISSING and self.missing[-1] in keys else 0
        return tokens


class Explain(Part):
    """Remembers how named requests used the pool, by tenant and name, and answers `tokenlake explain`."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._trails: OrderedDict[tuple[TenantId, str], Trail] = OrderedDict()
        self._keys = 0

    def begin(self, tenant: TenantId, trail: Trail, keys: Sequence[SegmentKey]) -> None:
        """Remember a named request. `trail`: the record of its match, which replaces an earlier record of the same
        name. `keys`: those of the segments that are no hits."""
        missing = Code.MISSING
        for key, code in zip(keys, trail.account.beyond.codes, strict=True):
            if code == missing:
                trail.missing.append(key)
                if len(trail.missing) == MAX_MISSING:
                    break
        earlier = self._trails.pop((tenant, trail.name), None)
        self._trails[tenant, trail.name] = trail
        self._keys += trail.charged_keys - (earlier.charged_keys if earlier is not None else 0)
        while len(self._trails) > MAX_TRAILS or self._keys > MAX_KEYS:
            _, oldest = self._trails.popitem(last=False)
            self._keys -= oldest.charged_keys

    def account(self, tenant: TenantId, name: str) -> Account | None:
        """The tokens of the newest match of the request with exactly this name."""
        trail = self._trails.get((tenant, name))
        return None if trail is None else trail.account

    def recent(self) -> list[RecentRequest]:
        """The newest requests, at most `MAX_TRAILS`, the oldest first."""
        now = self._context.now
        sums = ((tenant, name, each, each.account.sums()) for (tenant, name), each in self._trails.items())
        return [
            RecentRequest(
                tenant,
                name,
                max(0.0, now - each.at),
                each.first,
                tokens.asked,
                tokens.supplied.total(),
                tokens.engine_had,
                each.match_s,
                each.fetch_s,
            )
            for tenant, name, each, tokens in sums
        ]

    # -- requests

    def asked(self, connection: int, tenant: TenantId, message: engine.Explain) -> None:
        """Answer a process that asks how a request used the pool, when the directory nodes of all missing segments have
        replied, or after `REPLY_S`."""
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
            gone = self._context.removals.get(tenant, key)
            if gone is not None:
                question.removals[key] = self._removal(gone)
            if gone is None or gone.rule == CACHED_RULE:
                # Only a cached copy left this node; the directory node may know why the primary copy left the pool.
                unknown.append(key)
        directory_nodes = dict(self._peers.by_directory_node(unknown))
        directory_nodes.pop(self._context.node, None)
        waiting = len(directory_nodes)

        def heard(directory_node: NodeId, keys: list[SegmentKey], reply: Reply | None) -> None:
            nonlocal waiting
            waiting -= 1
            if not isinstance(reply, peer.ExplainMissingReply):
                question.silent[directory_node] = None
            else:
                for key, rule, node, ago in zip(keys, reply.rules, reply.nodes, reply.ago_s, strict=True):
                    if rule:
                        question.removals[key] = rule, node, ago, 0.0
            if not waiting:
                self._answer(question)

        for directory_node, keys in directory_nodes.items():
            make = partial(peer.ExplainMissing, tenant=tenant, keys=join_keys(keys))
            self._peers.call(directory_node, make, REPLY_S, partial(heard, directory_node, keys), proves_life=False)
        if not directory_nodes:
            self._answer(question)

    def _matching(self, tenant: TenantId, prefix: str) -> tuple[str, ...]:
        """Returns the names of the tenant's requests that begin with `prefix`, the newest first."""
        found = (name for owner, name in reversed(self._trails) if owner == tenant and name.startswith(prefix))
        return tuple(islice(found, MAX_EXPLAINED_NAMES))

    def _removal(self, gone: Removal) -> RemovalReport:
        return gone.rule, gone.node or self._context.node, self._context.since(gone.at), gone.unused_s

    def ask(self, node: NodeId, message: peer.ExplainMissing) -> None:
        """Answer another node that asks how missing segments, whose directory node is this one, left the pool."""
        tenant = TenantId(message.tenant)
        gone = [self._context.removals.get(tenant, key) for key in split_keys(message.keys)]
        removals = [("", "", 0.0, 0.0) if each is None else self._removal(each) for each in gone]
        rules, nodes = tuple(each[0] for each in removals), tuple(each[1] for each in removals)
        ago_s = tuple(each[2] for each in removals)
        self._peers.tell(node, peer.ExplainMissingReply(message.call, rules, nodes, ago_s))

    def gone(self, node: NodeId, tenant: TenantId, keys: Iterable[SegmentKey], message: peer.Evicted) -> None:
        """Record the rule by which segments, whose directory node is this one, left `node`."""
        if message.rule:
            for key in keys:
                self._context.removals.add(tenant, key, self._context.now, message.rule, node)

    # -- answers

    def _answer(self, question: _Question) -> None:
        trail, size = question.trail, question.trail.account.size
        sums, weights = trail.account.sums(), _Weights(trail)
        missing, leaves_at = self._missing(question, weights)
        missed = [*self._not_usable(question, weights), *missing]
        missed += [(*lost, tokens) for lost, tokens in sums.lost.items()]
        missed.append((trail.account.not_asked[0], "", trail.account.not_asked[1]))
        reasons = [Missed(reason, tokens, detail) for reason, detail, tokens in missed if tokens]
        first = [each.first for (owner, _), each in self._trails.items() if owner == question.tenant and each.first]
        funnel = Funnel(
            trail.name,
            self._context.node,
            max(0.0, self._context.now - trail.at),
            size,
            sums.asked,
            (trail.hits - sum(trail.elsewhere.values())) * size,
            tuple((trail.place(node), count * size) for node, count in sorted(trail.elsewhere.items())),
            trail.fetched * size,
            sums.supplied.total(),
            sums.held,
            tuple(reasons),
            sums.engine_had,
            leaves_at,
            len(first),
            _alone(first),
        )
        self._context.emit(Answer(question.connection, engine.Explained(question.number, funnel)))

    def _not_usable(self, question: _Question, weights: _Weights) -> list[Count]:
        """Returns why segments behind the hits were not used although they are not missing, from their codes."""
        beyond, unconnected = question.trail.account.beyond, question.trail.unconnected
        silent = _names(node for node in question.trail.silent if node not in unconnected)
        reasons: Counter[tuple[MissReason, str]] = Counter()
        for number in sorted(set(weights.codes) - {Code.MISSING}):
            detail = ""
            reason = reason_of(number, beyond.codes[0], beyond.unknown)
            if reason is MissReason.TOO_SLOW and number == Code.DEFERRED:
                detail = "its owner was sending it to other nodes"
            elif reason is MissReason.TOO_SLOW:
                detail = f"no answer from {silent}"
            elif reason is MissReason.UNREACHABLE:
                detail = f"no connection with {_names(sorted(unconnected))}"
            elif reason is MissReason.LIMIT:
                detail = Code(number if number not in (Code.LOCAL, Code.REMOTE) else beyond.codes[0]).name
            reasons[reason, detail] += weights.of_code(number)
        return [(*reason, tokens) for reason, tokens in reasons.items()]

    def _missing(self, question: _Question, weights: _Weights) -> tuple[list[Count], int | None]:
        """Returns why segments are missing: how they were removed, where a node remembers that, or else the likely
        reason; and the first token of those that no node knows."""
        trail, removals = question.trail, question.removals
        reasons: list[Count] = []
        by_rule: dict[tuple[str, str], list[SegmentKey]] = {}
        slow = [key for key in weights.missing if key in trail.slow]
        if slow:
            reasons.append((MissReason.SKIPPED, "computing it was faster than the cold tier", weights.of_keys(slow)))
        missing = [key for key in weights.missing if key not in trail.slow]
        for key in missing:
            if key in removals:
                by_rule.setdefault(removals[key][:2], []).append(key)
        for (rule, node), keys in by_rule.items():
            detail = f"{rule}, at {node} {_span([removals[key][2] for key in keys])} ago"
            if any(removals[key][3] for key in keys):
                detail += f", unused for {_span([removals[key][3] for key in keys])}"
            reasons.append((MissReason.EVICTED, detail, weights.of_keys(keys)))
        unknown = [key for key in missing if key not in removals]
        by_node = dict(self._peers.by_directory_node(unknown))
        silent = {node: by_node.pop(node) for node in question.silent if node in by_node}
        if by_node:
            other = only_other_layouts(self._context.store, question.tenant, trail.account.slot_bytes)
            reason = MissReason.OTHER_LAYOUT if other else MissReason.NEVER_STORED
            reasons.append((reason, f"not known to {_names(by_node)}", sum(map(weights.of_keys, by_node.values()))))
        if silent:
            tokens = sum(map(weights.of_keys, silent.values()))
            reasons.append((MissReason.UNKNOWN, f"no answer from {_names(silent)}", tokens))
        unlisted = weights.of_code(Code.MISSING) - weights.of_keys(weights.missing)
        if unlisted:
            reasons.append((MissReason.UNKNOWN, f"behind the first {len(trail.missing)}", unlisted))
        strange = {key for keys in by_node.values() for key in keys}
        beyond = trail.account.beyond
        places = (place for place, code in zip(beyond.places, beyond.codes, strict=True) if code == Code.MISSING)
        known_to = next((place for key, place in zip(trail.missing, places, strict=False) if key in strange), None)
        return reasons, None if known_to is None else known_to * trail.account.size

    def census(self) -> dict[str, int]:
        return {
            "explained requests": len(self._trails),
            "segments they missed": self._keys,
            "segments that went": len(self._context.removals),
        }

    def check_integrity(self) -> None:
        assert self._keys == sum(trail.charged_keys for trail in self._trails.values())


def _names(nodes: Iterable[NodeId]) -> str:
    names = [str(node) for node in nodes]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _span(seconds: Sequence[float]) -> str:
    least, most = f"{min(seconds):.0f}", f"{max(seconds):.0f}"
    return f"{least} s" if least == most else f"{least} to {most} s"
