"""A model of re-use: the probability that a segment is accessed again in each bucket of age, learned while requests
come.

The model is a logistic regression of the hazard (the chance of an access within a bucket of age, if there was none
before). Its terms are a bias per bucket, and for each feature of the last access one weight for all ages and one for
each regime of ages. AdaGrad learns them in batches from the samples that each cohort gives.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import NEVER, Hints
from tokenlake.memory.eviction.labels import Label, Labels

AGES = 30
EDGES = [0.0, *(1.5**step for step in range(AGES - 1))]
"""Seconds since the last access at which each bucket of age begins. The last bucket has no end."""
_WIDTHS = np.append(np.diff(EDGES), EDGES[-1] * 0.5)
_REGIME = np.array([bisect_right((12.0, 40.0, 120.0, 400.0), edge) for edge in EDGES])
_REGIMES = 5

_COUNTS_FROM = (1, 2, 3, 5, 9, 33)
_COUNTS = len(_COUNTS_FROM)
_COUNT = [max(0, bisect_right(_COUNTS_FROM, accesses) - 1) for accesses in range(_COUNTS_FROM[-1] + 1)]
_NEW_FROM = (0, 1, 2, 3, 5, 8, 13, 25, 49, 129)
_NEW = len(_NEW_FROM)
_TURN_FROM = (0, 1, 2, 3, 4, 5, 7, 11, 21)
_GAPS = 14
LABELS = 16

_SIZES = (_COUNTS, _COUNTS * _NEW, _NEW, 3 * _NEW, _GAPS, len(_TURN_FROM), _GAPS, _GAPS * 10, _GAPS, LABELS)
"""Number of values of each feature: access count, access count x new segments, new segments, kind of continuation x new
segments, gap, turn, previous gap, gap x previous gap, output tokens, label."""
_OFFSETS = np.concatenate([[0], np.cumsum(_SIZES)]).tolist()
_WEIGHTS = _OFFSETS[-1]

RATE, RATE_REGIME, RATE_AGE = 0.1, 0.05, 0.3
"""Learning rates of AdaGrad, on a cluster of one node, for the weights for all ages, for those per regime of ages, and
for the bias per age."""
MAX_NODES = 16
"""Number of nodes above which further nodes do not lengthen the steps of learning: single nodes would go too far
between two merges of their weights."""
BATCH = 64
"""Maximum number of samples (observed cohorts) in one step of learning. More of them would each move the weights the
same way, and together too far."""
SIZE_POWER = 0.4
"""Exponent of the weight of a cohort in learning: a cohort of n segments weighs n^0.4, because its segments are
correlated."""
LEAST_SEEN = 1e-3
"""Weight of a node in the merge of a model's weight about which this node has learned nothing."""
MAX_MERGED_SUM = 1e4
"""Bound on the sums of squared errors that another node reports, so that a false report cannot stop the learning on
this node."""
INITIAL_BIAS = -3.0
"""Bias (log-odds of an access) of each bucket of age before anything is learned."""

MAX_WEIGHT = 1e12
"""Limit of plausible weights and sums in saved statistics; data beyond it are refused."""

Features = tuple[int, ...]
"""Features of a segment's last access: for each, an index into the weights of the model."""
Vector = NDArray[np.float64]


class _Saved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    labels: tuple[Label, ...]
    weights: bytes
    """All arrays, one after the other, float64, little-endian."""


_VERSION = 1
_decoder = msgspec.msgpack.Decoder(_Saved)


class Odds:
    """The model of re-use of the segments of one pool. Its size is bounded."""

    def __init__(self) -> None:
        self.nodes = 1
        """Number of nodes that merge their weights, each of which sees a part of the requests; the caller sets it. With
        1/n of the samples AdaGrad moves the weights of a node 1/sqrt(n) as far, and a merge takes the mean. The steps
        are therefore longer by sqrt(n), so that n nodes together learn as fast as one node that sees all requests."""
        self._labels = Labels(LABELS)
        # Each array of weights has an array of sums of squared errors, by which AdaGrad makes its steps smaller.
        self._age, self._age_sum = np.full(AGES, INITIAL_BIAS), np.ones(AGES)
        self._all, self._all_sum = np.zeros(_WEIGHTS), np.ones(_WEIGHTS)
        self._regime, self._regime_sum = np.zeros((_WEIGHTS, _REGIMES)), np.ones((_WEIGHTS, _REGIMES))
        self._effective = self._all[:, None] + self._regime
        self._samples: list[tuple[Features, int, float, float]] = []
        self._values: dict[Features, list[float]] = {}
        """Retention values by age, computed with the present weights, for the features that were asked for."""

    def features(self, accesses: int, hints: Hints) -> Features:
        """Returns the features of a segment that was accessed `accesses` times, the last time by a request with
        `hints`."""
        access = hints.access
        count = _COUNT[min(accesses, len(_COUNT) - 1)]
        known = access.known
        new = bisect_right(_NEW_FROM, max(0, access.segments - known)) - 1
        kind = 0 if known <= 1 or access.unshared < 0 else 1 if access.unshared <= 1 else 2
        gap, before = _gap(access.gap_s), _gap(access.previous_gap_s)
        return (
            _OFFSETS[0] + count,
            _OFFSETS[1] + new * _COUNTS + count,
            _OFFSETS[2] + new,
            _OFFSETS[3] + kind * _NEW + new,
            _OFFSETS[4] + gap,
            _OFFSETS[5] + bisect_right(_TURN_FROM, access.turn) - 1,
            _OFFSETS[6] + before,
            _OFFSETS[7] + (gap * 10 + min(9, before) if access.turn else 0),
            _OFFSETS[8] + min(_GAPS - 1, (hints.output_tokens + 1).bit_length()),
            _OFFSETS[9] + self._labels.number(hints),
        )

    def retention_value(self, features: Features) -> list[float]:
        """Returns the retention value of a segment with these features for each bucket of age: the Gittins index, in
        accesses per second."""
        values = self._values.get(features)
        if values is None:
            logits = self._age + self._effective[list(features)].sum(axis=0)[_REGIME]
            values = self._values[features] = gittins(1.0 / (1.0 + np.exp(-logits))).tolist()
        return values

    def add(self, features: Features, age: int, share: float, segments: float) -> None:
        """Add a sample for learning: of a cohort that had `segments` unused segments at the beginning of the bucket
        `age`, the fraction `share` was accessed again within that bucket."""
        self._samples.append((features, age, share, segments**SIZE_POWER))

    @property
    def pending(self) -> int:
        """Number of samples that were added and not learned yet."""
        return len(self._samples)

    def learn(self) -> None:
        """Change the weights by the samples that were added since the last call."""
        rows, self._samples = self._samples, []
        for first in range(0, len(rows), BATCH):
            self._learn(rows[first : first + BATCH])

    def _learn(self, rows: list[tuple[Features, int, float, float]]) -> None:
        found = np.array([row[0] for row in rows])
        age = np.array([row[1] for row in rows])
        share, weight = np.array([row[2] for row in rows]), np.array([row[3] for row in rows])
        regime = _REGIME[age]
        logits = self._age[age] + self._effective[found, regime[:, None]].sum(axis=1)
        error = (share - 1.0 / (1.0 + np.exp(-logits))) * weight
        longer = math.sqrt(min(self.nodes, MAX_NODES))
        _step(self._age, self._age_sum, age, error, longer * RATE_AGE)
        repeated = np.repeat(error, found.shape[1])
        _step(self._all, self._all_sum, found.ravel(), repeated, longer * RATE)
        place = (found * _REGIMES + regime[:, None]).ravel()
        _step(self._regime.reshape(-1), self._regime_sum.reshape(-1), place, repeated, longer * RATE_REGIME)
        self._tables()

    def _tables(self) -> None:
        effective = self._all[:, None] + self._regime
        # With equal other features, more accesses never give a lower weight. The segments of a request differ only in
        # the number of accesses, which falls along the prompt: each is worth at least as much as those behind it.
        for first, last in ((_OFFSETS[0], _OFFSETS[1]), (_OFFSETS[1], _OFFSETS[2])):
            block = effective[first:last].reshape(-1, _COUNTS, _REGIMES)
            effective[first:last] = np.maximum.accumulate(block, axis=1).reshape(-1, _REGIMES)
        self._effective = effective
        self._values.clear()

    def save(self) -> bytes:
        """Returns the weights and their sums of squared errors, encoded."""
        arrays = (self._age, self._age_sum, self._all, self._all_sum, self._regime, self._regime_sum)
        weights = b"".join(array.astype("<f8").tobytes() for array in arrays)
        return msgspec.msgpack.encode(_Saved(_VERSION, tuple(self._labels), weights))

    def merge(self, learned: bytes) -> None:
        """Set each weight to the mean of the one here and the one that `save` gave elsewhere, weighted by the sums of
        squares: few nodes see short prompts, and nodes that saw none must not dilute what those learned. Weights of
        labels are merged where both nodes know the label. Greater sums make later steps smaller. Raises ValueError for
        data that no `save` made."""
        labels, (age, age_sum, all_ages, all_sum, regime, regime_sum) = _decoded(learned)
        first = _OFFSETS[-2]
        matched = self._labels.matched(labels)
        places = [*range(first), *(first + here for here, _ in matched)]
        theirs = [*range(first), *(first + there for _, there in matched)]
        self._age, self._age_sum = _merged(self._age, self._age_sum, age, age_sum)
        self._all[places], self._all_sum[places] = _merged(
            self._all[places], self._all_sum[places], all_ages[theirs], all_sum[theirs]
        )
        self._regime[places], self._regime_sum[places] = _merged(
            self._regime[places], self._regime_sum[places], regime[theirs], regime_sum[theirs]
        )
        self._tables()


def _merged(weights: Vector, sums: Vector, others: Vector, other_sums: Vector) -> tuple[Vector, Vector]:
    """Returns (mean of the weights of both nodes, weighted by their sums of squared errors; the larger of both sums).
    The sums of the other node are bounded."""
    other_sums = np.minimum(other_sums, MAX_MERGED_SUM)
    seen, other_seen = sums - 1.0 + LEAST_SEEN, other_sums - 1.0 + LEAST_SEEN
    return (weights * seen + others * other_seen) / (seen + other_seen), np.maximum(sums, other_sums)


def _decoded(learned: bytes) -> tuple[Labels, list[Vector]]:
    """Returns the labels of requests in saved statistics, and the arrays of weights and sums in the order in which they
    were saved. Raises ValueError for data that no `save` made."""
    try:
        saved = _decoder.decode(learned)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"these are no statistics of re-use: {error}") from error
    if saved.version != _VERSION:
        raise ValueError(f"statistics of re-use of version {saved.version}; this node reads version {_VERSION}")
    labels = Labels(LABELS, saved.labels)
    shapes = [(AGES,), (AGES,), (_WEIGHTS,), (_WEIGHTS,), (_WEIGHTS, _REGIMES), (_WEIGHTS, _REGIMES)]
    sizes = [math.prod(shape) for shape in shapes]
    if len(saved.weights) != 8 * sum(sizes):
        raise ValueError(f"statistics of re-use with {len(saved.weights)} bytes; {8 * sum(sizes)} expected")
    parts = np.split(np.frombuffer(saved.weights, "<f8").astype(np.float64), np.cumsum(sizes)[:-1])
    if not all((np.abs(part) < MAX_WEIGHT).all() for part in parts) or any((part < 1).any() for part in parts[1::2]):
        raise ValueError("statistics of re-use with a weight that is no number, or a sum below 1")
    return labels, [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _gap(seconds: float) -> int:
    """Returns the bucket of the seconds between two requests: 0 if there was no earlier request, then by powers of two
    from one second on."""
    if seconds <= NEVER:
        return 0
    return min(_GAPS - 1, 1 + max(0, math.frexp(seconds)[1])) if seconds >= 1 else 1


def _step(weights: Vector, sums: Vector, place: NDArray[np.int64], error: Vector, rate: float) -> None:
    """Make one AdaGrad step, which changes `weights` and `sums`. `place`: index of the weight that each `error`
    concerns; `rate`: learning rate."""
    size = len(weights)
    sums += np.bincount(place, error * error, size)
    weights += rate * np.bincount(place, error, size) / np.sqrt(sums)


def gittins(hazard: Vector) -> Vector:
    """Gittins index of a segment at the beginning of each bucket: the maximum, over all times that it could be kept
    from then on, of the expected accesses (at most one) over the expected time that it is kept. `hazard`: by bucket,
    the chance of an access, which then comes in the middle of the bucket."""
    ends = np.cumprod(1.0 - np.minimum(hazard, 0.999))
    begins = np.append(1.0, ends[:-1])
    held = np.cumsum((begins + ends) / 2 * _WIDTHS)
    before = np.append(0.0, held[:-1])
    rates = (begins[:, None] - ends) / np.maximum(held - before[:, None], 1e-12)
    best: Vector = np.where(_EARLIER, 0.0, rates).max(axis=1)
    return best


_EARLIER = np.tri(AGES, k=-1, dtype=bool)
