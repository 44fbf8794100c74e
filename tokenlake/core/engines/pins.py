"""Pins that a request, a router or an operator asks for: segments that memory pressure does not evict for some time.

::

    a hint with `pin_s`, or a prefetch that pins
        |   room: `pinned_share` of the slots of the pool, `MAX_PINS` of the node in equal parts of the tenants,
        |         the same share of the quota of a salt
        v
    one pin of the slot, until its time is over, an `Unpin` names it, the segment leaves by another rule,
    or the memory of its region goes to another pool

A pin belongs to the copy of this node: it moves to no other node, and ends with the daemon, unless the memory is
kept. A pin of a segment that is
pinned already sets its time anew and takes no further room.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from sortedcontainers import SortedDict

from tokenlake.core.context import Context, Part
from tokenlake.core.engines.salt_quotas import salt_limit
from tokenlake.hints import MAX_PIN_S
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import PoolId, Segment, State
from tokenlake.metrics import Metric

Outer = TypeVar("Outer")
Inner = TypeVar("Inner")
Value = TypeVar("Value")

PINNED = Metric("tokenlake_pinned_segments_total", "Segments that were pinned for a time", "tenant")
PINS_REFUSED = Metric(
    "tokenlake_refused_pin_segments_total",
    "Segments that were to be pinned and were not, because the pins of their pool or tenant were used up",
    "tenant",
)

MAX_PINS = 1 << 14
"""Maximum number of pinned segments of a node, 300 bytes each. All tenants have an equal part."""
ENDED = 128
"""Number of pins that one slice of work ends: each takes up to 10 us."""


class _Pin:
    """The pin of one segment."""

    __slots__ = ("account", "segment", "until")

    def __init__(self, segment: Segment, until: tuple[float, int]) -> None:
        self.segment = segment
        self.account = segment.tenant, segment.hints.account
        self.until = until
        """Time in seconds at which it ends, and a number that no other pin has."""


class Pins(Part):
    """The pinned segments of this node."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pins: dict[TenantId, dict[SegmentKey, _Pin]] = {}
        self._until: SortedDict[tuple[float, int], _Pin] = SortedDict()
        self._by_pool: Counter[PoolId] = Counter()
        self._by_account: Counter[tuple[TenantId, str]] = Counter()
        """Bytes of the pinned segments of each account."""
        self._by_region: dict[int, dict[_Pin, None]] = {}
        self._numbers = itertools.count()
        self._ending = False
        """True while slices of `sweep` are left."""

    def room(self, tenant: TenantId, slot_bytes: int) -> int:
        """Returns how many further segments of this tenant and size may be pinned; there must be a pool of them."""
        at = PoolId(tenant, slot_bytes)
        limit = max(1, int(self._context.config.pinned_share * self._context.store.capacity(at)))
        part = MAX_PINS // max(1, len(self._context.config.quotas))
        return max(0, min(limit - self._by_pool[at], part - len(self._pins.get(tenant, ()))))

    def pin(self, segments: Iterable[Segment], seconds: float) -> list[bool]:
        """Pin segments of this node, from the first on, for `seconds`, at most `MAX_PIN_S`. Returns for each whether it
        is pinned."""
        until = self._context.now + min(seconds, MAX_PIN_S)
        done: list[bool] = []
        for segment in segments:
            pin = self._pin_of(segment)
            if pin is not None:
                self._end(pin)
            kept = segment.state is State.READY and (pin is not None or self._fits(segment))
            if kept:
                self._begin(segment, until)
            if pin is None:
                self._context.counters.add_for(PINNED if kept else PINS_REFUSED, 1, segment.tenant)
            done.append(kept)
        return done

    def _fits(self, segment: Segment) -> bool:
        """Returns True if there is room for a pin of the segment, also within the quota of its salt."""
        limit = salt_limit(self._context, segment.tenant)
        if limit and segment.hints.account:
            pinned = self._by_account[segment.tenant, segment.hints.account]
            if pinned and pinned + segment.slot_bytes > self._context.config.pinned_share * limit:
                return False
        return self.room(*segment.pool) > 0

    def left_s(self, segment: Segment) -> float:
        """Returns the seconds for which a segment stays pinned; 0 if it is not."""
        pin = self._pin_of(segment)
        return 0.0 if pin is None else max(0.0, pin.until[0] - self._context.now)

    def unpinned(self, segments: Iterable[Segment]) -> int:
        """Returns how many of the segments have no pin yet."""
        return sum(self._pin_of(segment) is None for segment in segments)

    def unpin(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> int:
        """End the pins of these segments. Returns how many were pinned."""
        pins = self._pins.get(tenant, {})
        found = [pins[key] for key in dict.fromkeys(keys) if key in pins]
        for pin in found:
            self._end(pin)
        return len(found)

    def unpin_all(self, tenant: TenantId, then: Callable[[int], None]) -> None:
        """End all pins of the tenant, some at a time, and call `then` with their number."""
        left = list(self._pins.get(tenant, {}).values())
        ended = 0

        def work() -> bool:
            nonlocal ended
            for _ in range(min(ENDED, len(left))):
                pin = left.pop()
                if self._until.get(pin.until) is pin:
                    self._end(pin)
                    ended += 1
            if not left:
                then(ended)
            return bool(left)

        self._context.in_slices(work)

    def left(self, segments: Iterable[Segment]) -> None:
        """Segments left the index: their pins end, so that their slots do not stay in quarantine."""
        for segment in segments:
            pin = self._pin_of(segment)
            if pin is not None:
                self._end(pin)

    def yield_region(self, region: int) -> None:
        """The memory of a region goes to another pool: its pins end, some with each call."""
        for pin in list(itertools.islice(self._by_region.get(region, ()), ENDED)):
            self._end(pin)

    def sweep(self) -> None:
        """End the pins whose time is over, some at a time."""

        def work() -> bool:
            for _ in range(ENDED):
                if not self._until or self._until.peekitem(0)[0][0] > self._context.now:
                    self._ending = False
                    return False
                self._end(self._until.peekitem(0)[1])
            self._ending = True
            return True

        if not self._ending:
            self._context.in_slices(work)

    def _pin_of(self, segment: Segment) -> _Pin | None:
        pin = self._pins.get(segment.tenant, _NO_PINS).get(segment.key)
        return pin if pin is not None and pin.segment is segment else None

    def _begin(self, segment: Segment, until: float) -> None:
        pin = _Pin(segment, (until, next(self._numbers)))
        self._context.store.pin(segment)
        self._pins.setdefault(segment.tenant, {})[segment.key] = pin
        self._until[pin.until] = pin
        self._by_pool[segment.pool] += 1
        self._by_account[pin.account] += segment.slot_bytes
        self._by_region.setdefault(segment.place.region, {})[pin] = None
        self._context.store.note(segment)

    def _end(self, pin: _Pin) -> None:
        segment = pin.segment
        del self._until[pin.until]
        _remove(self._pins, segment.tenant, segment.key)
        _remove(self._by_region, segment.place.region, pin)
        self._by_account[pin.account] -= segment.slot_bytes
        if not self._by_account[pin.account]:
            del self._by_account[pin.account]
        self._by_pool[segment.pool] -= 1
        if not self._by_pool[segment.pool]:
            del self._by_pool[segment.pool]
        self._context.store.note(segment)
        self._context.store.unpin(segment)

    # -- checks

    def pinned(self) -> Iterator[Segment]:
        return (pin.segment for pin in self._until.values())

    def census(self) -> dict[str, int]:
        return {"pinned segments": len(self._until)}

    def check_integrity(self) -> None:
        """Raises AssertionError when the maps differ, or a bound is exceeded."""
        pins = list(self._until.values())
        assert all(self._pins[pin.segment.tenant][pin.segment.key] is pin for pin in pins)
        assert sum(map(len, self._pins.values())) == sum(map(len, self._by_region.values())) == len(pins) <= MAX_PINS
        assert sum(self._by_account.values()) == sum(pin.segment.slot_bytes for pin in pins)
        assert self._by_pool == Counter(pin.segment.pool for pin in pins)
        assert all(pin.segment.state is State.READY for pin in pins)
        assert all(self._pins.values())
        assert all(self._by_region.values())


_NO_PINS: dict[SegmentKey, _Pin] = {}


def _remove(maps: dict[Outer, dict[Inner, Value]], outer: Outer, inner: Inner) -> None:
    """Remove an entry of an inner map, and the inner map with its last one."""
    del maps[outer][inner]
    if not maps[outer]:
        del maps[outer]
