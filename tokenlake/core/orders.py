"""Orders of an operator about the segments of this node: eviction."""

from __future__ import annotations

from tokenlake.core.context import Context
from tokenlake.core.instructions import EvictionDone
from tokenlake.identity import TenantId
from tokenlake.store import Cursor, Segment, State
from tokenlake.wire.slots import split_keys

__all__ = ["MAX_ORDERED", "Orders"]

MAX_ORDERED = 128
"""Limit of the segments in one `EvictRequested`, and slots that one slice of a longer eviction examines."""


class Orders:
    """Evicts the segments that an operator names. Segments that an engine is writing stay."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._under_way = 0

    def evict(self, request: int, tenant: TenantId, keys: bytes, slot_bytes: int) -> None:
        """Evict the segments of `keys`, or all of the tenant (of the size `slot_bytes`, if it is not 0), and answer
        with `EvictionDone`."""
        store = self._context.store
        if keys:
            named = [store.get(tenant, key) for key in split_keys(keys)]
            self._context.emit(EvictionDone(request, *self._evict([each for each in named if each is not None])))
            return
        cursor: Cursor | None = Cursor()
        evicted = kept = 0
        self._under_way += 1

        def work() -> bool:
            nonlocal cursor, evicted, kept
            assert cursor is not None
            passed, cursor = store.walk(cursor, MAX_ORDERED)
            some = self._evict(
                [
                    each
                    for each in passed
                    if each.tenant == tenant and slot_bytes in (0, each.slot_bytes) and each.state is not State.GONE
                ]
            )
            evicted, kept = evicted + some[0], kept + some[1]
            if cursor is None:
                self._under_way -= 1
                self._context.emit(EvictionDone(request, evicted, kept))
            return cursor is not None

        self._context.in_slices(work)

    def _evict(self, segments: list[Segment]) -> tuple[int, int]:
        """Evict those that are READY. Returns how many were, and how many stay."""
        ready = [each for each in segments if each.state is State.READY]
        for segment in ready:
            self._context.store.evict(segment, self._context.now)
        return len(ready), len(segments) - len(ready)

    def census(self) -> dict[str, int]:
        """How many objects this part of the rules keeps, by kind: for gauges, and for tests that look for leaks."""
        return {"ordered evictions": self._under_way}
