"""The state that all parts of a `NodeCore` read: configuration, ring, store, clock, counters and timers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec

from tokenlake.config import RuleSettings, ServerConfig
from tokenlake.core.instructions import Instruction
from tokenlake.core.timers import Timer, Timers
from tokenlake.hints import AccessRecord
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId
from tokenlake.metrics import Counters
from tokenlake.rate import Rate
from tokenlake.ring import Ring
from tokenlake.store import Budgets, Segment, SegmentStore, State
from tokenlake.store.eviction import Forecast
from tokenlake.store.removals import RemovalLog
from tokenlake.vacancy import Vacancy
from tokenlake.wire.fields import MAX_AMOUNT, MAX_SECONDS

__all__ = ["GOSSIP_S", "LOAD_HALF_LIFE_S", "Context", "CoreConfig", "KnownAccess"]

LOAD_HALF_LIFE_S = 2.0
GOSSIP_S = 0.250
PAUSE_S = 0.005
"""Between two slices of long work: ten times the time of a slice."""


KnownAccess = tuple[int, AccessRecord, float]
"""(index of a segment in its prompt, its last access record, seconds since that access)"""


class CoreConfig(RuleSettings, frozen=True):
    """The configuration of a node's rules: the settings that they share with the daemon, and these fields. It is the
    first line of an event log. Times in seconds."""

    node: str
    incarnation: int
    members: dict[str, int]
    """Every node of the cluster, this one included, and its memory in bytes."""
    regions: int
    region_bytes: int
    quotas: dict[str, float] = msgspec.field(default_factory=dict)
    """Per tenant, its maximum share of the node's memory; 1 for a tenant without an entry."""
    match_deadline_s: float = ServerConfig().match_deadline_ms / 1e3
    suspect_s: float = ServerConfig().suspect_ms / 1e3
    gossip_s: float = GOSSIP_S
    """Interval of the reports to other nodes, and of the pings."""
    peer_lease_s: float = 30.0
    """Duration of a lease that another node holds here, unless renewed. Sends hold pins of their own."""
    sync_grace_s: float = 5.0
    """Maximum time after the start for which this node's directory may be incomplete and answers UNKNOWN."""
    directory_limit: int = 1 << 20


class Context:
    """Read by every part of the rules. `NodeCore` sets the time; the parts change the rest through methods."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.node = NodeId(config.node)
        self.incarnation = Incarnation(config.incarnation)
        self.ring = Ring({NodeId(name): weight for name, weight in config.members.items()})
        self.counters = Counters()
        self.removals = RemovalLog()
        self.store = SegmentStore(
            range(config.regions),
            config.region_bytes,
            Budgets(cached=config.cached_share, dirty=config.dirty_share),
            self.counters,
            policy=Forecast,
            quotas=config.quotas,
            removals=self.removals,
        )
        self._load = Rate(LOAD_HALF_LIFE_S)
        self.timers = Timers()
        self.now = 0.0
        """Time of the event that is being handled."""
        self.started = 0.0
        """Time of `NodeCore.start`."""
        self.out: list[Instruction] = []
        """Instructions of the event that is being handled."""
        # Each incarnation begins at another number, so that no id of an earlier one names anything.
        self._ids = itertools.count(((config.incarnation & 0x7FFFFFFF) << 31) + 1)

    def emit(self, instruction: Instruction) -> None:
        """Add an instruction for the driver."""
        self.out.append(instruction)

    def next_id(self) -> int:
        """A number for a session, lease, write, call or fetch, unique over all incarnations of this node."""
        return next(self._ids)

    def vacancy(self) -> Vacancy:
        """Of this node, now."""
        return self.store.vacancy(self.now)

    def since(self, then: float) -> float:
        """Seconds from `then` to now; at most `MAX_SECONDS`, the limit of a message's field."""
        return min(MAX_SECONDS, max(0.0, self.now - then))

    def sends(self, nbytes: int) -> None:
        """Count bytes that this node sends to engines of other nodes."""
        self._load.add(nbytes, self.now)

    def load(self) -> float:
        """This node's load: the recent rate of bytes sent to engines of other nodes, per second; at most
        `MAX_AMOUNT`."""
        return min(MAX_AMOUNT, self._load.at(self.now))

    def after(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` in `delay_s` from now."""
        return self.timers.at(self.now + delay_s, callback)

    def in_slices(self, work: Callable[[], bool]) -> None:
        """Call `work` now, and again after a pause for as long as it returns True. Work over all segments of the node
        is cut into slices of a few hundred, so that no event takes longer than 1 ms."""
        if work():
            self.after(PAUSE_S, lambda: self.in_slices(work))

    def ready(self, tenant: TenantId, keys: Iterable[SegmentKey]) -> list[Segment | None]:
        """The READY segments of this node, None for the other keys."""
        ready = State.READY
        found = map(self.store.index(tenant).get, keys)
        return [segment if segment is not None and segment.state is ready else None for segment in found]
