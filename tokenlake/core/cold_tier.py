"""What this node knows of the cold tier, a store that the nodes of several clusters share: whether it can be used, how
fast it is, and, from the driver's index, which segments it has.

::

    ColdReady --> in use <--------------------- the pause is over, or ColdReady
                    |  no bytes come within a deadline         |
                    +--> set aside, each time for longer ------+
                    |  ColdGone
                    v
                  not in use, until ColdReady

The index may be out of date: a segment that it names and that could not be read counts as absent for `ABSENT_S`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from tokenlake.core.context import Context, Part
from tokenlake.core.events import ColdGone, ColdLooked, ColdReady
from tokenlake.core.instructions import ColdLook, Note
from tokenlake.disk.reads import LEAST_RATE, RATE_WEIGHT
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import PoolId
from tokenlake.metrics import Metric
from tokenlake.wire.slots import join_keys

ASIDE = Metric(
    "tokenlake_cold_timeouts_total", "Times that the cold tier was set aside, because no bytes came within a deadline"
)
LEAST_PAUSE_S, MOST_PAUSE_S = 5.0, 300.0
"""Seconds for which the cold tier is set aside: the first time, doubled each time until bytes come, and at most."""
ABSENT_S = 60.0
AGAIN_S = 6 * 3600.0
"""Seconds of further accesses after which a segment that the tier has is offered again: the tier then counts a use, or
the segment is written anew, if it has expired there."""
MAX_ABSENT = 1 << 12
"""Maximum number of segments that are remembered as absent; the oldest are forgotten first."""
COMPUTE_WEIGHT = 0.2
"""Weight of the newest report in the running mean of the time in which engines compute a segment."""
PART_OF_COMPUTING = 0.5
"""A read may take this part of the time in which an engine computes the segments: engines wait no longer for one."""
FORGET_S = 60.0
"""Seconds without a read after which the rate that the driver reported counts, in place of that of earlier reads."""
MAX_POOLS = 1024
"""Maximum number of pools whose time is remembered."""
Answer = Callable[[list[bool]], None]
"""Takes, per key, whether the cold tier has the segment."""


class ColdTier(Part):
    """The state of the cold tier, as this node knows it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ready = False
        self.latency_s = 0.0
        self.read_rate = self.write_rate = 1.0
        """Bytes per second. Reads change the first."""
        self._reported_rate = 1.0
        self._measured_at = 0.0
        self._aside_until = 0.0
        self._pause_s = LEAST_PAUSE_S
        self._looks: dict[int, tuple[int, Answer]] = {}
        """By number: the keys of each question that the driver has not answered, and what takes the answer."""
        self._absent: OrderedDict[tuple[TenantId, SegmentKey], float] = OrderedDict()
        """Time in seconds until which a segment counts as absent, whatever the index says."""
        self._compute_s: OrderedDict[PoolId, float] = OrderedDict()
        """By pool: the seconds in which engines of this node compute a segment, as they reported."""

    @property
    def ready(self) -> bool:
        """True if the cold tier is there: it may be written."""
        return self._ready

    @property
    def readable(self) -> bool:
        """True if the cold tier is there and not set aside."""
        return self._ready and self._context.now >= self._aside_until

    def came_up(self, event: ColdReady) -> None:
        """The cold tier can be used, or has other rates."""
        if not self._ready:
            self._ready, self._aside_until, self._pause_s = True, 0.0, LEAST_PAUSE_S
        self._reported_rate = max(1.0, event.read_bytes_per_s)
        self.latency_s = max(0.0, event.latency_s)
        self.read_rate, self.write_rate = self._reported_rate, max(1.0, event.write_bytes_per_s)

    def went(self, event: ColdGone) -> None:
        """The cold tier cannot be used."""
        self._ready = False

    def silent(self) -> None:
        """A read brought no bytes within its deadline: nothing is read for some time."""
        if self.readable:
            self._context.counters.add(ASIDE)
            self._context.emit(Note(f"the cold tier is slow: set aside for {self._pause_s:.0f} s", "cold"))
            self._aside_until = self._context.now + self._pause_s
            self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s)

    def delivered(self) -> None:
        """A read brought bytes."""
        self._pause_s = LEAST_PAUSE_S

    def measured(self, rate: float) -> None:
        """Reads brought so many bytes per second, all together."""
        self._measured_at = self._context.now
        self.read_rate = max(LEAST_RATE, self.read_rate + RATE_WEIGHT * (rate - self.read_rate))

    # -- what it has

    def look(self, tenant: TenantId, slot_bytes: int, shards: int, keys: Sequence[SegmentKey], then: Answer) -> None:
        """Ask the driver which of these segments the cold tier has, and call `then` with the answer."""
        look = self._context.next_id()

        def take(found: list[bool]) -> None:
            then([each and not self._is_absent(tenant, key) for key, each in zip(keys, found, strict=True)])

        self._looks[look] = len(keys), take
        self._context.emit(ColdLook(look, tenant, slot_bytes, shards, join_keys(keys)))

    def looked(self, event: ColdLooked) -> None:
        """The driver answers."""
        count, take = self._looks.pop(event.look)
        assert len(event.found) == count
        take([each == 1 for each in event.found])

    def absent(self, tenant: TenantId, key: SegmentKey) -> None:
        """A segment could not be read."""
        self._absent[tenant, key] = self._context.now + ABSENT_S
        if len(self._absent) > MAX_ABSENT:
            self._absent.popitem(last=False)

    def _is_absent(self, tenant: TenantId, key: SegmentKey) -> bool:
        return self._absent.get((tenant, key), 0.0) > self._context.now

    # -- what it replaces

    def computed(self, pool: PoolId, seconds: float) -> None:
        """Engines compute a segment of this pool in so many seconds, as one of them has reported."""
        known = self._compute_s.pop(pool, seconds)
        self._compute_s[pool] = known + COMPUTE_WEIGHT * (seconds - known)
        if len(self._compute_s) > MAX_POOLS:
            self._compute_s.popitem(last=False)

    def pays(self, pool: PoolId, segments: int, queued_s: float = 0.0) -> bool:
        """Returns True if reading so many segments, behind reads that take `queued_s`, is cheaper than computing them,
        or the time of that is not known."""
        compute_s = self._compute_s.get(pool)
        if compute_s is None:
            return True
        if self._context.now - self._measured_at > FORGET_S:
            # Nothing was read for long: the measurement may be out of date.
            self.read_rate = self._reported_rate
        read_s = self.latency_s + queued_s + segments * pool.slot_bytes / self.read_rate
        return read_s <= PART_OF_COMPUTING * segments * compute_s

    def census(self) -> dict[str, int]:
        return {"looks into the cold tier": len(self._looks), "segments that the cold tier lacks": len(self._absent)}
