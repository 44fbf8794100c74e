"""How likely a segment is used again, by its class and its age, and what keeping it is therefore worth.

A *class* is how often a segment was used, and what is known of the request that used it last (its *label*). Its *age*
is the time since then, in buckets that grow by a constant factor. Per class and bucket two numbers are counted:
segments that were used again within it, and all whose time in it ended. Their ratio is the *hazard*. Old counts fade.

The worth of (class, age) is the greatest rate at which a segment of it earns uses: over all times that it could be held
from now on at most, the chance of a use by then over the time that it is expected to be held (Gittins index).
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import Hints

__all__ = ["AGES", "EDGES", "UNLABELLED", "ACCESSES", "Hazards", "retention_values"]

AGES = 32
EDGES = [0.0, *(1.25**step for step in range(AGES - 1))]
"""Where each bucket of age begins, in seconds. The last one has no end."""
_WIDTHS = np.append(np.diff(EDGES), EDGES[-1] * 0.5)

_ACCESSES_FROM = (1, 2, 3, 5, 9, 33)
ACCESSES = len(_ACCESSES_FROM)
"""Buckets of use counts."""
_BUCKET = [max(0, bisect_right(_ACCESSES_FROM, accesses) - 1) for accesses in range(_ACCESSES_FROM[-1] + 1)]

LABELS = 12
"""With counts of their own; of what comes later only the outlook counts."""
UNLABELLED = 0

FADE = 0.99
"""Of all counts, each time that the tables are made."""
PRIOR_HAZARD = 0.05
"""Per bucket, of nobody counted yet: since buckets grow, what was used last stays longest."""
WEIGHT = 8.0
"""Segments that the next more general hazard counts for: of all labels for a label, of all uses for a bucket of uses,
the prior for them all."""

MOST = 1e12
"""No count gets there."""

Table = NDArray[np.float64]


class _Saved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    labels: tuple[tuple[int, str, str], ...]
    ended: bytes
    """[classes, AGES] float64, little-endian."""
    used: bytes


_VERSION = 1
_decoder = msgspec.msgpack.Decoder(_Saved)


class Hazards:
    """Counts of a pool, and the tables made of them. Bounded: `ACCESSES` x `LABELS` classes of `AGES` buckets.

    Worth never rises with age and never falls with uses (of one label): a prompt's prefix was used at least as often
    and as lately as what follows it, so it is worth at least as much at every node that has learned the same.
    """

    def __init__(self) -> None:
        self._labels: dict[tuple[int, str, str], int] = {(0, "", ""): UNLABELLED}
        self._ended: Table = np.zeros((ACCESSES, AGES))
        self._used: Table = np.zeros((ACCESSES, AGES))
        self.ended: list[list[float]] = []
        """Since the tables were made, by class and bucket; the owner adds to it."""
        self.used: list[list[float]] = []
        self.retention_value: list[list[float]] = []
        """By class and bucket of age."""
        self._tables()

    def label(self, hints: Hints) -> int:
        """Of a request with this hints."""
        said = (hints.outlook, hints.category, hints.stop_reason)
        label = self._labels.get(said)
        if label is None:
            named = bool(hints.category or hints.stop_reason)
            # Room is left for both other outlooks: whoever makes up categories does not hide what they say.
            if len(self._labels) >= LABELS - 2 * named:
                return self.label(Hints(hints.outlook)) if named else UNLABELLED
            label = self._labels[said] = len(self._labels)
            fresh = np.zeros((ACCESSES, AGES))
            self._ended, self._used = np.vstack([self._ended, fresh]), np.vstack([self._used, fresh])
            self.ended += [[0.0] * AGES for _ in range(ACCESSES)]
            self.used += [[0.0] * AGES for _ in range(ACCESSES)]
            # Until the tables are made again it is worth what anything is.
            self.retention_value += self.retention_value[:ACCESSES]
        return label

    @staticmethod
    def class_of(accesses: int, label: int) -> int:
        """Index of the class."""
        return label * ACCESSES + _BUCKET[min(accesses, len(_BUCKET) - 1)]

    def learn(self) -> None:
        """Old counts fade, new ones are added, the tables are made."""
        self._ended = self._ended * FADE + np.asarray(self.ended)
        self._used = self._used * FADE + np.asarray(self.used)
        self._tables()

    def _tables(self) -> None:
        classes = len(self._ended)
        self.ended = [[0.0] * AGES for _ in range(classes)]
        self.used = [[0.0] * AGES for _ in range(classes)]
        self.retention_value = retention_values(self._hazards()).tolist()

    def _hazards(self) -> Table:
        """[labels, USES, AGES]; each is drawn to the more general one, the more so the less was counted."""
        ended, used = self._ended.reshape(-1, ACCESSES, AGES), self._used.reshape(-1, ACCESSES, AGES)
        hazard: Table = np.full((1, 1, AGES), PRIOR_HAZARD)
        axes: tuple[tuple[int, ...], ...] = ((0, 1), (0,), ())
        for axis in axes:
            in_all, again = ended.sum(axis, keepdims=True), used.sum(axis, keepdims=True)
            hazard = (again + WEIGHT * hazard) / (in_all + WEIGHT)
        # Of the last bucket no end is seen, only uses.
        hazard[..., -1] = hazard[..., -2] / 2
        return hazard

    def save(self) -> bytes:
        """The counts that the tables were made of."""
        ended, used = self._ended.astype("<f8").tobytes(), self._used.astype("<f8").tobytes()
        return msgspec.msgpack.encode(_Saved(_VERSION, tuple(self._labels), ended, used))

    def restore(self, learned: bytes) -> None:
        """Inverse of `save`. Raises `ValueError` for what no `save` made; nothing is changed then."""
        self._labels, self._ended, self._used = _decoded(learned)
        self._tables()

    def absorb(self, learned: bytes) -> None:
        """Of each label the mean of what is counted here and what `save` gave elsewhere; else as `restore`. What was
        added since the tables were made stays to be counted."""
        labels, ended, used = _decoded(learned)
        for said, theirs in labels.items():
            self.label(Hints(*said))
            mine = self._labels.get(said)
            if mine is None:
                continue
            here, there = (
                slice(mine * ACCESSES, (mine + 1) * ACCESSES),
                slice(theirs * ACCESSES, (theirs + 1) * ACCESSES),
            )
            self._ended[here] = (self._ended[here] + ended[there]) / 2
            self._used[here] = (self._used[here] + used[there]) / 2
        self.retention_value = retention_values(self._hazards()).tolist()


def _decoded(learned: bytes) -> tuple[dict[tuple[int, str, str], int], Table, Table]:
    """Labels, ended, used. Raises `ValueError`."""
    try:
        saved = _decoder.decode(learned)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"these are no statistics of re-use: {error}") from error
    labels = dict(zip(saved.labels, range(len(saved.labels)), strict=True))
    shape = (len(labels) * ACCESSES, AGES)
    known = len(labels) == len(saved.labels) <= LABELS and labels.get((0, "", "")) == UNLABELLED
    if saved.version != _VERSION or not known:
        raise ValueError(f"statistics of re-use of version {saved.version} with {len(saved.labels)} labels")
    if len(labels) < len(saved.labels):
        raise ValueError("statistics of re-use with a label twice")
    for outlook, category, stop_reason in labels:
        Hints(outlook, category, stop_reason)
    if not len(saved.ended) == len(saved.used) == shape[0] * shape[1] * 8:
        raise ValueError(f"statistics of re-use with {len(saved.ended)} bytes for {len(labels)} labels")
    ended = np.frombuffer(saved.ended, "<f8").reshape(shape).astype(np.float64)
    used = np.frombuffer(saved.used, "<f8").reshape(shape).astype(np.float64)
    if not ((used >= 0).all() and (ended >= used).all() and (ended < MOST).all()):
        raise ValueError("statistics of re-use with a count that is no number or below 0")
    return labels, ended, used


def retention_values(hazards: Table) -> Table:
    """Gittins index of [labels, USES, AGES] hazards, as [labels * USES, AGES].

    With S[k] the share that is unused until bucket k ends and T[k] the time that all were held by then, the index at
    the beginning of a is max over k >= a of (S[a-1] - S[k]) / (T[k] - T[a-1]).
    """
    stay = 1.0 - np.clip(hazards, 0.0, 0.999)
    ends = np.cumprod(stay, axis=-1)
    begins = np.concatenate([np.ones_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    held = np.cumsum((begins + ends) / 2 * _WIDTHS, axis=-1)
    before = np.concatenate([np.zeros_like(held[..., :1]), held[..., :-1]], axis=-1)
    rates = (begins[..., :, None] - ends[..., None, :]) / np.maximum(held[..., None, :] - before[..., :, None], 1e-12)
    earlier = np.tri(AGES, k=-1, dtype=bool)
    index = np.where(earlier, 0.0, rates).max(axis=-1)
    # Never rising with age, so that of a class the one unused longest is worth least; never falling with uses.
    falling = np.minimum.accumulate(index, axis=-1)
    return np.maximum.accumulate(falling, axis=-2).reshape(-1, AGES)
