"""The figures of a churn run, from the requests of its engines."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from tokenlake.directory.ring import Ring
from tokenlake.directory.ring_record import RingRecord
from tokenlake.keys import KEY_BYTES
from tokenlake_bench.churn.load import Request

SAMPLED_KEYS = 50_000


class Phases(msgspec.Struct, frozen=True):
    """The times in seconds, since the start of a run, at which the change began, and at which it was over."""

    change_s: float
    settled_s: float


class Run(msgspec.Struct, frozen=True):
    """One run of the load: all requests, and the failures of the engines."""

    requests: list[Request]
    errors: list[str]
    phases: Phases

    def during(self) -> list[Request]:
        """The requests between the begin and the end of the change."""
        return [each for each in self.requests if self.phases.change_s <= each.at_s < self.phases.settled_s]

    def before(self) -> list[Request]:
        """The requests before the change."""
        return [each for each in self.requests if each.at_s < self.phases.change_s]

    def after(self) -> list[Request]:
        """The requests after the change."""
        return [each for each in self.requests if each.at_s >= self.phases.settled_s]


class ChurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench churn` for one kind of change; medians over the rounds.

    The hit rates are of the moving half of the load, hit tokens / prompt tokens. `findable_*`: the segments of the
    fixed half that are found, of those that were found before the change. `held_share`: the part of the fixed half
    that the node stored that drains or is killed. `directory_keys_moved_ratio`: keys whose directory node changes /
    keys that have to change it (the share of the node that comes or leaves); None where the ring does not change.
    `match_p99_ratio`: the p99 of the matches during the change / that of the control run in the same seconds.
    """

    change: str
    nodes: int
    encrypt: bool
    rounds: int
    seed: int
    token_hit_rate_before: float
    token_hit_rate_during: float
    token_hit_rate_after: float
    findable_during: float
    findable_after: float
    held_share: float
    directory_keys_moved_ratio: float | None
    match_p99_ratio: float
    match_p99_ms: float
    change_s: float
    wrong_bytes: int
    errors: int
    evicted: int


def rate(requests: Iterable[Request], *, fixed: bool) -> float:
    """Segments found / segments asked for, over the requests of one half."""
    chosen = [each for each in requests if each.fixed == fixed]
    return sum(each.found for each in chosen) / max(1, sum(each.asked for each in chosen))


def findable(before: Iterable[Request], later: Iterable[Request]) -> float:
    """Of the segments of the fixed prompts that `before` found, those that `later` requests of the same prompts found
    / those that they could have found; 1 where there are none."""
    known: dict[int, int] = {}
    for each in before:
        if each.fixed:
            known[each.number] = max(each.found, known.get(each.number, 0))
    chosen = [each for each in later if each.fixed and each.number in known]
    could = sum(known[each.number] for each in chosen)
    return sum(min(each.found, known[each.number]) for each in chosen) / could if could else 1.0


def p99_ms(requests: Sequence[Request]) -> float:
    """The p99 of the matches in milliseconds; the longest one where there are less than 100."""
    times = sorted(each.match_ms for each in requests)
    return times[min(len(times) - 1, len(times) * 99 // 100)] if times else 0.0


def keys_moved_ratio(before: Sequence[str], after: Sequence[str]) -> float | None:
    """Directory keys that a change of the members moves / keys that it has to move; None without a change. All members
    have equal weights."""
    if set(before) == set(after):
        return None
    record = RingRecord.of(dict.fromkeys(before, 64 << 20))
    changed = record
    for name in set(after) - set(before):
        changed = changed.with_member(name, 64 << 20)
    for name in set(before) - set(after):
        changed = changed.without(name)
    keys = random.Random(0).randbytes(KEY_BYTES * SAMPLED_KEYS)
    pairs = zip(Ring(record).candidates(keys), Ring(changed).candidates(keys), strict=True)
    moved = sum(old[0] != new[0] for old, new in pairs) / SAMPLED_KEYS
    return moved * max(len(before), len(after))


def median_of(results: Sequence[ChurnResult]) -> ChurnResult:
    """One result with the medians of the figures, and the sums of wrong bytes, errors and evictions."""
    sums = {name: sum(getattr(each, name) for each in results) for name in ("wrong_bytes", "errors", "evicted")}
    figures = (
        "token_hit_rate_before",
        "token_hit_rate_during",
        "token_hit_rate_after",
        "findable_during",
        "findable_after",
        "held_share",
        "match_p99_ratio",
        "match_p99_ms",
        "change_s",
    )
    medians = {name: statistics.median(getattr(each, name) for each in results) for name in figures}
    return msgspec.structs.replace(results[0], rounds=len(results), **medians, **sums)
