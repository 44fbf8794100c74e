"""Times as sums of terms, fitted to what was measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENOUGH", "DecodeFit", "Fit", "PrefillFit", "QueryFit", "TransferFit"]

ENOUGH = 8
"""Below as many samples the defaults hold."""
NEWEST = 64
"""Samples that a fit is made of."""
MEMORY_S = 300.0
"""Older samples are dropped as soon as there are `ENOUGH` newer ones: links and machines change."""
FIRM = 1.5
"""Times the median relative error: what is further off counts less, in proportion. A busy machine makes outliers."""
ROUNDS = 3
LEAST_SHARE = 0.1
"""Of the median time: an error of a shorter one counts as if that long."""


class Fit:
    """Seconds as a sum of terms, each times a coefficient of at least 0: the least squares of the relative errors of
    the newest samples, or the defaults while there are too few."""

    def __init__(self, defaults: Sequence[float]) -> None:
        self._samples: deque[tuple[float, ...]] = deque(maxlen=NEWEST)
        self._coefficients = tuple(defaults)
        self._stale = False
        self.at: float | None = None
        """When the newest sample came; None: there is none."""

    def add_terms(self, terms: Sequence[float], seconds: float, now: float) -> None:
        """A measurement at `now`."""
        self._samples.append((now, *terms, max(seconds, 1e-7)))
        while len(self._samples) > ENOUGH and self._samples[-ENOUGH][0] - MEMORY_S > self._samples[0][0]:
            self._samples.popleft()
        self._stale = True
        self.at = now

    def forget(self, keep: int = 0) -> None:
        """Begin anew, with the newest `keep` samples. Until there are enough the coefficients stay as they are."""
        while len(self._samples) > keep:
            self._samples.popleft()

    @property
    def known(self) -> bool:
        """Were there samples enough?"""
        return len(self._samples) >= ENOUGH

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each term."""
        if self._stale:
            self._stale = False
            if self.known:
                self._coefficients = _fitted(self._samples)
        return self._coefficients

    def age(self, now: float) -> float | None:
        """Seconds since the newest sample; None: the defaults hold."""
        return None if self.at is None or not self.known else now - self.at


class PrefillFit(Fit):
    """A prefill of `new` tokens of one prompt behind `prefix` cached ones: `a + b new + c new (prefix + new / 2) +
    d prefix`; `d` is reading what is cached. There is no default: until it is `known` all but `a` and `d` are 0."""

    def __init__(self, prefix_s: float = 1e-6) -> None:
        """`prefix_s`: the default of `d`."""
        super().__init__((0.0, 0.0, 0.0, prefix_s))

    def add(self, new: int, prefix: int, seconds: float, now: float) -> None:
        """What an engine reports of one prefill, alone on its processor."""
        self.add_step([(new, prefix)], seconds, now)

    def add_step(self, parts: Sequence[tuple[int, int]], seconds: float, now: float) -> None:
        """What an engine reports of one step that computed (new, prefix) tokens of each of several prompts: the terms
        of all, and `a` once."""
        tokens = sum(new for new, _ in parts)
        pairs = sum(new * (prefix + new / 2) for new, prefix in parts)
        self.add_terms((1.0, tokens, pairs, sum(prefix for _, prefix in parts)), seconds, now)

    def seconds(self, new: float, prefix: float) -> float:
        """Of one prompt. Only where it is `known`."""
        a, b, c, d = self.coefficients
        return a + b * new + c * new * (prefix + new / 2) + d * prefix

    def attention(self, prompts: int, new: float, cached: int) -> float:
        """The part of prefills of `new` tokens in all, of so many prompts, that is due to `cached` tokens which each of
        them has in its prefix."""
        _, _, c, d = self.coefficients
        return cached * (c * new + d * prompts)


class DecodeFit(Fit):
    """A decode step of `rows` requests with `cached` tokens each, in the engine's own cache: `a + b rows +
    c rows cached`."""

    def __init__(self, pair_s: float = 1e-6) -> None:
        """`pair_s`: the default of `c`."""
        super().__init__((0.0, 0.0, pair_s))

    def add(self, rows: int, cached: int, seconds: float, now: float) -> None:
        """What an engine reports of one step, or of several on average."""
        self.add_terms((1.0, rows, rows * cached), seconds, now)

    def seconds(self, rows: int, cached: float) -> float:
        """Of one step. Only where it is `known`."""
        a, b, c = self.coefficients
        return a + b * rows + c * rows * cached

    def attention(self, steps: float, cached: int) -> float:
        """The part that is due to `cached` tokens, over the steps of all requests, `steps` in sum."""
        return self.coefficients[2] * steps * cached


class QueryFit(Fit):
    """What one layer of a forward pass takes longer when its queries go to a peer: `a + b bytes + c cached +
    d queries cached`, which are the round trip, both query engines' and this engine's work included; moving queries
    and outputs; reading the cache; arithmetic."""

    def __init__(
        self, round_trip_s: float = 400e-6, byte_s: float = 2e-9, token_s: float = 0.2e-6, pair_s: float = 0.05e-6
    ) -> None:
        """The defaults."""
        super().__init__((round_trip_s, byte_s, token_s, pair_s))

    def add(self, queries: int, nbytes: int, cached: int, seconds: float, now: float) -> None:
        """Of one layer, or of several on average."""
        self.add_terms((1.0, nbytes, cached, queries * cached), seconds, now)

    def seconds(self, passes: float, queries: float, nbytes: float, cached: int) -> float:
        """One layer of so many forward passes with `queries` tokens and `nbytes` in all, without the round trips."""
        _, b, c, d = self.coefficients
        return b * nbytes + cached * (c * passes + d * queries)

    @property
    def round_trip_s(self) -> float:
        """Per layer and forward pass."""
        return self.coefficients[0]


class TransferFit(Fit):
    """Moving bytes: `a + b bytes`."""

    def __init__(self, start_s: float, byte_s: float) -> None:
        """The defaults."""
        super().__init__((start_s, byte_s))

    def add(self, nbytes: int, seconds: float, now: float) -> None:
        """Of one transfer."""
        self.add_terms((1.0, nbytes), seconds, now)

    def seconds(self, nbytes: float, starts: float = 1) -> float:
        """Of `starts` transfers of `nbytes` in all."""
        a, b = self.coefficients
        return a * starts + b * nbytes


def _fitted(samples: Sequence[Sequence[float]]) -> tuple[float, ...]:
    table = np.array(samples, dtype=np.float64)
    terms, seconds = table[:, 1:-1], table[:, -1]
    # Relative errors count, else the longest alone decide; but not those of what is next to nothing.
    each = 1 / np.maximum(seconds, LEAST_SHARE * np.median(seconds))
    terms, wanted = terms * each[:, None], seconds * each
    scale = np.maximum(terms.max(0), 1e-30)
    terms /= scale
    weights = np.ones(len(terms))
    for _ in range(ROUNDS):
        found = _not_negative(terms * weights[:, None], wanted * weights)
        off = np.abs(terms @ found - wanted)
        weights = np.sqrt(np.minimum(1.0, FIRM * max(float(np.median(off)), 1e-9) / np.maximum(off, 1e-12)))
    return tuple((found / scale).tolist())


def _not_negative(terms: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least squares, where the most negative coefficient is set to 0 until none is negative."""
    found = np.zeros(terms.shape[1])
    kept = list(range(terms.shape[1]))
    while kept:
        part, *_ = np.linalg.lstsq(terms[:, kept], wanted, rcond=None)
        if part.min() >= 0:
            found[kept] = part
            break
        kept.pop(int(part.argmin()))
    return found
