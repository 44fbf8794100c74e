"""Why tokens of requests were not found in the pool, or not used: the reason per segment, counted by tenant.

A token that engines asked for is counted once (`account`): as supplied, as one that the engine had, or as missed for
one reason. `explain` gives the same reasons for one request. It asks the directory nodes about each missing segment;
here the answers to the match's own lookups must be enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenlake.core.cluster.peers import Peers
from tokenlake.identity import NodeId, TenantId
from tokenlake.memory import SegmentStore
from tokenlake.metrics import Counters, Metric
from tokenlake.wire import Code
from tokenlake.wire.funnel import MissReason

MISSED = Metric(
    "tokenlake_missed_tokens_total",
    "Tokens that engines asked for and that were not found, or not used, by reason. `cause`: for tokens behind a gap "
    "the reason of the gap, otherwise the reason",
    "tenant",
    "reason",
    "cause",
)
GAPS = (
    MissReason.NEVER_STORED,
    MissReason.EVICTED,
    MissReason.OTHER_LAYOUT,
    MissReason.PENDING,
    MissReason.TOO_SLOW,
    MissReason.UNREACHABLE,
    MissReason.UNKNOWN,
    MissReason.SKIPPED,
)
"""The reasons that the first segment of a gap can have."""
_FOUND = (Code.LOCAL, Code.REMOTE)
# Constants, because each access to a member of an enum takes Python 3.11 some 100 ns.
_MISSING, _UNKNOWN = Code.MISSING, Code.UNKNOWN
_NEVER_STORED, _OTHER_LAYOUT, _EVICTED = MissReason.NEVER_STORED, MissReason.OTHER_LAYOUT, MissReason.EVICTED
_NOT_KNOWN = MissReason.UNKNOWN


class UnheardNodes(NamedTuple):
    """The nodes because of which a match does not know where segments are."""

    silent: dict[NodeId, None]
    """Nodes that did not answer in time, those in `unconnected` included."""
    unconnected: frozenset[NodeId]
    """Those of them that were not connected."""

    @property
    def reason(self) -> MissReason:
        """The reason of a miss with the code UNKNOWN."""
        if not self.silent:
            return _NOT_KNOWN
        if len(self.silent) > len(self.unconnected):
            return MissReason.TOO_SLOW
        return MissReason.UNREACHABLE


NO_NODES = UnheardNodes({}, frozenset())


class Beyond(NamedTuple):
    """The segments of a match that are no hits."""

    codes: bytes = b""
    """One `Code` each."""
    places: Sequence[int] = ()
    """Index of the key of each, ascending."""
    known: int = 0
    """How many of them, from the first on, were accessed before."""
    unknown: MissReason = MissReason.UNKNOWN
    """The reason for segments with the code UNKNOWN."""
    other_layout: bool = False
    """The tenant has only segments of other layouts on this node."""
    slow: frozenset[int] = frozenset()
    """Indices of the keys of those MISSING that are in the cold tier and cheaper to compute."""

    def reason_at(self, at: int) -> MissReason:
        """The reason why the segment at index `at` of them is no hit."""
        code = self.codes[at]
        if code != _MISSING:
            return reason_of(code, self.codes[0], self.unknown)
        if self.slow and self.places[at] in self.slow:
            return MissReason.SKIPPED
        return _EVICTED if at < self.known else self.new

    @property
    def new(self) -> MissReason:
        """The reason for segments that were never accessed."""
        return _OTHER_LAYOUT if self.other_layout else _NEVER_STORED


def unheard_nodes(peers: Peers, silent: tuple[NodeId, ...], beyond: bytes) -> UnheardNodes:
    """Returns the nodes that may be the reason why segments are UNKNOWN; none if no segment is. `silent`: the nodes
    that did not answer a lookup. If there are none, a directory node answered UNKNOWN because it cannot call an owner,
    and each peer that this node cannot call may be that owner. `beyond`: the codes of the segments that are no hits."""
    nodes = dict.fromkeys(silent)
    if not nodes and _UNKNOWN in beyond:
        nodes = {peer.node: None for peer in peers if not peer.usable}
    return UnheardNodes(nodes, frozenset(node for node in nodes if not peers.connected(node))) if nodes else NO_NODES


def reason_of(code: int, first: int, unknown: MissReason) -> MissReason:
    """Returns the reason why a segment with this code, which is not MISSING, is no hit. `first`: the code of the first
    segment of the prompt that is no hit. `unknown`: the reason for the code UNKNOWN."""
    if code in _FOUND:
        return MissReason.LIMIT if first == Code.SESSION_LIMIT else MissReason.BEHIND_A_GAP
    if code == Code.PENDING:
        return MissReason.PENDING
    if code == Code.DEFERRED:
        return MissReason.TOO_SLOW
    return unknown if code == Code.UNKNOWN else MissReason.LIMIT


def count_missed(
    counters: Counters, tenant: TenantId, reason: MissReason, tokens: int, cause: MissReason | None = None
) -> None:
    """Count tokens that were missed for a reason. `cause`: the reason of the gap before them."""
    # Plain strings: the hash of an enum's member runs Python code.
    text = str(reason)
    counters.add_for(MISSED, tokens, tenant, text, text if cause is None else str(cause))


def begin_tenant(counters: Counters, tenant: TenantId) -> None:
    """Let all series of the tenant exist from now on: Prometheus sees no growth of a series that begins above 0."""
    for reason in MissReason:
        if reason is not MissReason.BEHIND_A_GAP:
            count_missed(counters, tenant, reason, 0)
    for cause in GAPS:
        count_missed(counters, tenant, MissReason.BEHIND_A_GAP, 0, cause)


def missed_beyond(
    tokens: int, beyond: Beyond, first: int, end: int, had: int, short: int
) -> tuple[dict[MissReason, int], MissReason]:
    """Returns the tokens that a match missed, by reason, and the reason of the first gap. `tokens`: number of tokens of
    a segment. `first`, `end`: the range of the segments that count, not empty. `had`, `short`: numbers of tokens of the
    first and of the last of them that do not count."""
    codes, known, new = beyond.codes, beyond.known, beyond.new
    counted: dict[MissReason, int] = {}
    evicted, missing = codes.count(_MISSING, first, max(first, min(known, end))), codes.count(_MISSING, first, end)
    counted[_EVICTED], counted[new] = evicted * tokens, (missing - evicted) * tokens
    for code in sorted(set(codes[first:end])) if missing < end - first else ():
        if code != _MISSING:
            reason = reason_of(code, codes[0], beyond.unknown)
            counted[reason] = counted.get(reason, 0) + codes.count(code, first, end) * tokens
    for at in range(first, end) if beyond.slow else ():
        if codes[at] == _MISSING and beyond.places[at] in beyond.slow:
            counted[_EVICTED if at < known else new] -= tokens
            counted[MissReason.SKIPPED] = counted.get(MissReason.SKIPPED, 0) + tokens
    for at, less in ((first, had), (end - 1, short)):
        counted[beyond.reason_at(at)] -= less
    return counted, beyond.reason_at(0)


def count_beyond(
    counters: Counters, tenant: TenantId, tokens: int, beyond: Beyond, first: int, end: int, had: int, short: int
) -> None:
    """Count the tokens of `missed_beyond`, of which there may be none."""
    if first == end:
        return
    counted, cause = missed_beyond(tokens, beyond, first, end, had, short)
    for reason, missed in counted.items():
        if missed:
            count_missed(counters, tenant, reason, missed, cause if reason is MissReason.BEHIND_A_GAP else None)


def only_other_layouts(store: SegmentStore, tenant: TenantId, slot_bytes: int) -> bool:
    """Returns True if the tenant has segments on this node, but none of this size: the request probably uses another
    layout than the engines that stored them."""
    found = False
    for pool in store.pools():
        if pool.tenant == tenant and any(pool.counts):
            if pool.slot_bytes == slot_bytes:
                return False
            found = True
    return found
