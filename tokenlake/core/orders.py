"""Orders about the segments of this node: eviction, from memory, from disk and from the cold tier, and saving them."""

from __future__ import annotations

from tokenlake.core.cold import Cold
from tokenlake.core.context import Context, Part
from tokenlake.core.disk import Disk
from tokenlake.core.instructions import EvictionDone, Saved
from tokenlake.core.kept import Kept
from tokenlake.identity import TenantId
from tokenlake.memory import Cursor, Kind, Segment, State
from tokenlake.memory.removals import OPERATOR_RULE
from tokenlake.wire.slots import split_keys

MAX_ORDERED = 128
"""Limit of the segments in one `EvictRequested`, and slots that one slice of a longer eviction examines."""


class Orders(Part):
    """Evicts the segments that an operator names. Those that an engine is writing stay, but not their copies on disk;
    those that are on their way to this node's memory never arrive."""

    def __init__(self, context: Context, disk: Disk, cold: Cold, kept: Kept) -> None:
        self._context = context
        self._disk = disk
        self._cold = cold
        self._kept = kept
        self._under_way = 0

    def evict(self, request: int, tenant: TenantId, keys: bytes, slot_bytes: int) -> None:
        """Evict the segments of `keys`, or all of the tenant (of the size `slot_bytes`, if it is not 0), and answer
        with `EvictionDone`."""
        store = self._context.store
        evicted = kept = 0
        self._cold.erase(tenant, split_keys(keys), slot_bytes)

        def done(reached: tuple[int, ...]) -> None:
            answer = EvictionDone(request, evicted, kept, reached)
            # Until all kept segments were passed in, the ledger may have records of these.
            self._kept.when_complete(lambda: self._cold.when_erased(lambda: self._context.emit(answer)))

        erasure = self._disk.begin_erasure(done)
        self._kept.void(tenant, split_keys(keys), slot_bytes)
        if keys:
            # A request may name a segment twice.
            named = {key: store.get(tenant, key) for key in split_keys(keys)}
            evicted, kept = self._evict([each for each in named.values() if each is not None])
            # Copies on disk that did not leave with those in memory.
            others = [key for key, each in named.items() if each is None or each.disk < 0]
            evicted += self._disk.forget(tenant, others, OPERATOR_RULE)
            self._disk.end_erasure(erasure)
            return
        cursor: Cursor | None = Cursor()
        on_disk: int | None = 0
        self._under_way += 1

        def work() -> bool:
            nonlocal cursor, on_disk, evicted, kept
            if cursor is None:
                assert on_disk is not None
                # Some of them came back to memory, or are on their way, behind the cursor of the walk through it.
                dropped, here, on_disk = self._disk.forget_some(tenant, slot_bytes, on_disk, MAX_ORDERED)
                evicted += dropped + self._evict(here)[0]
                if on_disk is None:
                    self._under_way -= 1
                    self._disk.end_erasure(erasure)
                return on_disk is not None
            passed, cursor = store.walk(cursor, MAX_ORDERED)
            some = self._evict(
                [
                    each
                    for each in passed
                    if each.tenant == tenant and slot_bytes in (0, each.slot_bytes) and each.state is not State.GONE
                ]
            )
            evicted, kept = evicted + some[0], kept + some[1]
            return True

        self._context.in_slices(work)

    def save(self, limit_s: float) -> None:
        """The daemon is about to end: write what is in memory only to the disks and to the cold tier, for at most
        `limit_s`; then `Saved`."""
        saved: list[int] = []

        def done(segments: int) -> None:
            saved.append(segments)
            if len(saved) == 2:
                self._context.emit(Saved(sum(saved)))

        self._cold.save(limit_s, done)
        self._disk.save(limit_s, done)

    def _evict(self, segments: list[Segment]) -> tuple[int, int]:
        """Evict those of the segments that are READY, and discard those on their way. Returns how many were evicted,
        and how many stay because an engine is writing them."""
        evicted = kept = 0
        for segment in segments:
            if segment.state is State.READY:
                self._context.store.evict(segment, self._context.now)
                evicted += 1
            elif segment.kind is Kind.DIRTY:
                kept += 1
            else:
                self._context.store.discard(segment, self._context.now)
        return evicted, kept

    def census(self) -> dict[str, int]:
        return {"ordered evictions": self._under_way}
