"""Measures the time that an eviction policy takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter_ns

from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey
from tokenlake.memory import EvictionPolicy, Segment


class Timed(EvictionPolicy):
    """A wrapper of an eviction policy: passes all calls to `policy` and measures their time. Reading the clock adds
    some 0.1 us to a call."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self.odds = policy.odds
        self.taken_ns = 0
        """Total nanoseconds of those calls of the policy that change its state or compare segments."""

    def insert(self, segment: Segment, now: float) -> None:
        """Let the wrapped policy add `segment` to its order, and measure the time; see `EvictionPolicy`."""
        began = perf_counter_ns()
        self._policy.insert(segment, now)
        self.taken_ns += perf_counter_ns() - began

    def touch(self, segment: Segment, now: float) -> None:
        """Let the wrapped policy record an access of `segment`, and measure the time; see `EvictionPolicy`."""
        began = perf_counter_ns()
        self._policy.touch(segment, now)
        self.taken_ns += perf_counter_ns() - began

    def follow(self, segment: Segment, child: Segment) -> bool:
        """Let the wrapped policy keep `segment` as long as `child`, and measure the time; see `EvictionPolicy`."""
        began = perf_counter_ns()
        moved = self._policy.follow(segment, child)
        self.taken_ns += perf_counter_ns() - began
        return moved

    def hints_changed(self, segment: Segment, now: float) -> None:
        """Tell the wrapped policy that the hints of `segment` have changed, and measure the time; see
        `EvictionPolicy`."""
        began = perf_counter_ns()
        self._policy.hints_changed(segment, now)
        self.taken_ns += perf_counter_ns() - began

    def remove(self, segment: Segment, now: float, evicted: bool) -> None:
        """Let the wrapped policy take `segment` out of its order, and measure the time; see `EvictionPolicy`."""
        began = perf_counter_ns()
        self._policy.remove(segment, now, evicted)
        self.taken_ns += perf_counter_ns() - began

    def victim(self, now: float) -> Segment:
        """Returns the segment that the wrapped policy would evict next, and measures the time; see `EvictionPolicy`."""
        began = perf_counter_ns()
        try:
            return self._policy.victim(now)
        finally:
            self.taken_ns += perf_counter_ns() - began

    def retention_value(self, segment: Segment, now: float) -> float:
        """Returns the wrapped policy's value of keeping `segment`, and measures the time; see `EvictionPolicy`."""
        began = perf_counter_ns()
        retention_value = self._policy.retention_value(segment, now)
        self.taken_ns += perf_counter_ns() - began
        return retention_value

    def retention_value_of_new(self, key: SegmentKey, hints: Hints, now: float) -> float:
        """Returns the wrapped policy's value of keeping a segment that would be stored now, and measures the time; see
        `EvictionPolicy`."""
        began = perf_counter_ns()
        retention_value = self._policy.retention_value_of_new(key, hints, now)
        self.taken_ns += perf_counter_ns() - began
        return retention_value

    def admits(self, key: SegmentKey, hints: Hints, now: float) -> bool:
        """Returns True if the wrapped policy would store a new segment although memory is full, and measures the time;
        see `EvictionPolicy`."""
        began = perf_counter_ns()
        admitted = self._policy.admits(key, hints, now)
        self.taken_ns += perf_counter_ns() - began
        return admitted

    def last_access(self, keys: Sequence[SegmentKey], now: float) -> tuple[int, AccessRecord, float] | None:
        """Returns (index, last access record, seconds since then) of the last of `keys` that the wrapped policy
        remembers, and measures the time; see `EvictionPolicy`."""
        began = perf_counter_ns()
        known = self._policy.last_access(keys, now)
        self.taken_ns += perf_counter_ns() - began
        return known

    def __len__(self) -> int:
        return len(self._policy)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._policy)
