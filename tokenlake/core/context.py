"""What the parts of a `NodeCore` share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import msgspec

from tokenlake.config import RuleSettings, ServerConfig
from tokenlake.core.instructions import Instruction
from tokenlake.core.timers import Timer, Timers
from tokenlake.hot import Rate
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId
from tokenlake.metrics import Counters, Metric
from tokenlake.placement import Vacancy, default_run_length
from tokenlake.ring import Ring
from tokenlake.store import Budgets, Segment, SegmentStore, State
from tokenlake.store.eviction import policy_named
from tokenlake.store.removals import RemovalLog
from tokenlake.wire.fields import MAX_AMOUNT, MAX_SECONDS

__all__ = ["GOSSIP_S", "LOAD_HALF_LIFE_S", "Context", "CoreConfig"]

READ_BYTES = Metric(
    "tokenlake_read_bytes_total",
    "Bytes of segments that engines read from this node's arena, here or from elsewhere",
    "tenant",
)

LOAD_HALF_LIFE_S = 2.0
GOSSIP_S = 0.250
PAUSE_S = 0.005
"""Between two slices of long work: ten times what a slice takes."""


class CoreConfig(RuleSettings, frozen=True):
    """What a node's rules must know: the settings that they share with the daemon's configuration, and these. First
    line of an event log. Times in seconds."""

    node: str
    incarnation: int
    members: dict[str, int]
    """Every node of the cluster, itself included, and its memory in bytes."""
    regions: int
    region_bytes: int
    quotas: dict[str, float] = msgspec.field(default_factory=dict)
    """Share of the node's memory that a tenant may have; all of it for those that are not named."""
    match_deadline_s: float = ServerConfig().match_deadline_ms / 1e3
    suspect_s: float = ServerConfig().suspect_ms / 1e3
    gossip_s: float = GOSSIP_S
    """Between two reports to other nodes, and two turns of pinging some of them."""
    peer_lease_s: float = 30.0
    """A lease to another node ends then, unless renewed; the sends it started hold their own pins."""
    sync_grace_s: float = 5.0
    """A directory node that started answers UNKNOWN until every peer advertised, at most this long."""
    directory_limit: int = 1 << 20


class Context:
    """State of one node, the time of the event at hand and the instructions it led to."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.node = NodeId(config.node)
        self.incarnation = Incarnation(config.incarnation)
        run_length = config.run_length or default_run_length(len(config.members))
        self.ring = Ring({NodeId(name): weight for name, weight in config.members.items()}, run_length)
        self.counters = Counters()
        self.removals = RemovalLog()
        self.store = SegmentStore(
            range(config.regions),
            config.region_bytes,
            Budgets(cached=config.cached_share, dirty=config.dirty_share, replica=config.replica_share),
            self.counters,
            policy=policy_named(config.eviction),
            quotas=config.quotas,
            removals=self.removals,
        )
        self._load = Rate(LOAD_HALF_LIFE_S)
        self.timers = Timers()
        self.now = 0.0
        self.started = 0.0
        """When this node's rules began: the time of `NodeCore.start`."""
        self.out: list[Instruction] = []
        # They begin elsewhere in each life, so that what refers to an earlier one fits nothing.
        self._ids = itertools.count(((config.incarnation & 0x7FFFFFFF) << 31) + 1)

    def emit(self, instruction: Instruction) -> None:
        """Add to what the driver must do."""
        self.out.append(instruction)

    def next_id(self) -> int:
        """Names a session, lease, write, call or fetch; never used twice, by any incarnation of this node."""
        return next(self._ids)

    def vacancy(self) -> Vacancy:
        """How welcome a new segment is here, now."""
        return self.store.vacancy(self.now)

    def since(self, then: float) -> float:
        """Seconds from `then` to now; no more than can be told."""
        return min(MAX_SECONDS, max(0.0, self.now - then))

    def served(self, tenant: TenantId, nbytes: int) -> None:
        """So much of what lies here was read: by engines of this node, or for those of another."""
        self.counters.add_for(READ_BYTES, tenant, nbytes)
        self._load.add(nbytes, self.now)

    def load(self) -> float:
        """Bytes read from this node's arena per second, lately; no more than can be told."""
        return min(MAX_AMOUNT, self._load.at(self.now))

    def after(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` in `delay_s` from now."""
        return self.timers.at(self.now + delay_s, callback)

    def in_slices(self, work: Callable[[], bool]) -> None:
        """Call `work` now, and again after a pause for as long as it returns True: there is more to do. What is
        done for every segment of the node is done so, a few hundred at a time."""
        if work():
            self.after(PAUSE_S, lambda: self.in_slices(work))

    def by_directory_node(self, keys: Iterable[SegmentKey]) -> Mapping[NodeId, list[SegmentKey]]:
        """Keys grouped by their directory node, in order."""
        keys = list(keys)
        grouped: dict[NodeId, list[SegmentKey]] = {}
        if keys:
            for key, (directory_node, _) in zip(keys, self.ring.candidates(b"".join(keys)), strict=True):
                grouped.setdefault(directory_node, []).append(key)
        return grouped

    def ready(self, tenant: TenantId, keys: Iterable[SegmentKey]) -> list[Segment | None]:
        """This node's READY segments, None where it has none."""
        ready = State.READY
        found = map(self.store.index(tenant).get, keys)
        return [segment if segment is not None and segment.state is ready else None for segment in found]
