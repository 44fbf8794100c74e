"""The disk tier in the rules: segments are written before memory evicts them, and read back like segments of another
node.

::

    memory is almost full: the segments that would be evicted next --> admitted? (`tokenlake.disk.admission`)
        |  DiskWrite, in batches; the segments are pinned                    no: evicted as without a disk
        v
    DiskWritten --> on disk and in memory --> evicted from memory, before segments that are in memory alone: this
                                                     |  node goes on owning it, the directory keeps it
                                                     |  a match of this node, or a pull of another one
                                                     v
                              `Transfers.bring` from this node itself: DiskRead into reserved slots --> FetchDone

A segment on a device of this node is REMOTE for the engines of the node, leased at the node itself: a fetch brings it.
While it is read, its place keeps its bytes. For `peer_lease_s` after a match or a lookup the segment is not evicted
from disk, so that its reader can fetch it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.found import TOLD, Found
from tokenlake.core.context import Context, Part
from tokenlake.core.events import DiskErased, DiskFound, DiskReady, DiskRecovered, DiskWritten
from tokenlake.core.instructions import DiskErase, DiskForget, DiskTrim, DiskWrite, Note, Saved
from tokenlake.disk import Place, pack_places, unpack_places
from tokenlake.disk.admission import Refusal
from tokenlake.disk.entries import Forgotten
from tokenlake.disk.places import NOTE_BYTES
from tokenlake.disk.slab import Device, Slab
from tokenlake.hints import NO_ACCESS
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, SlotPool, State
from tokenlake.memory.removals import CORRUPT_RULE, DISK_GONE_RULE, OPERATOR_RULE, VOID_RULES
from tokenlake.metrics import Metric
from tokenlake.wire import Code
from tokenlake.wire.slots import join_keys, split_keys

WRITTEN = Metric("tokenlake_disk_written_segments_total", "Segments written to disk", "tenant")
WRITTEN_BYTES = Metric("tokenlake_disk_written_bytes_total", "Bytes of segments written to disk", "tenant")
ERASED = Metric("tokenlake_disk_erased_segments_total", "Segments on disk that were erased by an order of an operator")
NOT_ERASED = Metric(
    "tokenlake_disk_not_erased_segments_total",
    "Segments on disk that an operator evicted and that could not be erased at once",
)
FAILED = Metric("tokenlake_disk_failed_segments_total", "Segments whose write to disk failed")
REFUSED = Metric(
    "tokenlake_disk_refused_segments_total", "Segments that the disk tier did not admit, by reason", "reason"
)
EVICTED = Metric("tokenlake_disk_evicted_segments_total", "Segments that left the disk tier for want of space")
KEPT = Metric("tokenlake_disk_kept_segments_total", "Segments that memory evicted and that stay on disk")

LOOK_EVERY = 8
"""Evictions after which the rules look for further segments to write."""
AHEAD_PART, LEAST_AHEAD, MOST_AHEAD = 4, 64, 1024
"""The segments that are examined for a write: those that would be evicted next, a quarter of the slots, within these
limits."""
WRITE_SEGMENTS, WRITE_BYTES = 64, 64 << 20
"""Limits of one write; it has at least one segment."""


class _Write(NamedTuple):
    """A write under way: its segments, each pinned, and their entries."""

    slab: Slab
    segments: list[Segment]
    entries: list[int]


class _Erase(NamedTuple):
    """The erasure of some places of a slab, under way."""

    slab: Slab
    slots: list[int]


@dataclass(eq=False)
class Erasure:
    """All erasures that belong to one order, from its begin on."""

    devices: dict[int, Device]
    """The devices all of whose segments are known when it begins, and that have not failed since."""
    done: Callable[[tuple[int, ...]], None]
    """Takes the devices on which everything was erased."""
    waiting: set[int] = field(default_factory=set)
    """Numbers of writes and erasures that have not ended."""
    complete: bool = False
    """True once the order has found all its segments."""


class Disk(Part):
    """Decides what is written to the devices of this node, and keeps the directory informed."""

    def __init__(self, context: Context, directory_node: DirectoryNode) -> None:
        self._context = context
        self._tier = context.disk
        self._directory_node = directory_node
        self._writes: dict[int, _Write] = {}
        self._erases: dict[int, _Erase] = {}
        self._erasures: list[Erasure] = []
        self._evictions = 0
        """Segments that memory evicted since the rules last looked for segments to write."""
        self._found = Found(context, directory_node, lambda tenant, key: self._tier.find(tenant, key) >= 0)
        self._saving: deque[Segment] | None = None
        """The segments that are still to be written before the daemon ends; None before that."""
        self._saved = 0
        self._ended = False
        """True once everything was saved: the daemon ends."""

    # -- after each event

    def follow(self, gone: Sequence[Segment]) -> list[Segment]:
        """Called after each event with the segments that left memory: those on disk stay there, or are void too; then
        segments are written that memory would evict next. Returns those that this node does not have any more and that
        a directory node may name."""
        store, tier, now = self._context.store, self._tier, self._context.now
        self._emit_void()
        left = [segment for segment in gone if segment.disk >= 0]
        for segment in left:
            void = segment.left_by in VOID_RULES
            keep = not void and segment.source is None
            if tier.left(segment, store.accesses(segment), keep=keep, erase=void):
                self._context.counters.add(KEPT)
        if left:
            # The caller tells the directory nodes of these, as of all segments that leave memory.
            self._emit_void(tell=False)
        if tier.devices:
            evicted = (each.pool for each in gone if each.left_by and each.left_by not in VOID_RULES)
            for pool, count in Counter(evicted).items():
                tier.evicted(pool.tenant, pool.slot_bytes, count, now)
                self._evictions += count
        if self._evictions >= LOOK_EVERY:
            self.look()
        self._complete()
        named = (each for each in gone if each.left_by == CORRUPT_RULE or (each.left_by and each.owns))
        return [each for each in named if tier.find(each.tenant, each.key) < 0]

    # -- writing

    def look(self) -> None:
        """Write the segments that memory would evict next, of those that are admitted."""
        self._evictions = 0
        if not self._tier.devices:
            return
        self._tier.expire(self._context.now)
        if self._saving is not None or self._ended:
            return
        for pool in list(self._context.store.pools()):
            self._look_at(pool)

    def _look_at(self, pool: SlotPool) -> None:
        store, now = self._context.store, self._context.now
        ahead = max(LEAST_AHEAD, min(MOST_AHEAD, pool.slots // AHEAD_PART))
        ahead -= len(pool.free) + store.room(pool)
        if ahead <= 0:
            return
        chosen: list[Segment] = []
        for segment in self._next_victims(pool, ahead):
            if segment.disk >= 0 or segment.pins or segment.asked == segment.touched or segment.source is not None:
                continue
            verdict = self._tier.admit(segment, store.accesses(segment), self._value(pool, segment), now)
            if not isinstance(verdict, Refusal):
                chosen.append(segment)
                continue
            self._context.counters.add_for(REFUSED, 1, str(verdict))
            if verdict is not Refusal.VALUE:
                break
            segment.asked = segment.touched
        self._write(chosen)

    def _next_victims(self, pool: SlotPool, ahead: int) -> Iterator[Segment]:
        """Yields segments of a pool that would be evicted next: at most `ahead` cached copies, then at most `ahead`
        primary copies, as the orders are when the first of each kind is asked for."""
        yield from list(islice(pool.orders[Kind.CACHED], ahead))
        yield from list(islice(pool.primary, ahead))

    def _value(self, pool: SlotPool, segment: Segment) -> float:
        """The retention value of a READY segment that this node owns."""
        return pool.orders[segment.kind].retention_value(segment, self._context.now)

    def _write(self, segments: Iterable[Segment]) -> None:
        """Write segments whose entries have just been made."""
        self._emit_void()
        batches: dict[tuple[int, int], _Write] = {}
        for segment in segments:
            slab = self._tier.slab(segment.disk)
            name = slab.number, len(segment.checksums)
            batch = batches.get(name)
            if batch is None:
                batch = batches[name] = _Write(slab, [], [])
            self._context.store.pin(segment)
            batch.segments.append(segment)
            batch.entries.append(segment.disk)
            if len(batch.segments) == WRITE_SEGMENTS or (len(batch.segments) + 1) * slab.slot_bytes > WRITE_BYTES:
                self._order(batches.pop(name))
        for batch in batches.values():
            self._order(batch)

    def _order(self, batch: _Write) -> None:
        number = self._context.next_id()
        self._writes[number] = batch
        slab, tier = batch.slab, self._tier
        self._context.emit(
            DiskWrite(
                number,
                slab.device.number,
                slab.tenant,
                slab.slot_bytes,
                tier.shards(batch.entries[0]),
                join_keys(segment.key for segment in batch.segments),
                b"".join(segment.packed for segment in batch.segments),
                pack_places(tier.place(entry) for entry in batch.entries),
                b"".join(segment.checksums for segment in batch.segments),
                b"".join(tier.packed_note(entry) for entry in batch.entries),
            )
        )

    def written(self, event: DiskWritten) -> None:
        """Handle the end of a write."""
        batch = self._writes.pop(event.write)
        assert len(event.codes) == len(batch.segments)
        store, done = self._context.store, 0
        for segment, entry, code in zip(batch.segments, batch.entries, event.codes, strict=True):
            done += code == Code.COMMITTED
            self._tier.written(entry, segment, code == Code.COMMITTED)
            store.unpin(segment)
        counters, tenant = self._context.counters, batch.slab.tenant
        counters.add_for(WRITTEN, done, tenant)
        counters.add_for(WRITTEN_BYTES, done * batch.slab.slot_bytes, tenant)
        counters.add(FAILED, len(batch.segments) - done)
        self._emit_void()
        self._one_ended(event.write)
        if self._saving is not None:
            self._saved += done
            self._save_some()
        else:
            self.look()

    # -- erasing

    def begin_erasure(self, done: Callable[[tuple[int, ...]], None]) -> Erasure:
        """An order begins to erase segments; `end_erasure` follows. `done` is called behind it, once all that was begun
        meanwhile has ended, with the numbers of the devices on which nothing is left."""
        known = {number: each for number, each in self._tier.devices.items() if each.writable and not each.unerased}
        erasure = Erasure(known, done, set(self._erases))
        self._erasures.append(erasure)
        return erasure

    def end_erasure(self, erasure: Erasure) -> None:
        """The order has found all its segments; after this event all of them have left."""
        erasure.complete = True

    def erased(self, event: DiskErased) -> None:
        """Handle the end of an erasure."""
        slab, slots = self._erases.pop(event.erase)
        for slot in slots:
            self._tier.end_read(slab, slot, self._context.now)
        failed = event.codes.count(Code.LOST)
        self._context.counters.add(ERASED, len(slots) - failed)
        self._context.counters.add(NOT_ERASED, failed)
        if failed:
            slab.device.unerased = True
            for erasure in self._erasures:
                erasure.devices.pop(slab.device.number, None)
        self._one_ended(event.erase)

    def _one_ended(self, number: int) -> None:
        """A write or an erasure has ended."""
        for erasure in self._erasures:
            erasure.waiting.discard(number)

    def _complete(self) -> None:
        """Complete the orders that have found all their segments and wait for nothing else."""
        devices = self._tier.devices
        for erasure in [each for each in self._erasures if each.complete]:
            if not erasure.waiting and not any(map(self._has_to_erase, self._writes.values())):
                self._erasures.remove(erasure)
                erasure.done(tuple(each for each, then in erasure.devices.items() if devices.get(each) is then))

    def _has_to_erase(self, batch: _Write) -> bool:
        """Returns True if some segments of a write have to be erased when it has ended."""
        return any(map(self._tier.erases_when_written, batch.entries))

    # -- leaving the disk

    def forget(self, tenant: TenantId, keys: Iterable[SegmentKey], rule: str) -> int:
        """Drop the copies on disk of these segments; those that are being written stay. `rule`: the reason, for the log
        of removals. Returns how many were dropped."""
        dropped = 0
        for key in keys:
            entry = self._tier.find(tenant, key)
            if entry >= 0:
                self._tier.forget(entry, rule, erase=rule == OPERATOR_RULE)
                dropped += 1
        self._emit_void()
        return dropped

    def forget_some(
        self, tenant: TenantId, slot_bytes: int, start: int, entries: int
    ) -> tuple[int, list[Segment], int | None]:
        """Drop the tenant's copies on disk (of the size `slot_bytes`, if it is not 0) of the entries from `start` on.
        The reason is an order of an operator. Returns how many segments were on disk alone, those of their keys that
        are in memory or reserved there, and the number at which to continue (None at the end)."""
        found, behind = self._tier.walk(start, entries)
        index, dropped, here = self._context.store.index(tenant), 0, list[Segment]()
        for entry in found:
            slab = self._tier.slab(entry)
            if slab.tenant == tenant and slot_bytes in (0, slab.slot_bytes):
                known = index.get(self._tier.key(entry))
                if known is not None:
                    here.append(known)
                dropped += entry not in slab.resident
                self._tier.forget(entry, OPERATOR_RULE, erase=True)
        self._emit_void()
        return dropped, here, behind

    def _emit_void(self, *, tell: bool = True) -> None:
        """Tell the file layer which segments on disk are void, and, if `tell`, the directory nodes of those that this
        node does not have any more."""
        tier, context = self._tier, self._context
        forgotten = tier.take_void()
        if forgotten:
            context.counters.add(EVICTED, sum(each.evicted for each in forgotten))
            by_slab: dict[tuple[int, str, bool], list[Forgotten]] = {}
            for each in forgotten:
                by_slab.setdefault((each.slab.number, each.rule, each.erase), []).append(each)
            for (_, rule, erase), those in by_slab.items():
                slab = those[0].slab
                keys, places = [each.key for each in those], pack_places(each.place for each in those)
                where = slab.device.number, slab.tenant, slab.slot_bytes, join_keys(keys), places
                if erase:
                    number = context.next_id()
                    self._erases[number] = _Erase(slab, [each.place.slot for each in those])
                    for erasure in self._erasures:
                        erasure.waiting.add(number)
                    context.emit(DiskErase(number, *where))
                else:
                    context.emit(DiskForget(*where))
                if tell:
                    self._tell_gone(slab.tenant, keys, rule)
        for slab in tier.take_trimmed():
            context.emit(DiskTrim(slab.device.number, slab.tenant, slab.slot_bytes, len(slab.entries)))

    def _tell_gone(self, tenant: TenantId, keys: Sequence[SegmentKey], rule: str) -> None:
        index = self._context.store.index(tenant)
        absent = (key for key in keys if (here := index.get(key)) is None or here.state is not State.READY)
        # A device that was set aside may have been found again meanwhile.
        gone = [key for key in absent if self._tier.find(tenant, key) < 0]
        if gone:
            for key in gone:
                self._context.removals.add(tenant, key, self._context.now, rule)
            self._directory_node.tell_evicted(tenant, gone, rule, NO_ACCESS, 0.0)

    # -- devices

    def ready(self, event: DiskReady) -> None:
        """A device can be used."""
        self._tier.ready(
            event.device, event.capacity_bytes, event.read_bytes_per_s, event.write_bytes_per_s, self._context.now
        )

    def recovered(self, event: DiskRecovered) -> None:
        """Everything on a device was found. Its slabs give back what is behind their last segment."""
        self._tier.recovered(event.device)
        self._emit_void()

    def found(self, event: DiskFound) -> None:
        """Take segments that were found on a device. The directory nodes are told of them at a bounded rate."""
        tenant, keys, places = TenantId(event.tenant), split_keys(event.keys), unpack_places(event.places)
        assert event.device in self._tier.devices
        assert len(places) == len(keys) == len(event.notes) // NOTE_BYTES
        index = self._context.store.index(tenant)
        taken: list[SegmentKey] = []
        refused: list[tuple[SegmentKey, Place]] = []
        for at, (key, place) in enumerate(zip(keys, places, strict=True)):
            note = event.notes[at * NOTE_BYTES : (at + 1) * NOTE_BYTES]
            found = key, place, event.shards, note
            entry = self._tier.found(event.device, tenant, event.slot_bytes, found, self._context.now)
            if entry is None:
                refused.append((key, place))
                continue
            known = index.get(key)
            if known is None or known.state is not State.READY:
                # A copy that is still being written or fetched may never become READY.
                taken.append(key)
            elif known.disk < 0:
                self._tier.arrived(known)
        if refused:
            packed = pack_places(place for _, place in refused)
            void = join_keys(key for key, _ in refused)
            self._context.emit(DiskForget(event.device, tenant, event.slot_bytes, void, packed))
        self._found.add(tenant, taken)

    def gone(self, device: int) -> None:
        """Handle the loss of a device: the segments on it count as evicted."""
        if device not in self._tier.devices:
            return
        self._tier.gone(device)

        def work() -> bool:
            by_tenant: dict[TenantId, list[SegmentKey]] = {}
            for tenant, key in self._tier.sweep(TOLD):
                by_tenant.setdefault(tenant, []).append(key)
            for tenant, keys in by_tenant.items():
                self._tell_gone(tenant, keys, DISK_GONE_RULE)
            return bool(by_tenant)

        self._context.in_slices(work, later=True)
        if self._saving is not None:
            self._save_some()

    # -- the end of the daemon

    def save(self, limit_s: float) -> None:
        """Write the segments that are in memory only, those of the highest retention value first, for at most
        `limit_s`; then `Saved`."""
        found: list[tuple[float, int, int, Segment]] = []
        for pool in self._context.store.pools():
            for segment in self._context.store.index(pool.tenant).values():
                if segment.pool == pool.id and segment.owned and segment.disk < 0:
                    found.append((-self._value(pool, segment), segment.depth, len(found), segment))
        self._saving = deque(segment for *_, segment in sorted(found, key=lambda each: each[:3]))
        self._saved = 0
        self._context.after(limit_s, self._stop_saving)
        self._save_some()

    def _stop_saving(self) -> None:
        if self._saving:
            self._context.emit(Note(f"the disk was too slow for {len(self._saving)} segments in memory"))
            self._saving.clear()

    def _save_some(self) -> None:
        waiting, store, chosen = self._saving, self._context.store, list[Segment]()
        assert waiting is not None
        while waiting:
            segment = waiting[0]
            if segment.owned and segment.disk < 0:
                pool = store.pool(segment.tenant, segment.slot_bytes)
                assert pool is not None
                value = self._value(pool, segment)
                verdict = self._tier.save(segment, store.accesses(segment), value, self._context.now)
                if verdict is Refusal.QUEUE:
                    break
                if not isinstance(verdict, Refusal):
                    chosen.append(segment)
            waiting.popleft()
        self._write(chosen)
        if not self._writes and self._saving is not None:
            # No write is under way: either all is written, or no device can be written.
            self._saving, self._ended = None, True
            self._context.emit(Saved(self._saved))

    # -- checks

    def pinned(self) -> Iterator[Segment]:
        for batch in self._writes.values():
            yield from batch.segments

    def census(self) -> dict[str, int]:
        return {
            "disk writes": len(self._writes),
            "disk erasures": len(self._erases) + len(self._erasures),
            "segments to advertise": len(self._found),
        }

    def check_integrity(self) -> None:
        self._tier.check_integrity()
        for segment in self._context.store.segments():
            if segment.disk >= 0:
                assert self._tier.key(segment.disk) == segment.key
        writing = Counter(entry for batch in self._writes.values() for entry in batch.entries)
        assert all(count == 1 for count in writing.values())
