"""The odds that what a request used together is used again, bucket of age by bucket of age, learned as it goes.

A logistic model of the hazard (the chance to be used again within a bucket of age, if not before it): the bucket's own
weight, and for each feature of the use one weight that holds at all ages and one for the age's regime. Learned by
AdaGrad from what became of each run, in batches.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import NEVER, Hints

__all__ = ["AGES", "EDGES", "COUNTS", "Odds"]

AGES = 30
EDGES = [0.0, *(1.5**step for step in range(AGES - 1))]
"""Where each bucket of age begins, in seconds. The last one has no end."""
_WIDTHS = np.append(np.diff(EDGES), EDGES[-1] * 0.5)
_REGIME = np.array([bisect_right((12.0, 40.0, 120.0, 400.0), edge) for edge in EDGES])
_REGIMES = 5

_COUNTS_FROM = (1, 2, 3, 5, 9, 33)
COUNTS = len(_COUNTS_FROM)
_COUNT = [max(0, bisect_right(_COUNTS_FROM, accesses) - 1) for accesses in range(_COUNTS_FROM[-1] + 1)]
_NEW_FROM = (0, 1, 2, 3, 5, 8, 13, 25, 49, 129)
_NEW = len(_NEW_FROM)
_TURN_FROM = (0, 1, 2, 3, 4, 5, 7, 11, 21)
_GAPS = 14
LABELS = 16

_SIZES = (COUNTS, COUNTS * _NEW, _NEW, 3 * _NEW, _GAPS, len(_TURN_FROM), _GAPS, _GAPS * 10, _GAPS, LABELS)
"""Values of: use count, count x new, new, kind x new, gap, turn, gap before, gap x gap before, output, label."""
_OFFSETS = np.concatenate([[0], np.cumsum(_SIZES)]).tolist()
_WEIGHTS = _OFFSETS[-1]

RATE, RATE_REGIME, RATE_AGE = 0.1, 0.05, 0.3
BATCH = 64
"""Learned from at once: of many at once each would push the weights the same way, too far together."""
SIZE_POWER = 0.4
"""A run weighs as its size to this power: its segments are hardly more than one experience."""
LEAST_SEEN = 1e-3
"""Of a weight that nothing was learned for: it counts as little beside one that is."""
MOST_TOLD = 1e4
"""No other node's sum counts for more: whoever lies does not end the learning here."""
FIRST = -3.0
"""Of a bucket's own weight, before anything is learned."""

MOST = 1e12
"""No weight and no sum gets there."""

Features = tuple[int, ...]
"""One index into the weights per feature."""
Vector = NDArray[np.float64]


class _Saved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    labels: tuple[tuple[int, str, str], ...]
    weights: bytes
    """All the arrays, one after the other, float64, little-endian."""


_VERSION = 1
_decoder = msgspec.msgpack.Decoder(_Saved)


class Odds:
    """Weights of a pool; bounded."""

    def __init__(self) -> None:
        self._labels: dict[tuple[int, str, str], int] = {(0, "", ""): 0}
        # Each beside the sums of squares that slow its learning down.
        self._age, self._age_sum = np.full(AGES, FIRST), np.ones(AGES)
        self._all, self._all_sum = np.zeros(_WEIGHTS), np.ones(_WEIGHTS)
        self._regime, self._regime_sum = np.zeros((_WEIGHTS, _REGIMES)), np.ones((_WEIGHTS, _REGIMES))
        self._effective = self._all[:, None] + self._regime
        self._rows: list[tuple[Features, int, float, float]] = []
        self._known: dict[Features, list[float]] = {}

    def features(self, accesses: int, hints: Hints) -> Features:
        """Of a segment that was used so often, by a request of which this is known."""
        access = hints.access
        count = _COUNT[min(accesses, len(_COUNT) - 1)]
        known = access.known
        new = bisect_right(_NEW_FROM, max(0, access.segments - known)) - 1
        kind = 0 if known <= 1 or access.left < 0 else 1 if access.left <= 1 else 2
        gap, before = _gap(access.gap_s), _gap(access.previous_gap_s)
        return (
            _OFFSETS[0] + count,
            _OFFSETS[1] + new * COUNTS + count,
            _OFFSETS[2] + new,
            _OFFSETS[3] + kind * _NEW + new,
            _OFFSETS[4] + gap,
            _OFFSETS[5] + bisect_right(_TURN_FROM, access.turn) - 1,
            _OFFSETS[6] + before,
            _OFFSETS[7] + (gap * 10 + min(9, before) if access.turn else 0),
            _OFFSETS[8] + min(_GAPS - 1, (hints.output_tokens + 1).bit_length()),
            _OFFSETS[9] + self._label(hints),
        )

    def _label(self, hints: Hints) -> int:
        said = (hints.outlook, hints.category, hints.stop_reason)
        label = self._labels.get(said)
        if label is None:
            named = bool(hints.category or hints.stop_reason)
            # Room is left for both other outlooks: whoever makes up categories does not hide what they say.
            if len(self._labels) >= LABELS - 2 * named:
                return self._label(Hints(hints.outlook)) if named else 0
            label = self._labels[said] = len(self._labels)
        return label

    def retention_value(self, features: Features) -> list[float]:
        """By bucket of age: the greatest rate of uses for the time held, over all times to be held (Gittins)."""
        known = self._known.get(features)
        if known is None:
            logits = self._age + self._effective[list(features)].sum(axis=0)[_REGIME]
            known = self._known[features] = _gittins(1.0 / (1.0 + np.exp(-logits))).tolist()
        return known

    def add(self, features: Features, age: int, share: float, segments: float) -> None:
        """Of a run of so many segments at the beginning of a bucket, this share was used again within it."""
        self._rows.append((features, age, share, segments**SIZE_POWER))

    @property
    def waiting(self) -> int:
        """How many are to be learned from."""
        return len(self._rows)

    def learn(self) -> None:
        """From what was added since."""
        rows, self._rows = self._rows, []
        for first in range(0, len(rows), BATCH):
            self._learn(rows[first : first + BATCH])

    def _learn(self, rows: list[tuple[Features, int, float, float]]) -> None:
        found = np.array([row[0] for row in rows])
        age = np.array([row[1] for row in rows])
        share, weight = np.array([row[2] for row in rows]), np.array([row[3] for row in rows])
        regime = _REGIME[age]
        logits = self._age[age] + self._effective[found, regime[:, None]].sum(axis=1)
        error = (share - 1.0 / (1.0 + np.exp(-logits))) * weight
        _step(self._age, self._age_sum, age, error, RATE_AGE)
        repeated = np.repeat(error, found.shape[1])
        _step(self._all, self._all_sum, found.ravel(), repeated, RATE)
        place = (found * _REGIMES + regime[:, None]).ravel()
        _step(self._regime.reshape(-1), self._regime_sum.reshape(-1), place, repeated, RATE_REGIME)
        self._tables()

    def _tables(self) -> None:
        effective = self._all[:, None] + self._regime
        # Never less for more uses by the same request: a parent is worth at least as much as its child.
        for first, last in ((_OFFSETS[0], _OFFSETS[1]), (_OFFSETS[1], _OFFSETS[2])):
            block = effective[first:last].reshape(-1, COUNTS, _REGIMES)
            effective[first:last] = np.maximum.accumulate(block, axis=1).reshape(-1, _REGIMES)
        self._effective = effective
        self._known.clear()

    def save(self) -> bytes:
        """The weights."""
        arrays = (self._age, self._age_sum, self._all, self._all_sum, self._regime, self._regime_sum)
        weights = b"".join(array.astype("<f8").tobytes() for array in arrays)
        return msgspec.msgpack.encode(_Saved(_VERSION, tuple(self._labels), weights))

    def restore(self, learned: bytes) -> None:
        """Inverse of `save`. Raises `ValueError` for what no `save` made; nothing is changed then."""
        self._labels, parts = _decoded(learned)
        self._age, self._age_sum, self._all, self._all_sum, self._regime, self._regime_sum = parts
        self._tables()

    def absorb(self, learned: bytes) -> None:
        """Of each weight, here and as `save` gave it elsewhere, the mean by how much each side saw of it (short prompts
        are seen by few nodes, and what they learn of them must not be thinned out by the others); of labels that both
        know. What was seen more of is learned more slowly from here on. Else as `restore`."""
        labels, (age, age_sum, all_ages, all_sum, regime, regime_sum) = _decoded(learned)
        places, theirs = list(range(_OFFSETS[-2])), list(range(_OFFSETS[-2]))
        for said, number in labels.items():
            self._label(Hints(*said))
            if said in self._labels:
                places.append(_OFFSETS[-2] + self._labels[said])
                theirs.append(_OFFSETS[-2] + number)
        self._age, self._age_sum = _merged(self._age, self._age_sum, age, age_sum)
        self._all[places], self._all_sum[places] = _merged(
            self._all[places], self._all_sum[places], all_ages[theirs], all_sum[theirs]
        )
        self._regime[places], self._regime_sum[places] = _merged(
            self._regime[places], self._regime_sum[places], regime[theirs], regime_sum[theirs]
        )
        self._tables()


def _merged(weights: Vector, sums: Vector, others: Vector, other_sums: Vector) -> tuple[Vector, Vector]:
    """The mean by what was seen of each, and the larger of both sums, as far as others are listened to."""
    other_sums = np.minimum(other_sums, MOST_TOLD)
    seen, other_seen = sums - 1.0 + LEAST_SEEN, other_sums - 1.0 + LEAST_SEEN
    return (weights * seen + others * other_seen) / (seen + other_seen), np.maximum(sums, other_sums)


def _decoded(learned: bytes) -> tuple[dict[tuple[int, str, str], int], list[Vector]]:
    """Labels, and the arrays in the order in which `save` writes them. Raises `ValueError`."""
    try:
        saved = _decoder.decode(learned)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"these are no statistics of re-use: {error}") from error
    labels = dict(zip(saved.labels, range(len(saved.labels)), strict=True))
    known = len(labels) == len(saved.labels) <= LABELS and labels.get((0, "", "")) == 0
    if saved.version != _VERSION or not known:
        raise ValueError(f"statistics of re-use of version {saved.version} with {len(saved.labels)} labels")
    if len(labels) < len(saved.labels):
        raise ValueError("statistics of re-use with a label twice")
    for outlook, category, stop_reason in labels:
        Hints(outlook, category, stop_reason)
    shapes = [(AGES,), (AGES,), (_WEIGHTS,), (_WEIGHTS,), (_WEIGHTS, _REGIMES), (_WEIGHTS, _REGIMES)]
    sizes = [math.prod(shape) for shape in shapes]
    if len(saved.weights) != 8 * sum(sizes):
        raise ValueError(f"statistics of re-use with {len(saved.weights)} bytes; {8 * sum(sizes)} expected")
    parts = np.split(np.frombuffer(saved.weights, "<f8").astype(np.float64), np.cumsum(sizes)[:-1])
    if not all((np.abs(part) < MOST).all() for part in parts) or any((part < 1).any() for part in parts[1::2]):
        raise ValueError("statistics of re-use with a weight that is no number, or a sum below 1")
    return labels, [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _gap(seconds: float) -> int:
    """Bucket: 0 where there is none, then by powers of two from a second on."""
    if seconds <= NEVER:
        return 0
    return min(_GAPS - 1, 1 + max(0, math.frexp(seconds)[1])) if seconds >= 1 else 1


def _step(weights: Vector, sums: Vector, place: NDArray[np.int64], error: Vector, rate: float) -> None:
    """One AdaGrad step of a batch."""
    size = len(weights)
    sums += np.bincount(place, error * error, size)
    weights += rate * np.bincount(place, error, size) / np.sqrt(sums)


def _gittins(hazard: Vector) -> Vector:
    """By bucket of age of a segment that was not used before it: the greatest rate of uses for the time held, over all
    times to be held. `hazard`: by bucket, the chance to be used in it; a use is in the middle of its bucket."""
    ends = np.cumprod(1.0 - np.minimum(hazard, 0.999))
    begins = np.append(1.0, ends[:-1])
    held = np.cumsum((begins + ends) / 2 * _WIDTHS)
    before = np.append(0.0, held[:-1])
    rates = (begins[:, None] - ends) / np.maximum(held - before[:, None], 1e-12)
    best: Vector = np.where(_EARLIER, 0.0, rates).max(axis=1)
    return best


_EARLIER = np.tri(AGES, k=-1, dtype=bool)
