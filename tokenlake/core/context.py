"""The state that all parts of a node's rules (`NodeCore`) read: configuration, hash ring, segment store, clock,
counters and timers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tokenlake.config import RuleSettings, ServerConfig
from tokenlake.core.instructions import Instruction
from tokenlake.directory.ring import Ring
from tokenlake.directory.ring_record import UNIT_SHARE, Member, RingRecord
from tokenlake.disk.tier import DiskTier
from tokenlake.hints import AccessRecord
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId
from tokenlake.memory import Segment, SegmentStore, State
from tokenlake.memory.eviction import Forecast
from tokenlake.memory.vacancy import Vacancy
from tokenlake.metrics import Counters
from tokenlake.rate import Rate
from tokenlake.timers import Timer, Timers
from tokenlake.wire.fields import MAX_AMOUNT, MAX_SECONDS

LOAD_HALF_LIFE_S = 2.0
GOSSIP_S = 0.250
PAUSE_S = 0.005
"""Seconds between two slices of work over all segments of a node: ten times the duration of one slice, so that other
events are handled in between."""
LEAST_PAUSE_S = 0.001
"""Minimum of these seconds when several pieces of such work take turns."""


KnownAccess = tuple[int, AccessRecord, float]
"""The last access of one segment, as far as this node knows: (index of the segment in its prompt, access record of the
request that accessed it last, seconds since that access)."""


DRAIN_S = 60.0
"""Maximum seconds of a drain where the settings name none: the time of 60 GB at 1 GB/s. Without a limit, segments for
which no other node has room would keep this node from leaving."""


class CoreConfig(RuleSettings, frozen=True):
    """The configuration of a node's rules: the settings that they share with the daemon, and the fields below. An event
    log begins with it, so that a replay can start with equal rules. Times are in seconds."""

    node: str
    incarnation: int
    ring: RingRecord
    """The members of the cluster when this node starts."""
    regions: int
    region_bytes: int
    """The memory is as large as `regions` regions of `region_bytes`. New regions have about this size."""
    makers: int = 1
    """Number of regions that the driver makes at a time of memory that no tenant has."""
    made: bool = True
    """Is the memory there when the rules start? Otherwise the rules ask for it by `MakeRegion`."""
    quotas: dict[str, float] = msgspec.field(default_factory=dict)
    """Maximum share of the node's memory for each tenant, 0 to 1; a tenant without an entry may use all of it."""
    salt_quotas: dict[str, float] = msgspec.field(default_factory=dict)
    """Maximum share of the memory of a tenant for the segments of one account, above 0 to 1; a tenant without an entry
    has no such limit."""
    drain_s: float = DRAIN_S
    """Maximum seconds for which this node, while it drains, hands its segments over."""
    match_deadline_s: float = ServerConfig().match_deadline_ms / 1e3
    suspect_s: float = ServerConfig().suspect_ms / 1e3
    gossip_s: float = GOSSIP_S
    """Seconds between two reports of reads to other nodes, and between two rounds of pings."""
    peer_lease_s: float = 30.0
    """Seconds for which another node may hold a lease on segments of this node before it has to renew the lease. A send
    that outlasts the lease keeps its segments in place by its own pins."""
    sync_grace_s: float = 5.0
    """Maximum seconds after the start, or after a change of the ring, for which this node answers UNKNOWN instead of
    MISSING for keys of which it is the directory node since then, because not all peers have told it yet which segments
    they own."""
    previous_ring_s: float = 10.0
    """Seconds after a change of the ring for which the previous directory nodes of keys that moved keep their entries,
    for nodes that have not heard of the change. It must be longer than `sync_grace_s`, and longer than a
    node may take to hear of the change."""
    directory_limit: int = 1 << 20
    keep: bool = False
    """Does the driver keep the memory for the next daemon, with a ledger of the segments in it (`Record`)?"""


def ring_of(record: RingRecord, node: NodeId) -> Ring:
    """The ring of `node` at this record: that of the record, or one of `node` alone if it is no member."""
    alone = RingRecord(record.epoch, 1.0, {str(node): Member(UNIT_SHARE)})
    return Ring(record if node in record.members else alone)


class Part:
    """A part of a node's rules."""

    def census(self) -> dict[str, int]:
        """How many objects the part keeps, by kind: for gauges, and for tests that look for leaks."""
        return {}

    def pinned(self) -> Iterator[Segment]:
        """Yields a segment once for each pin that the part holds on it; for integrity checks."""
        return iter(())

    def check_integrity(self) -> None:
        """Raises AssertionError when the state of the part contradicts itself. Slow; for tests."""


class Context:
    """The shared state of one node's rules. `NodeCore` sets the time of each event and takes the instructions, and
    `RingChange` sets the ring; all other changes go through methods."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.node = NodeId(config.node)
        self.incarnation = Incarnation(config.incarnation)
        self.record = config.ring
        """The newest record of the members. This field and the three below are set by `RingChange` only."""
        self.ring_version = (config.ring.epoch, config.ring.digest())
        """(epoch, digest) of the record, by which other nodes know this node's ring."""
        self.ring = ring_of(config.ring, self.node)
        self.previous_ring: Ring | None = None
        """The ring before the last change, for as long as readers ask its directory nodes too."""
        self.counters = Counters()
        self.store = SegmentStore(
            config.regions,
            config.region_bytes,
            config.dirty_share,
            self.counters,
            policy=Forecast,
            quotas=config.quotas,
            made=config.made,
        )
        self.removals = self.store.removals
        self.disk = DiskTier(self.store.models.of, config.disk_writes_per_day, config.quotas)
        self.store.spare = self.disk.spare
        self._load = Rate(LOAD_HALF_LIFE_S)
        self.timers = Timers()
        self._sliced: deque[Callable[[], bool]] = deque()
        """Work that is done in slices and has slices left; the first one's turn is next."""
        self._slicing = False
        """True while a timer of the next slice is set, or a slice is under way that will set it."""
        self.now = 0.0
        """Time in seconds of the event that the rules are handling now."""
        self.started = 0.0
        """Time in seconds at which the rules of this node started."""
        self.out: list[Instruction] = []
        """Instructions for the driver that the event being handled has led to so far."""
        # The ids of each incarnation of the daemon begin at another number, so that an id from before a restart names
        # no object of this incarnation.
        self._first_id = ((config.incarnation & 0x7FFFFFFF) << 31) + 1
        self._ids = itertools.count(self._first_id)

    @property
    def draining(self) -> bool:
        """True while the ring record says that this node drains."""
        member = self.record.members.get(self.node)
        return member is not None and member.draining

    def emit(self, instruction: Instruction) -> None:
        """Add an instruction that the driver of the rules carries out after the event."""
        self.out.append(instruction)

    def next_id(self) -> int:
        """Returns a number for a new session, lease, write, call or fetch, unique over all incarnations of this
        node."""
        return next(self._ids)

    def is_own_id(self, number: int) -> bool:
        """Returns True for a number that `next_id` has given or may still give, and False for those of incarnations
        before."""
        return self._first_id <= number < self._first_id + (1 << 31)

    def vacancy(self) -> Vacancy:
        """How much room the memory of this node has for further segments, now."""
        return self.store.vacancy(self.now)

    def since(self, then: float) -> float:
        """Seconds from `then` to now; at most `MAX_SECONDS`, the limit of a message's field."""
        return min(MAX_SECONDS, max(0.0, self.now - then))

    def sends(self, nbytes: int) -> None:
        """Count bytes that this node sends to engines of other nodes; they are the node's load."""
        self._load.add(nbytes, self.now)

    def load(self) -> float:
        """This node's load: the recent rate of bytes sent to engines of other nodes, per second; at most
        `MAX_AMOUNT`."""
        return min(MAX_AMOUNT, self._load.at(self.now))

    def after(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Set a timer that calls `callback` in `delay_s` seconds from now; returns the timer."""
        return self.timers.at(self.now + delay_s, callback)

    def in_slices(self, work: Callable[[], bool], *, later: bool = False) -> None:
        """Call `work` now, and again after a pause for as long as it returns True. Each call handles a few hundred
        segments, so that work over all segments of the node delays no other event by more than 1 ms. Several works take
        turns, one call at a time. `later`: the first call comes after a pause too."""
        if later or work():
            self._sliced.append(work)
            if not self._slicing:
                self._slicing = True
                self.after(PAUSE_S, self._slice)

    def in_steps(self, work: Callable[[], bool]) -> None:
        """Call `work` now, and again in later events, without a pause, for as long as it returns True. For work that an
        engine waits for; the driver handles other events in between."""
        if work():
            self.after(0.0, lambda: self.in_steps(work))

    def _slice(self) -> None:
        work = self._sliced.popleft()
        try:
            if work():
                self._sliced.append(work)
        finally:
            self._slicing = bool(self._sliced)
            if self._sliced:
                self.after(max(LEAST_PAUSE_S, PAUSE_S / len(self._sliced)), self._slice)

    def ready(self, tenant: TenantId, keys: Iterable[SegmentKey]) -> list[Segment | None]:
        """Returns, for each key, the tenant's READY segment of this node, or None where this node has no such
        segment."""
        ready = State.READY
        found = map(self.store.index(tenant).get, keys)
        return [segment if segment is not None and segment.state is ready else None for segment in found]

    def on_disk(self, tenant: TenantId, keys: Sequence[SegmentKey], found: Sequence[Segment | None]) -> dict[int, int]:
        """Returns the entry of each segment that is on a device of this node and not in memory, by index of its key,
        ascending. `found`: the result of `ready` for the keys."""
        find = self.disk.find
        absent = (at for at, segment in enumerate(found) if segment is None) if self.disk and None in found else ()
        return {at: entry for at in absent if (entry := find(tenant, keys[at])) >= 0}
