"""Prefetches: segments that a router, an operator or an engine wants in the memory of this node before a request comes.

::

    Prefetch --> in memory here
                 on a disk of this node ------------------------------> read
                 from the node that the caller names as the source ---> transferred
                     | and what that node does not bring
                     v
                 `Survey`: the owners by the directory ---------------> transferred
                     | and what no node has
                     v
                 the cold tier ----------------------------------------> read
                     | all have come, or were given up at their deadlines
                     v
                 pinned, if the caller says for how long; one code per key

The segments arrive as cached copies, in free slots, or in the place of others up to `PREFETCH_SHARE` of the slots: a
wrong prefetch evicts little. It counts as no read. The segments of one prefetch stay in place
until it ends, so that its last one does not evict its first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tokenlake.core.cluster.transfer import MAX_DEADLINE_S, OnArrival, deadline_s
from tokenlake.core.cluster.transfers import Transfers
from tokenlake.core.context import Context, Part
from tokenlake.core.engines.pins import Pins
from tokenlake.core.engines.survey import Survey
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, State
from tokenlake.metrics import Metric
from tokenlake.wire import Code
from tokenlake.wire.slots import split_keys

PREFETCHED = Metric(
    "tokenlake_prefetched_segments_total",
    "Segments that prefetches named, by outcome: `here` (they were in memory), `brought`, `missing` (no node has "
    "them), `lost` (they did not come in time), `refused` (no room, or too many prefetches or pins)",
    "tenant",
    "outcome",
)
PREFETCH_SHARE = 0.03
"""Share of the slots of a pool that the prefetches under way may take beyond the free ones; at least two slots."""
MAX_PREFETCHES = 16
"""Maximum number of prefetches of a tenant under way; further ones are refused."""


@dataclass(eq=False, slots=True)
class Prefetch:
    """One prefetch: consecutive segments of one prompt, the first one at index `first`."""

    tenant: TenantId
    slot_bytes: int
    shards: int
    keys: list[SegmentKey]
    first: int
    source: NodeId
    """The node that is asked first; empty for none."""
    pin_s: float
    """Seconds for which the segments are pinned once they are here; 0: they are not."""
    done: Callable[[bytes], None]
    """Called once with one code per key: LOCAL, MISSING, LOST, PENDING, or a refusal."""
    codes: bytearray = field(default_factory=bytearray)
    here: dict[int, Segment] = field(default_factory=dict)
    """The segments that are here, pinned by the prefetch, by index of their key."""
    brought: int = 0
    """Number of those that were brought here."""
    awaited: int = 0


class Prefetches(Part):
    """All prefetches under way."""

    def __init__(self, context: Context, survey: Survey, transfers: Transfers, pins: Pins) -> None:
        self._context = context
        self._survey = survey
        self._transfers = transfers
        self._pins = pins
        self._under_way: dict[Prefetch, None] = {}

    def begin(
        self,
        tenant: TenantId,
        slot_bytes: int,
        shards: int,
        packed: bytes,
        first: int,
        source: str,
        pin_s: float,
        done: Callable[[bytes], None],
    ) -> None:
        """Begin a prefetch; arguments as of `Prefetch`."""
        keys = split_keys(packed)
        one = Prefetch(tenant, slot_bytes, shards, keys, first, NodeId(source), pin_s, done)
        one.codes = bytearray([Code.MISSING]) * len(keys)
        if sum(each.tenant == tenant for each in self._under_way) >= MAX_PREFETCHES:
            one.codes = bytearray([Code.SESSION_LIMIT]) * len(keys)
            self._finish(one)
            return
        self._under_way[one] = None
        found = self._context.ready(tenant, keys)
        for index, segment in enumerate(found):
            if segment is not None:
                self._context.store.pin(segment)
                one.here[index] = segment
                one.codes[index] = Code.LOCAL
        wanted = self._limited(one, [index for index, segment in enumerate(found) if segment is None])
        on_disk = self._context.on_disk(tenant, keys, found)
        by_node: dict[NodeId, list[int]] = {}
        for index in wanted:
            node = self._context.node if index in on_disk else one.source
            by_node.setdefault(node, []).append(index)
        unknown = by_node.pop(NodeId(""), [])
        if one.source and one.source != self._context.node and not self._transfers.delivers(one.source):
            unknown += by_node.pop(one.source, [])
        self._bring(one, by_node, partial(self._locate, one, sorted(unknown)))

    def _limited(self, one: Prefetch, wanted: list[int]) -> list[int]:
        """Returns those of the indices for which there is room, from the first on; the others are refused."""
        pool = self._context.store.pool(one.tenant, one.slot_bytes)
        if pool is None or not wanted:
            for index in wanted:
                one.codes[index] = self._context.store.refusal(one.tenant, one.slot_bytes, Code.NO_REGION)
            return []
        coming = sum(each.brought + each.awaited for each in self._under_way if each.tenant == one.tenant)
        least = max(2, int(PREFETCH_SHARE * pool.slots))
        room = max(len(pool.free) + self._context.store.room(pool), least) - coming
        limits = [(room, Code.NO_SLOT)]
        if one.pin_s:
            to_pin = self._pins.unpinned(one.here.values())
            limits.append((self._pins.room(one.tenant, one.slot_bytes) - to_pin, Code.QUOTA))
        most, code = min(limits)
        for index in wanted[max(0, most) :]:
            one.codes[index] = code
        return wanted[: max(0, most)]

    def _bring(self, one: Prefetch, by_node: dict[NodeId, list[int]], then: Callable[[], None]) -> None:
        """Transfer segments from these nodes, and call `then` when all have come or were given up."""
        one.awaited = sum(map(len, by_node.values()))
        if not one.awaited:
            then()
            return
        for node, indices in by_node.items():
            keys = [one.keys[index] for index in indices]
            predicted_s = self._transfers.predict_s(node, one.tenant, keys, one.slot_bytes)
            wanted: list[tuple[SegmentKey, int, OnArrival]] = [
                (one.keys[index], one.first + index, partial(self._arrived, one, index, then)) for index in indices
            ]
            self._transfers.bring(
                node,
                one.tenant,
                wanted,
                kind=Kind.CACHED,
                slot_bytes=one.slot_bytes,
                shards=one.shards,
                wait_s=min(MAX_DEADLINE_S, deadline_s(predicted_s)),
                cold=True,
            )

    def _arrived(
        self, one: Prefetch, index: int, then: Callable[[], None], segment: Segment | None, code: Code
    ) -> None:
        one.awaited -= 1
        one.codes[index] = code
        if segment is not None:
            one.here[index] = segment
            one.brought += 1
        if not one.awaited:
            then()

    def _locate(self, one: Prefetch, unknown: Sequence[int]) -> None:
        """Ask the directory for the segments without a known source, and for those that their source did not bring."""
        failed = [index for index, code in enumerate(one.codes) if code in (Code.LOST, Code.BAD_CHECKSUM)]
        wanted = sorted({*unknown, *failed})
        if not wanted:
            self._look_into_cold(one)
            return

        def take(owners: dict[SegmentKey, tuple[NodeId, ...]]) -> None:
            by_node: dict[NodeId, list[int]] = {}
            for index in wanted:
                nodes = owners.get(one.keys[index], ())
                able = [node for node in nodes if self._transfers.delivers(node)]
                one.codes[index] = Code.LOST if nodes else Code.MISSING
                if able:
                    by_node.setdefault(able[0], []).append(index)
            self._bring(one, by_node, partial(self._look_into_cold, one))

        self._survey.find(one.tenant, [one.keys[index] for index in wanted], take)

    def _look_into_cold(self, one: Prefetch) -> None:
        """Read what no node has from the cold tier, if it is there."""
        tier = self._transfers.cold.tier
        missing = [index for index, code in enumerate(one.codes) if code == Code.MISSING]
        if not missing or not tier.readable:
            self._finish(one)
            return

        def take(found: list[bool]) -> None:
            there = [index for index, each in zip(missing, found, strict=True) if each]
            self._bring(one, {self._context.node: there}, partial(self._finish, one))

        tier.look(one.tenant, one.slot_bytes, one.shards, [one.keys[index] for index in missing], take)

    def _finish(self, one: Prefetch) -> None:
        store, now = self._context.store, self._context.now
        segments = [one.here[index] for index in sorted(one.here)]
        if one.pin_s:
            for index, kept in zip(sorted(one.here), self._pins.pin(segments, one.pin_s), strict=True):
                if not kept:
                    one.codes[index] = Code.QUOTA
        for index, segment in one.here.items():
            if segment.state is not State.READY:
                one.codes[index] = Code.LOST
        # The request that follows finds the cached copies, so they leave after those that wait for no request.
        cached = [each for each in segments if each.state is State.READY and each.kind is Kind.CACHED]
        store.touch(cached, now)
        store.unpin(*segments)
        self._under_way.pop(one, None)
        self._count(one)
        one.done(bytes(one.codes))

    def _count(self, one: Prefetch) -> None:
        codes = Counter(one.codes)
        here = codes[Code.LOCAL]
        refused = sum(count for code, count in codes.items() if Code(code).refused and code != Code.BAD_CHECKSUM)
        brought = min(one.brought, here)
        missing = codes[Code.MISSING]
        outcomes = {
            "here": here - brought,
            "brought": brought,
            "missing": missing,
            "refused": refused,
            "lost": len(one.codes) - here - missing - refused,
        }
        for outcome, count in outcomes.items():
            self._context.counters.add_for(PREFETCHED, count, one.tenant, outcome)

    # -- checks

    def pinned(self) -> Iterator[Segment]:
        for one in self._under_way:
            yield from one.here.values()

    def census(self) -> dict[str, int]:
        return {"prefetches": len(self._under_way)}
