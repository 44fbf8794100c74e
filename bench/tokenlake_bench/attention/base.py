"""A measured case, and the row of the JSON computed from its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

__all__ = ["Case", "Row", "row_of"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the JSON. A turn times the call once and its ceiling once. `ratio`: the call's time divided by the
    ceiling's time in the same turn, median over the turns. `least_ratio`: the call's least time over all turns divided
    by the ceiling's, which other work on the machine disturbs less. `bytes`: bytes over the network per call, both
    ways; `bytes_formula`: the same by the formula; both are 0 for a local row."""

    name: str
    p50_us: float
    p99_us: float
    ceiling_us: float
    ratio: float
    least_ratio: float
    bytes: int
    bytes_formula: int


class Case(Protocol):
    """One row to measure."""

    name: str
    bytes_formula: int

    def sample(self, turn: int) -> float:
        """Seconds of one call."""

    def ceiling(self, turn: int) -> float:
        """Seconds of the same work done in the fastest way that this machine offers without the pool."""

    def bytes(self) -> int:
        """Bytes over the network of one call."""


def row_of(case: Case, seconds: Sequence[float], ceilings: Sequence[float]) -> Row:
    """The row of a case. `seconds[i]` and `ceilings[i]`: times of the call and of its ceiling in turn i."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99)).tolist()
    return Row(
        name=case.name,
        p50_us=p50 * 1e6,
        p99_us=p99 * 1e6,
        ceiling_us=float(np.median(ceilings)) * 1e6,
        ratio=float(np.median(np.array(seconds) / np.array(ceilings))),
        least_ratio=min(seconds) / min(ceilings),
        bytes=case.bytes(),
        bytes_formula=case.bytes_formula,
    )
