"""The account of a match: what became of each token that an engine asked for. A match is not a read: the engine says at
the release of the lease which segments it has read, and which tokens its own cache had.

::

    tokens of the prompt  0      start          stop           hits                    asked
                          |------|--------------|--------------|-----------------------|
                          engine   supplied if    skipped        missed, each segment for
                          had it   it was read                   the reason of its code

All tokens are counted together when the lease ends, so that at any time and for each match
`asked = supplied + engine_had + missed`, where `missed` has all reasons, `skipped`, `pending` and `unreported` too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tokenlake.core.report.misses import MISSED, Beyond, count_beyond, count_missed, missed_beyond
from tokenlake.identity import TenantId
from tokenlake.metrics import Counters, Metric
from tokenlake.wire.funnel import MissReason

ASKED = Metric(
    "tokenlake_asked_tokens_total",
    "Tokens that engines asked for, counted when they release the match: those of full segments and, where the engine "
    "gives the length of the prompt, those behind the last full segment",
    "tenant",
)
SUPPLIED = Metric(
    "tokenlake_supplied_tokens_total",
    "Tokens that engines read from the pool, by source: `local` from this node's memory, `fetched` from another node, "
    "`disk` from this node's disk, `cold` from the cold tier, `shipped` used at the node that has them, by queries",
    "tenant",
    "source",
)
ENGINE_HAD = Metric(
    "tokenlake_engine_had_tokens_total",
    "Tokens that engines asked for and had in their own caches, so that they did not need them from the pool",
    "tenant",
)
READ_BYTES = Metric(
    "tokenlake_read_bytes_total", "Bytes of segments that engines of this node read from its arena", "tenant"
)
SAVED = Metric(
    "tokenlake_saved_prefill_milliseconds_total",
    "Time in which the engines would have computed the supplied tokens, as predicted by their own measurements; not "
    "counted before an engine has measured 8 prefills",
    "tenant",
)


class Source(StrEnum):
    """The place from which an engine has read tokens."""

    LOCAL = "local"
    FETCHED = "fetched"
    DISK = "disk"
    COLD = "cold"
    SHIPPED = "shipped"


Lost = tuple[MissReason, str]
"""Why the tokens of a leased segment were not supplied: (reason, detail)."""
Fate = Source | Lost

_KNOWN: tuple[Fate | None, ...] = (None, *Source, (MissReason.SKIPPED, ""), (MissReason.UNREPORTED, ""))
_OPEN, LOCAL, FETCHED, DISK, COLD, SHIPPED, SKIPPED, UNREPORTED = range(len(_KNOWN))
"""Fates of most items, as bytes in `Account`; larger ones are indices of `Account._lost`. An item without a fate is
open: it is neither read nor released."""
MAX_FATES = 255
ALL = 1 << 62
"""A number of tokens beyond the end of every prompt."""


class Sums(NamedTuple):
    """The tokens of an account."""

    asked: int
    engine_had: int
    supplied: Counter[Source]
    lost: Counter[Lost]
    """Tokens of leased segments that were not supplied."""
    held: int
    """Tokens of segments that are leased and neither read nor released."""


@dataclass(eq=False, slots=True)
class Account:
    """The tokens of one match, until its lease ends. An item is a segment that the match leases."""

    tenant: TenantId
    size: int
    """Number of tokens of a segment; 0: the segments stand for no tokens."""
    slot_bytes: int
    counted: int
    """Number of keys of the match, from the first on, whose segments stand for tokens of the prompt."""
    tail: int
    """Number of tokens of the prompt behind the segments of the keys; negative: so many are missing in the last
    segment."""
    places: Sequence[int]
    """Index of the key of each item, ascending."""
    beyond: Beyond
    """The other keys."""
    independent: bool = False
    """True: where the engine says which tokens it took, all of them are supplied as soon as it has read one of their
    segments, because a group with a window needs the last ones only."""
    fates: bytearray = field(init=False)
    sources: bytearray = field(init=False)
    """For each item, the fate that a read of it in this node's arena has."""
    read: bytearray = field(init=False)
    """For each item, 1 once a process has read it."""
    start: int = 0
    stop: int = ALL
    saved_s: float = 0.0
    """As of `took`."""
    _lost: list[Fate] = field(default_factory=list)

    def __post_init__(self) -> None:
        items = len(self.places)
        self.fates, self.read, self.sources = bytearray(items), bytearray(items), bytearray([LOCAL]) * items

    @property
    def asked(self) -> int:
        """Number of tokens that the engine asked for."""
        return self.counted * self.size + self.tail

    # -- what happens

    def took(self, start: int, stop: int, saved_s: float) -> None:
        """The engine's own cache had the tokens before `start`, and the engine needs none from `stop` on. `saved_s`:
        the seconds in which it would have computed those between; 0: unknown. A later call replaces an earlier one."""
        self.start, self.stop, self.saved_s = start, max(start, stop), saved_s

    def arrived(self, index: int, source: Source) -> None:
        """The segment of an item came to this node's arena from `source`."""
        self.sources[index] = _KNOWN.index(source)

    def lose(self, index: int, reason: MissReason, detail: str) -> None:
        """An item cannot be read any more, or was released without being fetched."""
        if not self.fates[index]:
            self.fates[index] = self._fate((reason, detail))

    def mark_read(self, start: int, given: bytes) -> None:
        """A process that held the items marked in `given`, from index `start` on, has read them."""
        stop = start + len(given)
        marks = int.from_bytes(self.read[start:stop], "big") | int.from_bytes(given, "big")
        self.read[start:stop] = marks.to_bytes(len(given), "big")

    def settle(self, index: int, *, here: bool, shipped: bool, reported: bool) -> bool:
        """The last process gave back an item. `here`: its segment is in this node's arena. `shipped`: it is at another
        node and was not fetched, so that a read of it was one of queries. `reported`: False if the process ended
        without a release. Returns False if the item was released unread and is at another node: the caller knows the
        reason."""
        if self.fates[index]:
            return True
        if self.read[index] and (here or shipped):
            self.fates[index] = self.sources[index] if here else SHIPPED
        elif not reported:
            self.fates[index] = UNREPORTED
        elif shipped:
            return False
        else:
            self.fates[index] = SKIPPED
        return True

    def settle_all(self, start: int, stop: int) -> bool:
        """Settle the items of a range if all of them were read in this node's arena; otherwise changes nothing and
        returns False."""
        if any(self.fates[start:stop]) or not all(self.read[start:stop]):
            return False
        self.fates[start:stop] = self.sources[start:stop]
        return True

    def _fate(self, lost: Lost) -> int:
        if lost in self._lost:
            return len(_KNOWN) + self._lost.index(lost)
        if len(_KNOWN) + len(self._lost) >= MAX_FATES:
            return SKIPPED
        self._lost.append(lost)
        return len(_KNOWN) + len(self._lost) - 1

    # -- sums

    def missed_part(self) -> tuple[int, int, int]:
        """For the other keys: (index of the first one with tokens that were missed, index after the last one that
        stands for tokens, tokens of the first that were not missed)."""
        return self._part(self.beyond.places, self.start if self._supplies_all() is None else self.stop)

    def _supplies_all(self) -> Source | None:
        """The source of the last segment that was read, if all tokens that the engine took are supplied with it; else
        None."""
        if not self.independent or self.stop == ALL or not self.size:
            return None
        end = bisect_left(self.places, -(-self.stop // self.size))
        read = (_KNOWN[fate] for fate in reversed(self.fates[:end]) if LOCAL <= fate <= SHIPPED)
        source = next(read, None)
        return source if isinstance(source, Source) else None

    def _part(self, places: Sequence[int], token: int) -> tuple[int, int, int]:
        """For keys at ascending `places`: (index of the first one with tokens from `token` on, index after the last one
        that stands for tokens, tokens of the first before `token`)."""
        end = bisect_left(places, self.counted)
        if not self.size:
            return 0, end, 0
        whole, part = divmod(min(token, self.asked), self.size)
        first = min(end, bisect_left(places, whole))
        return first, end, part if first < end and places[first] == whole else 0

    def short(self, places: Sequence[int]) -> int:
        """Number of tokens that are missing in the last one of the keys at `places` that stand for tokens."""
        end = bisect_left(places, self.counted)
        return max(0, -self.tail) if end and places[end - 1] == self.counted - 1 else 0

    @property
    def not_asked(self) -> tuple[MissReason, int]:
        """The tokens behind the segments of the keys that the engine's own cache did not have: (reason, number). Those
        of more than a segment could have been asked for."""
        reason = MissReason.TOO_SHORT if self.tail <= self.size else MissReason.SKIPPED
        return reason, max(0, self.asked - max(self.start, self.counted * self.size))

    def sums(self) -> Sums:
        """The tokens so far."""
        supplied: Counter[Source] = Counter()
        lost: Counter[Lost] = Counter()
        held = 0
        source = self._supplies_all()
        if source is not None:
            # These are the tokens of the other keys; those of items are added below.
            taken = min(self.stop, self.counted * self.size, self.asked) - self.start
            supplied[source] = max(0, taken - sum(read for _, read, _ in self._tokens()))
        for number, read, left in self._tokens():
            fate = self._named(number)
            if source is not None and not isinstance(fate, Source):
                supplied[source] += read
                read = 0
            if fate is None:
                held += read + left
            elif isinstance(fate, Source):
                supplied[fate] += read
                lost[MissReason.SKIPPED, ""] += left
            else:
                lost[fate] += read + left
        return Sums(self.asked, min(self.start, self.asked), supplied, +lost, held)

    def _named(self, number: int) -> Fate | None:
        return _KNOWN[number] if number < len(_KNOWN) else self._lost[number - len(_KNOWN)]

    def _tokens(self) -> Iterable[tuple[int, int, int]]:
        """Yields (fate, tokens before `stop`, tokens from there on) of the items, without those that the engine had."""
        first, end, part = self._part(self.places, self.start)
        if first == end:
            return
        size = self.size
        if self.short(self.places):
            yield self.fates[end - 1], 0, self.tail
        if part:
            yield self._item(first, part)
            first += 1
        whole, left = divmod(min(self.stop, self.asked), size)
        cut = max(first, min(end, bisect_left(self.places, whole)))
        for number, count in Counter(self.fates[first:cut]).items():
            yield number, count * size, 0
        if left and first <= cut < end and self.places[cut] == whole:
            yield self._item(cut, 0)
            cut += 1
        for number, count in Counter(self.fates[cut:end]).items():
            yield number, 0, count * size

    def _item(self, index: int, had: int) -> tuple[int, int, int]:
        low = self.places[index] * self.size
        read = max(0, min(self.stop, self.asked, low + self.size) - low - had)
        return self.fates[index], read, self.size - had - read

    def close(self, counters: Counters) -> None:
        """Count all tokens of the match, whose lease has ended."""
        end = bisect_left(self.places, self.counted)
        nbytes = self.fates.count(LOCAL, end) * self.slot_bytes
        if self.asked:
            sums = self.sums()
            local = sum(read for fate, read, _ in self._tokens() if fate == LOCAL)
            nbytes += local * self.slot_bytes // self.size
            self._count(counters, sums)
        if nbytes:
            counters.add_for(READ_BYTES, nbytes, self.tenant)

    def missed(self, sums: Sums) -> Counter[MissReason]:
        """The tokens that were missed so far, by reason. `sums`: those of now."""
        missed = Counter({self.not_asked[0]: self.not_asked[1]})
        for (reason, _), tokens in sums.lost.items():
            missed[reason] += tokens
        if self.beyond.codes and self.asked:
            first, end, had = self.missed_part()
            if first < end:
                short = self.short(self.beyond.places)
                missed.update(missed_beyond(self.size, self.beyond, first, end, had, short)[0])
        return +missed

    def _count(self, counters: Counters, sums: Sums) -> None:
        tenant = self.tenant
        counters.add_for(ASKED, sums.asked, tenant)
        if sums.engine_had:
            counters.add_for(ENGINE_HAD, sums.engine_had, tenant)
        for source, tokens in sums.supplied.items():
            counters.add_for(SUPPLIED, tokens, tenant, source.value)
        by_reason: Counter[MissReason] = Counter()
        for (reason, _), tokens in sums.lost.items():
            by_reason[reason] += tokens
        reason, tokens = self.not_asked
        by_reason[reason] += tokens
        for reason, tokens in (+by_reason).items():
            count_missed(counters, tenant, reason, tokens)
        beyond = self.beyond
        if beyond.codes:
            count_beyond(counters, tenant, self.size, beyond, *self.missed_part(), self.short(beyond.places))
        if self.saved_s:
            share = sums.supplied.total() / max(1, min(self.stop, sums.asked) - self.start)
            counters.add_for(SAVED, round(1000 * self.saved_s * share), tenant)


def begin_tenant(counters: Counters, tenant: TenantId) -> None:
    """Let the series of the tenant exist from now on, except `SAVED`: Prometheus sees no growth of a series that begins
    above 0."""
    for metric in (ASKED, ENGINE_HAD, READ_BYTES):
        counters.add_for(metric, 0, tenant)
    for source in Source:
        counters.add_for(SUPPLIED, 0, tenant, source.value)


def check_integrity(counters: Counters) -> None:
    """Raises AssertionError when the tokens of a tenant do not add up."""
    left: Counter[str] = Counter()
    for metric in (SUPPLIED, ENGINE_HAD, MISSED):
        for (tenant, *_), tokens in counters.by_labels(metric).items():
            left[tenant] += tokens
    for (tenant, *_), tokens in counters.by_labels(ASKED).items():
        assert left.pop(tenant, 0) == tokens, f"tokens of tenant {tenant} do not add up"
    assert not +left
