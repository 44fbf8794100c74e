"""Writes to the cold tier, and its part in orders of operators and at the end of a daemon.

::

    memory is almost full: the segments of this node that would be evicted next --> admitted? (`disk.admission`)
        |  ColdWrite, in batches; the segments are pinned                              no: evicted, and lost with memory
        v
    ColdWritten --> in the cold tier and in memory --> evicted as any other; a match finds it in the cold tier

Only the owner of a segment writes it, and nothing is written that is always cheaper to compute. The budget bounds the
bytes that this node writes per day. A segment that an operator evicts while it is written is erased behind the write.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tokenlake.core.cold_tier import AGAIN_S, ColdTier
from tokenlake.core.context import Context, Part
from tokenlake.core.departing import LOOK_EVERY, batches, by_value, departing, value_of
from tokenlake.core.events import ColdWritten
from tokenlake.core.instructions import ColdErase, ColdWrite, Note
from tokenlake.disk.admission import DAY_S, TOGETHER_S, Admission, DailyBudget, Refusal
from tokenlake.disk.notes import Note as SegmentNote
from tokenlake.disk.notes import Notes
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import PoolId, Segment, SlotPool
from tokenlake.memory.removals import VOID_RULES
from tokenlake.metrics import Metric
from tokenlake.rate import Rate
from tokenlake.wire import Code
from tokenlake.wire.slots import join_keys

WRITTEN = Metric("tokenlake_cold_written_segments_total", "Segments written to the cold tier", "tenant")
WRITTEN_BYTES = Metric("tokenlake_cold_written_bytes_total", "Bytes of segments written to the cold tier", "tenant")
EXISTED = Metric(
    "tokenlake_cold_existing_segments_total", "Segments that were not written, because the cold tier had them already"
)
FAILED = Metric("tokenlake_cold_failed_segments_total", "Segments whose write to the cold tier failed")
REFUSED = Metric(
    "tokenlake_cold_refused_segments_total", "Segments that were not written to the cold tier, by reason", "reason"
)

SHARE = 0.95
"""Limit of written bytes, as a share of the bytes that memory evicts."""
MAX_WRITING_S = 1.0
"""Maximum seconds of writing under way."""
PINNED_PART = 16
"""Maximum part of a pool's slots (1 / `PINNED_PART`) that writes under way keep pinned; at least one write."""
MANY = 1024
"""Segments that are read at a time where no queue and no latency count: what does not pay then is not written."""
EVICTIONS_HALF_LIFE_S = 300.0
LEAST_PAUSE_S, MOST_PAUSE_S = 5.0, 300.0
"""Seconds without a further write after one that failed whole: the first time, doubled each time, and at most."""
MAX_POOLS = 1024
"""Maximum number of pools whose admission is remembered."""


@dataclass(eq=False)
class _Write:
    """A write under way: its segments, each pinned."""

    tenant: TenantId
    slot_bytes: int
    segments: list[Segment]
    erase: dict[SegmentKey, None] = field(default_factory=dict)
    """Segments that an operator has evicted meanwhile."""

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * len(self.segments)


class Cold(Part):
    """Decides what this node writes to the cold tier."""

    def __init__(self, context: Context, tier: ColdTier, bytes_per_day: float) -> None:
        """`bytes_per_day`: limit of the bytes that this node writes; 0: none."""
        self._context = context
        self._tier = tier
        self._bytes_per_day = bytes_per_day
        self._budget = DailyBudget(bytes_per_day, context.now)
        self._notes = Notes()
        self._writes: dict[int, _Write] = {}
        self._writing: Counter[PoolId] = Counter()
        """Segments of the writes under way, by pool."""
        self._admissions: dict[PoolId, Admission] = {}
        self._evicted = Rate(EVICTIONS_HALF_LIFE_S)
        """Bytes that memory evicts per second."""
        self._evictions = 0
        """Segments that memory evicted since the rules last looked for segments to write."""
        self._pause_s, self._until = LEAST_PAUSE_S, 0.0
        """`_until`: time in seconds before which nothing is written, after a write that failed."""
        self._saving: deque[Segment] | None = None
        """The segments that are still to be written before the daemon ends; None before that."""
        self._saved = 0
        self._done: Callable[[int], None] | None = None
        self._behind: list[Callable[[], None]] = []
        """Calls that wait until no write is under way that has segments to be erased."""

    # -- after each event

    def follow(self, gone: Sequence[Segment]) -> None:
        """Called after each event with the segments that left memory."""
        if not self._tier.ready:
            return
        evicted = Counter(each.pool for each in gone if each.left_by and each.left_by not in VOID_RULES)
        for pool, count in evicted.items():
            self._admission(pool).evicted(count)
            self._evicted.add(count * pool.slot_bytes, self._context.now)
            self._evictions += count
        if self._evictions >= LOOK_EVERY:
            self.look()

    def look(self) -> None:
        """Write the segments that memory would evict next, of those that are admitted."""
        self._evictions = 0
        if self._saving is None and self._done is None and self._may_write():
            for pool in list(self._context.store.pools()):
                self._look_at(pool)

    def _may_write(self) -> bool:
        return self._tier.ready and self._context.now >= self._until

    def _look_at(self, pool: SlotPool) -> None:
        if not self._tier.pays(pool.id, MANY):
            return
        chosen: list[Segment] = []
        for segment in departing(self._context.store, pool):
            if segment.pins or _is_saved(segment) or segment.source is not None:
                continue
            refusal = self._refusal(pool, segment, len(chosen))
            if refusal is None:
                chosen.append(segment)
                continue
            self._context.counters.add_for(REFUSED, 1, str(refusal))
            if refusal is not Refusal.VALUE:
                break
            segment.cold = segment.touched
        self._write(chosen)

    def _refusal(self, pool: SlotPool, segment: Segment, chosen: int) -> Refusal | None:
        store, now = self._context.store, self._context.now
        if not self._has_room(pool, chosen):
            return Refusal.QUEUE
        if self._bytes_per_day and self._budget.left(now) < (chosen + 1) * pool.slot_bytes:
            return Refusal.DAY
        request = segment.hints, int(segment.touched / TOGETHER_S)
        admission, value = self._admission(pool.id), value_of(pool, segment, now)
        refusal = admission.asks(request, store.accesses(segment), value, self._share_of_day())
        if refusal is None:
            admission.wrote(1)
        return refusal

    def _has_room(self, pool: SlotPool, chosen: int) -> bool:
        """Returns True if another segment may be written now, beside `chosen` ones."""
        writing = self._writing[pool.id] + chosen
        nbytes = chosen * pool.slot_bytes + sum(each.nbytes for each in self._writes.values())
        most = MAX_WRITING_S * self._tier.write_rate
        return not writing or (writing < pool.slots // PINNED_PART and nbytes < most)

    def _share_of_day(self) -> float:
        """The share of the bytes evicted from memory that the budget of bytes per day allows to write."""
        if not self._bytes_per_day:
            return 1.0
        return self._bytes_per_day / DAY_S / max(1.0, self._evicted.at(self._context.now))

    def _admission(self, pool: PoolId) -> Admission:
        known = self._admissions.get(pool)
        if known is None:
            if len(self._admissions) >= MAX_POOLS:
                del self._admissions[next(iter(self._admissions))]
            known = self._admissions[pool] = Admission(SHARE)
        return known

    def _write(self, segments: Iterable[Segment]) -> None:
        store, notes = self._context.store, self._notes
        for _, batch in batches(segments, lambda segment: segment.tenant):
            number, first = self._context.next_id(), batch[0]
            store.pin(*batch)
            self._writes[number] = write = _Write(first.tenant, first.slot_bytes, batch)
            self._writing[first.pool] += len(batch)
            self._budget.spend(write.nbytes, self._context.now)
            for segment in batch:
                segment.cold = segment.touched
            self._context.emit(
                ColdWrite(
                    number,
                    first.tenant,
                    first.slot_bytes,
                    len(first.checksums) // 8,
                    join_keys(segment.key for segment in batch),
                    b"".join(segment.packed for segment in batch),
                    b"".join(segment.checksums for segment in batch),
                    b"".join(notes.pack(SegmentNote(each.depth, store.accesses(each), each.hints)) for each in batch),
                )
            )

    def written(self, event: ColdWritten) -> None:
        """Handle the end of a write."""
        write = self._writes.pop(event.write)
        assert len(event.codes) == len(write.segments)
        counters, now = self._context.counters, self._context.now
        done, existed = event.codes.count(Code.COMMITTED), event.codes.count(Code.EXISTS)
        for segment, code in zip(write.segments, event.codes, strict=True):
            if code == Code.EXISTS:
                self._admission(segment.pool).wrote(-1)
            if code in (Code.COMMITTED, Code.EXISTS):
                segment.cold = segment.touched + AGAIN_S
            self._writing[segment.pool] -= 1
            self._context.store.unpin(segment)
        self._writing = +self._writing
        if write.erase:
            self._context.emit(ColdErase(write.tenant, join_keys(write.erase)))
            if not self._has_to_erase():
                behind, self._behind = self._behind, []
                for call in behind:
                    call()
        failed = len(write.segments) - done - existed
        # Bytes that were not written may be written later.
        self._budget.spend(-(failed + existed) * write.slot_bytes, now)
        counters.add_for(WRITTEN, done, write.tenant)
        counters.add_for(WRITTEN_BYTES, done * write.slot_bytes, write.tenant)
        counters.add(EXISTED, existed)
        counters.add(FAILED, failed)
        if failed == len(write.segments):
            self._until, self._pause_s = now + self._pause_s, min(MOST_PAUSE_S, 2 * self._pause_s)
        else:
            self._pause_s = LEAST_PAUSE_S
        if self._saving is not None:
            self._saved += done
            self._save_some()
        else:
            self.look()

    # -- orders

    def erase(self, tenant: TenantId, keys: Sequence[SegmentKey], slot_bytes: int) -> None:
        """An operator evicts these segments; none: all of the tenant, of the size `slot_bytes` if it is not 0."""
        named = dict.fromkeys(keys)
        for write in self._writes.values():
            if write.tenant == tenant and (keys or slot_bytes in (0, write.slot_bytes)):
                write.erase |= {each.key: None for each in write.segments if not keys or each.key in named}
        if self._tier.ready:
            self._context.emit(ColdErase(tenant, join_keys(keys), slot_bytes))

    def when_erased(self, call: Callable[[], None]) -> None:
        """Call `call` now or, while segments that were evicted are being written, behind the orders to erase them."""
        if self._has_to_erase():
            self._behind.append(call)
        else:
            call()

    def _has_to_erase(self) -> bool:
        return any(write.erase for write in self._writes.values())

    # -- the end of the daemon

    def save(self, limit_s: float, done: Callable[[int], None]) -> None:
        """Write the segments of this node that the cold tier lacks, those of the highest retention value first, for at
        most `limit_s` and without regard to the budget; then call `done` with the number of those that were written."""
        self._done = done
        self._saving = deque()
        if self._tier.ready:
            self._saving.extend(by_value(self._context.store, self._context.now, _is_saved))
            self._context.after(limit_s, self._stop_saving)
        self._save_some()

    def _stop_saving(self) -> None:
        if self._saving:
            self._context.emit(Note(f"the cold tier was too slow for {len(self._saving)} segments in memory"))
            self._saving.clear()

    def _save_some(self) -> None:
        waiting, store, chosen = self._saving, self._context.store, list[Segment]()
        assert waiting is not None
        if not self._may_write():
            waiting.clear()
        while waiting:
            segment = waiting[0]
            pool = store.pool(segment.tenant, segment.slot_bytes)
            if pool is not None and segment.owned and not _is_saved(segment):
                if not self._has_room(pool, len(chosen)):
                    break
                chosen.append(segment)
            waiting.popleft()
        self._write(chosen)
        if not self._writes and self._done is not None and self._saving is not None:
            self._saving = None
            self._done(self._saved)

    # -- checks

    def pinned(self) -> Iterator[Segment]:
        for write in self._writes.values():
            yield from write.segments

    def census(self) -> dict[str, int]:
        return {"cold writes": len(self._writes), "orders behind cold writes": len(self._behind)}

    def check_integrity(self) -> None:
        counted = Counter(segment.pool for write in self._writes.values() for segment in write.segments)
        assert self._writing == counted
        for write in self._writes.values():
            assert all(segment.pins for segment in write.segments)
        assert self._has_to_erase() or not self._behind


def _is_saved(segment: Segment) -> bool:
    """Returns True if the segment was offered to the tier since its last access, or the tier has it."""
    return segment.touched <= segment.cold
