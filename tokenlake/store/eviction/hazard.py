"""Statistics of re-use: how likely a segment is accessed again, by its class and its age, and the retention value that
follows from that.

A *class* is the number of accesses of a segment, in buckets, and the *label* of the request that made the last one. The
*age* is the time since then, in buckets that grow by a constant factor. For each class and bucket two numbers are
counted: the segments that were accessed again within the bucket, and all segments whose time in the bucket ended. Their
ratio is the *hazard*. Old counts fade.

The retention value of (class, age) is the greatest rate at which a segment of it earns accesses: the maximum, over all
times that it could be kept from now on at most, of the chance of an access by then over the expected time that it is
kept (Gittins index).
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import Hints
from tokenlake.store.eviction.learning import UNLABELLED, Label, Labels

__all__ = ["ACCESSES", "AGES", "EDGES", "LABELS", "UNLABELLED", "Hazards", "retention_values"]

AGES = 32
EDGES = [0.0, *(1.25**step for step in range(AGES - 1))]
"""Begin of each bucket of age in seconds. The last bucket has no end."""
_WIDTHS = np.append(np.diff(EDGES), EDGES[-1] * 0.5)

_ACCESSES_FROM = (1, 2, 3, 5, 9, 33)
ACCESSES = len(_ACCESSES_FROM)
"""Buckets of access counts."""
_BUCKET = [max(0, bisect_right(_ACCESSES_FROM, accesses) - 1) for accesses in range(_ACCESSES_FROM[-1] + 1)]

LABELS = 12
"""Labels with counts of their own."""

FADE = 0.99
"""Factor of all counts at each update of the tables."""
PRIOR_HAZARD = 0.05
"""Per bucket, before anything is counted. Since buckets grow, this orders segments by their last access."""
WEIGHT = 8.0
"""Weight, in segments, of the next more general hazard: that of all labels for one label, that of all access counts for
one bucket of them, the prior for all together."""

MAX_COUNT = 1e12
"""Greater than any count."""

Table = NDArray[np.float64]


class _Saved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    labels: tuple[Label, ...]
    ended: bytes
    """[classes, AGES] float64, little-endian."""
    used: bytes


_VERSION = 1
_decoder = msgspec.msgpack.Decoder(_Saved)


class Hazards:
    """Counts of a pool, and the tables made of them. Bounded: `ACCESSES` x `LABELS` classes of `AGES` buckets.

    Retention values never rise with age, and never fall with the number of accesses under one label: the prefix of a
    prompt was accessed at least as often and as lately as the rest, so it has at least the same value at each node that
    learned the same.
    """

    def __init__(self) -> None:
        self._labels = Labels(LABELS)
        self._ended: Table = np.zeros((ACCESSES, AGES))
        self._used: Table = np.zeros((ACCESSES, AGES))
        self._new_ended: list[list[float]] = []
        """Counts since the last update of the tables, by class and bucket."""
        self._new_used: list[list[float]] = []
        self.retention_value: list[list[float]] = []
        """By class and bucket of age."""
        self._tables()

    def label(self, hints: Hints) -> int:
        """The number of the label of a request with these hints."""
        number = self._labels.number(hints)
        self._add_classes()
        return number

    def _add_classes(self) -> None:
        """Add rows for labels that are new."""
        while len(self._labels) * ACCESSES > len(self._new_ended):
            fresh = np.zeros((ACCESSES, AGES))
            self._ended, self._used = np.vstack([self._ended, fresh]), np.vstack([self._used, fresh])
            self._new_ended += [[0.0] * AGES for _ in range(ACCESSES)]
            self._new_used += [[0.0] * AGES for _ in range(ACCESSES)]
            # Until the next update a new label has the values of UNLABELLED.
            self.retention_value += self.retention_value[:ACCESSES]

    @staticmethod
    def class_of(accesses: int, label: int) -> int:
        """Index of the class."""
        return label * ACCESSES + _BUCKET[min(accesses, len(_BUCKET) - 1)]

    def count_used(self, cls: int, age: int, segments: float) -> None:
        """Segments of a class were accessed again at this age."""
        self._new_used[cls][age] += segments
        self._new_ended[cls][age] += segments

    def count_unused(self, cls: int, age: int, segments: float) -> None:
        """Segments of a class reached the end of this age without an access."""
        self._new_ended[cls][age] += segments

    def learn(self) -> None:
        """Let old counts fade, add the new ones, and update the tables."""
        self._ended = self._ended * FADE + np.asarray(self._new_ended)
        self._used = self._used * FADE + np.asarray(self._new_used)
        self._tables()

    def _tables(self) -> None:
        classes = len(self._ended)
        self._new_ended = [[0.0] * AGES for _ in range(classes)]
        self._new_used = [[0.0] * AGES for _ in range(classes)]
        self.retention_value = retention_values(self._hazards()).tolist()

    def _hazards(self) -> Table:
        """[labels, ACCESSES, AGES]; each hazard is drawn to the more general one, by `WEIGHT` against its counts."""
        ended, used = self._ended.reshape(-1, ACCESSES, AGES), self._used.reshape(-1, ACCESSES, AGES)
        hazard: Table = np.full((1, 1, AGES), PRIOR_HAZARD)
        axes: tuple[tuple[int, ...], ...] = ((0, 1), (0,), ())
        for axis in axes:
            in_all, again = ended.sum(axis, keepdims=True), used.sum(axis, keepdims=True)
            hazard = (again + WEIGHT * hazard) / (in_all + WEIGHT)
        # The last bucket has no end, so that nothing unused is ever counted in it.
        hazard[..., -1] = hazard[..., -2] / 2
        return hazard

    def save(self) -> bytes:
        """The counts of the last update."""
        ended, used = self._ended.astype("<f8").tobytes(), self._used.astype("<f8").tobytes()
        return msgspec.msgpack.encode(_Saved(_VERSION, tuple(self._labels), ended, used))

    def restore(self, learned: bytes) -> None:
        """Inverse of `save`. ValueError for other data; nothing is changed then."""
        self._labels, self._ended, self._used = _decoded(learned)
        self._tables()

    def merge(self, learned: bytes) -> None:
        """Set the counts of each label to the mean of those here and those that `save` gave elsewhere; counts since the
        last update stay. ValueError as in `restore`."""
        labels, ended, used = _decoded(learned)
        matched = self._labels.matched(labels)
        self._add_classes()
        for here, there in matched:
            mine, theirs = _classes(here), _classes(there)
            self._ended[mine] = (self._ended[mine] + ended[theirs]) / 2
            self._used[mine] = (self._used[mine] + used[theirs]) / 2
        self.retention_value = retention_values(self._hazards()).tolist()


def _classes(label: int) -> slice:
    return slice(label * ACCESSES, (label + 1) * ACCESSES)


def _decoded(learned: bytes) -> tuple[Labels, Table, Table]:
    """Labels, ended, used. ValueError for data that no `save` made."""
    try:
        saved = _decoder.decode(learned)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"these are no statistics of re-use: {error}") from error
    if saved.version != _VERSION:
        raise ValueError(f"statistics of re-use of version {saved.version}; this node reads version {_VERSION}")
    labels = Labels(LABELS, saved.labels)
    shape = (len(labels) * ACCESSES, AGES)
    if not len(saved.ended) == len(saved.used) == shape[0] * shape[1] * 8:
        raise ValueError(f"statistics of re-use with {len(saved.ended)} bytes for {len(labels)} labels")
    ended = np.frombuffer(saved.ended, "<f8").reshape(shape).astype(np.float64)
    used = np.frombuffer(saved.used, "<f8").reshape(shape).astype(np.float64)
    if not ((used >= 0).all() and (ended >= used).all() and (ended < MAX_COUNT).all()):
        raise ValueError("statistics of re-use with a count that is no number, below 0 or too great")
    return labels, ended, used


def retention_values(hazards: Table) -> Table:
    """Gittins index of [labels, ACCESSES, AGES] hazards, as [labels * ACCESSES, AGES].

    With S[k] the share that is unused at the end of bucket k and T[k] the time for which all were kept by then, the
    index at the beginning of a is max over k >= a of (S[a-1] - S[k]) / (T[k] - T[a-1]).
    """
    stay = 1.0 - np.clip(hazards, 0.0, 0.999)
    ends = np.cumprod(stay, axis=-1)
    begins = np.concatenate([np.ones_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    held = np.cumsum((begins + ends) / 2 * _WIDTHS, axis=-1)
    before = np.concatenate([np.zeros_like(held[..., :1]), held[..., :-1]], axis=-1)
    rates = (begins[..., :, None] - ends[..., None, :]) / np.maximum(held[..., None, :] - before[..., :, None], 1e-12)
    earlier = np.tri(AGES, k=-1, dtype=bool)
    index = np.where(earlier, 0.0, rates).max(axis=-1)
    # Never rising with age, so that the segment of a class unused longest has the least value; never falling with
    # accesses.
    falling = np.minimum.accumulate(index, axis=-1)
    return np.maximum.accumulate(falling, axis=-2).reshape(-1, AGES)
