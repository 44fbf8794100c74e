"""What the planner knows of this machine and of its peers: every input measured, with a default and an age."""

from __future__ import annotations

from collections import deque

import numpy as np

from tokenlake.identity import NodeId

__all__ = ["ENOUGH_PREFILLS", "Attention", "Estimate", "PeerRates", "PrefillFit", "Rates"]

WEIGHT = 0.2
"""Of the newest sample in a running mean."""
ENOUGH_PREFILLS = 8
"""Below as many samples the time of a prefill is not known, and nothing is recomputed that could be read."""
PREFILLS = 64
"""Samples that the fit of the prefill is made of: the newest."""


class Estimate:
    """A running mean that starts at a default, which the first sample replaces."""

    __slots__ = ("at", "samples", "value")

    def __init__(self, default: float) -> None:
        self.value = default
        self.samples = 0
        self.at: float | None = None
        """When the newest sample came; None: it is the default."""

    def add(self, sample: float, now: float) -> None:
        """A measurement at `now`."""
        self.value += (sample - self.value) * (WEIGHT if self.samples else 1.0)
        self.samples += 1
        self.at = now

    def age(self, now: float) -> float | None:
        """Seconds since the newest sample; None: it is the default."""
        return None if self.at is None else now - self.at


class Attention:
    """Of one query engine."""

    def __init__(self) -> None:
        self.token_s = Estimate(1.2e-6)
        """Per cached token and layer, whatever the queries: reading keys and values."""
        self.pair_s = Estimate(0.22e-6)
        """Per query token, cached token and layer: arithmetic."""

    def seconds(self, queries: float, cached: int) -> float:
        """One layer's attention of `queries` tokens over `cached` ones: the slower of reading and reckoning."""
        return cached * max(self.token_s.value, queries * self.pair_s.value)


class PeerRates:
    """Of the way to one peer, and of what waits there."""

    def __init__(self) -> None:
        self.attention = Attention()
        self.round_trip_s = Estimate(200e-6)
        """A query over nothing, there and back, both query engines included."""
        self.bytes_per_s = Estimate(500e6)
        """Of a fetch or of queries."""
        self.backlog_s = Estimate(0.0)
        """Work that waits at its query engine, as it says in its replies."""


class PrefillFit:
    """Seconds of a prefill of `new` tokens behind `prefix` cached ones: `a + b new + c new (prefix + new / 2)`, the
    least squares of the newest samples, no coefficient below 0."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, float]] = deque(maxlen=PREFILLS)
        self._coefficients: tuple[float, float, float] | None = None
        self.at: float | None = None

    def add(self, new: int, prefix: int, seconds: float, now: float) -> None:
        """What an engine reports of one prefill, alone on its processor."""
        self._samples.append((new, prefix, seconds))
        self._coefficients = None
        self.at = now

    @property
    def known(self) -> bool:
        """Were there samples enough?"""
        return len(self._samples) >= ENOUGH_PREFILLS

    def seconds(self, new: int, prefix: int) -> float:
        """Only where it is `known`."""
        if self._coefficients is None:
            self._coefficients = self._fit()
        a, b, c = self._coefficients
        return a + b * new + c * new * (prefix + new / 2)

    def _fit(self) -> tuple[float, float, float]:
        new, prefix, seconds = np.array(self._samples, dtype=np.float64).T
        terms = np.stack([np.ones_like(new), new, new * (prefix + new / 2)], axis=1)
        # Relative errors count: else the longest prompts alone decide.
        weights = 1 / np.maximum(seconds, 1e-6)
        kept = [0, 1, 2]
        while True:
            scale = np.maximum(np.abs(terms[:, kept]).max(0), 1e-12)
            found, *_ = np.linalg.lstsq(terms[:, kept] / scale * weights[:, None], seconds * weights, rcond=None)
            if len(kept) == 1 or found.min() >= 0:
                break
            kept.pop(int(found.argmin()))
        coefficients = [0.0, 0.0, 0.0]
        for index, value in zip(kept, found / scale, strict=True):
            coefficients[index] = max(0.0, float(value))
        return coefficients[0], coefficients[1], coefficients[2]


class Rates:
    """All inputs of the cost model. Mutable; whoever measures adds, with its own clock."""

    def __init__(self) -> None:
        self._peers: dict[NodeId, PeerRates] = {}
        self.copy_bytes_per_s = Estimate(5e9)
        """From the arena into an engine's own cache; infinite for one that attends in place."""
        self.attention = Attention()
        """This node's."""
        self.prefill = PrefillFit()
        self.answer_tokens = Estimate(128.0)
        """Decode steps of a request that gives no hint."""

    def peer(self, node: NodeId) -> PeerRates:
        """Of one peer; defaults until something was measured."""
        found = self._peers.get(node)
        if found is None:
            found = self._peers[node] = PeerRates()
        return found

    def ages(self, now: float) -> dict[str, float | None]:
        """Seconds since each input was measured, None for a default, by its name in the documentation."""
        inputs = {"copy_bytes_per_s": self.copy_bytes_per_s, "answer_tokens": self.answer_tokens}
        inputs |= {"attention.token_s": self.attention.token_s, "attention.pair_s": self.attention.pair_s}
        for node, peer in self._peers.items():
            inputs |= {f"{name} {node}": value for name, value in vars(peer).items() if isinstance(value, Estimate)}
            inputs |= {f"attention.{name} {node}": value for name, value in vars(peer.attention).items()}
        ages = {name: estimate.age(now) for name, estimate in inputs.items()}
        ages["prefill"] = None if self.prefill.at is None else now - self.prefill.at
        return ages
