"""Times as linear models, fitted to measurements."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ENOUGH = 8
"""Number of measurements from which on a fit is made; with fewer the default coefficients hold."""
NEWEST = 64
"""Maximum number of measurements that are kept for a fit."""
MEMORY_S = 300.0
"""Seconds after which measurements are dropped as soon as there are `ENOUGH` newer ones, because links and machines
change."""
FIRM = 1.5
"""Multiple of the median relative error of the measurements. A measurement with a greater error gets proportionally
less weight in the fit, because a busy machine causes outliers."""
ROUNDS = 3
"""Number of times that a fit computes the weights of the measurements anew."""
LEAST_SHARE = 0.1
"""Fraction of the median measured time. The error of a shorter measurement is taken relative to this time, so that it
does not count too much."""


class Fit:
    """Seconds as a sum of terms, each times a coefficient of at least 0. The coefficients minimise the squared relative
    errors of the newest samples; while there are fewer than `ENOUGH` they are the defaults."""

    def __init__(self, defaults: Sequence[float]) -> None:
        self._samples: deque[tuple[float, ...]] = deque(maxlen=NEWEST)
        self._coefficients = tuple(defaults)
        self._stale = False
        self._given = False
        self.at: float | None = None
        """Time in seconds of the newest measurement; None without one."""

    def add_terms(self, terms: Sequence[float], seconds: float, now: float) -> None:
        """Add a measurement that was made at `now`."""
        self._samples.append((now, *terms, max(seconds, 1e-7)))
        while len(self._samples) > ENOUGH and self._samples[-ENOUGH][0] - MEMORY_S > self._samples[0][0]:
            self._samples.popleft()
        self._stale = True
        self.at = now

    def give(self, coefficients: Sequence[float], *, known: bool) -> None:
        """Take coefficients that were fitted elsewhere, until there are `ENOUGH` measurements here. `known`: they were
        fitted to measurements and are no defaults. Raises ValueError for another number of them."""
        if len(coefficients) != len(self._coefficients):
            raise ValueError(f"{len(coefficients)} coefficients; expected {len(self._coefficients)}")
        self._coefficients = tuple(coefficients)
        self._given = known

    def forget(self, keep: int = 0) -> None:
        """Drop all measurements but the newest `keep`. The coefficients stay until there are `ENOUGH` measurements
        again."""
        while len(self._samples) > keep:
            self._samples.popleft()

    @property
    def known(self) -> bool:
        """True if there are enough measurements for a fit, here or where the coefficients were fitted."""
        return self._given or len(self._samples) >= ENOUGH

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The fitted coefficients: seconds per unit of each term of the sum."""
        if self._stale:
            self._stale = False
            if len(self._samples) >= ENOUGH:
                self._coefficients = _fitted(self._samples)
        return self._coefficients

    def age(self, now: float) -> float | None:
        """Returns the seconds since the newest measurement; None while the default coefficients hold."""
        return None if self.at is None or not self.known else now - self.at


class PrefillFit(Fit):
    """A prefill of `new` tokens of one prompt behind `prefix` cached ones: `a + b new + c new (prefix + new / 2) +
    d prefix`, where `d` is the cost of reading a cached token. Only `d` has a default; the others are 0 until the fit
    is `known`."""

    def __init__(self) -> None:
        super().__init__((0.0, 0.0, 0.0, 1e-6))

    def add(self, new: int, prefix: int, seconds: float, now: float) -> None:
        """Add the measured seconds of one prefill that ran alone on its processor."""
        self.add_step([(new, prefix)], seconds, now)

    def add_step(self, parts: Sequence[tuple[int, int]], seconds: float, now: float) -> None:
        """Add one step that computed several prompts, with (new, prefix) tokens each: the terms of all prompts, and `a`
        once."""
        tokens = sum(new for new, _ in parts)
        pairs = sum(new * (prefix + new / 2) for new, prefix in parts)
        self.add_terms((1.0, tokens, pairs, sum(prefix for _, prefix in parts)), seconds, now)

    def seconds(self, new: float, prefix: float) -> float:
        """Returns the seconds of the prefill of one prompt. Valid only if the fit is `known`."""
        a, b, c, d = self.coefficients
        return a + b * new + c * new * (prefix + new / 2) + d * prefix

    def attention(self, prompts: int, new: float, cached: int) -> float:
        """Returns the predicted seconds of attention over a common prefix of `cached` tokens, summed over the prefills
        of `prompts` prompts. `new`: number of tokens that these prefills compute, summed over the prompts."""
        _, _, c, d = self.coefficients
        return cached * (c * new + d * prompts)


class DecodeFit(Fit):
    """A decode step of `rows` requests with `cached` tokens each, in the engine's own cache: `a + b rows +
    c rows cached`."""

    def __init__(self) -> None:
        super().__init__((0.0, 0.0, 1e-6))

    def add(self, rows: int, cached: int, seconds: float, now: float) -> None:
        """Add the measured seconds of one decode step, or the mean of several."""
        self.add_terms((1.0, rows, rows * cached), seconds, now)

    def seconds(self, rows: int, cached: float) -> float:
        """Returns the seconds of one decode step. Valid only if the fit is `known`."""
        a, b, c = self.coefficients
        return a + b * rows + c * rows * cached

    def attention(self, steps: float, cached: int) -> float:
        """Returns the predicted seconds of attention over a common prefix of `cached` tokens, summed over all requests.
        `steps`: number of decode steps, summed over the requests."""
        return self.coefficients[2] * steps * cached


class QueryFit(Fit):
    """Seconds that shipping its queries to a peer adds to one layer of a forward pass: `a + b bytes + c cached +
    d queries cached`. `a` is the round trip, with the work of both query engines and of this engine; `b` moves queries
    and outputs; `c` reads the cache; `d` is arithmetic."""

    def __init__(self) -> None:
        super().__init__((400e-6, 2e-9, 0.2e-6, 0.05e-6))

    def add(self, queries: int, nbytes: int, cached: int, seconds: float, now: float) -> None:
        """Add the measured seconds of one layer in one forward pass, or the mean of several."""
        self.add_terms((1.0, nbytes, cached, queries * cached), seconds, now)

    def seconds(self, passes: float, queries: float, nbytes: float, cached: int) -> float:
        """Seconds of one layer over `passes` forward passes with `queries` tokens and `nbytes` in all, without the
        round trips."""
        _, b, c, d = self.coefficients
        return b * nbytes + cached * (c * passes + d * queries)

    @property
    def round_trip_s(self) -> float:
        """Seconds of the round trip of one layer in one forward pass."""
        return self.coefficients[0]


class TransferFit(Fit):
    """A transfer of bytes: `a + b bytes`."""

    def __init__(self, start_s: float, byte_s: float) -> None:
        """Default coefficients."""
        super().__init__((start_s, byte_s))

    def add(self, nbytes: int, seconds: float, now: float) -> None:
        """Add the measured seconds of one transfer of `nbytes`."""
        self.add_terms((1.0, nbytes), seconds, now)

    def seconds(self, nbytes: float, starts: float = 1) -> float:
        """Returns the seconds of `starts` transfers with `nbytes` in all."""
        a, b = self.coefficients
        return a * starts + b * nbytes


def _fitted(samples: Sequence[Sequence[float]]) -> tuple[float, ...]:
    table = np.array(samples, dtype=np.float64)
    terms, seconds = table[:, 1:-1], table[:, -1]
    # With absolute errors the longest samples alone would decide; LEAST_SHARE bounds the weight of the shortest.
    each = 1 / np.maximum(seconds, LEAST_SHARE * np.median(seconds))
    terms, targets = terms * each[:, None], seconds * each
    scale = np.maximum(terms.max(0), 1e-30)
    terms /= scale
    weights = np.ones(len(terms))
    for _ in range(ROUNDS):
        found = _not_negative(terms * weights[:, None], targets * weights)
        off = np.abs(terms @ found - targets)
        weights = np.sqrt(np.minimum(1.0, FIRM * max(float(np.median(off)), 1e-9) / np.maximum(off, 1e-12)))
    return tuple((found / scale).tolist())


def _not_negative(terms: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the coefficients of the least squares fit of `targets` by `terms`, none negative: the most negative
    coefficient is set to 0 until none is negative."""
    found = np.zeros(terms.shape[1])
    kept = list(range(terms.shape[1]))
    while kept:
        part, *_ = np.linalg.lstsq(terms[:, kept], targets, rcond=None)
        if part.min() >= 0:
            found[kept] = part
            break
        kept.pop(int(part.argmin()))
    return found
