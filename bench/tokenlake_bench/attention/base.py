"""Two types of `bench attention`: `Case`, the interface of one measurement, and `Row`, the row of the JSON result that
is computed from the measurement's times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the JSON of `bench attention`. The benchmark repeats each measurement in turns; a turn times one
    attention call and then the fastest way of this machine to do the same work, the ceiling. `ratio`: the call's time
    divided by the ceiling's time in the same turn, median over the turns. `least_ratio`: the shortest time of the call
    over all turns divided by that of the ceiling; other programs on the machine disturb it less. `bytes`: measured
    bytes over the network per call, both directions added; `bytes_formula`: the same number as the formula predicts it;
    both are 0 for attention over local segments."""

    name: str
    p50_us: float
    p99_us: float
    ceiling_us: float
    ratio: float
    least_ratio: float
    bytes: int
    bytes_formula: int


class Case(Protocol):
    """One measurement of `bench attention`: an attention call and its ceiling, the fastest way of this machine to do
    the same work."""

    name: str
    bytes_formula: int

    def sample(self, turn: int) -> float:
        """Make one attention call and return the seconds that it took."""

    def ceiling(self, turn: int) -> float:
        """Do the work of `sample(turn)` in the fastest way that this machine offers without the pool, and return the
        seconds."""

    def bytes(self) -> int:
        """Bytes that one attention call sends and receives over the network."""


def row_of(case: Case, seconds: Sequence[float], ceilings: Sequence[float]) -> Row:
    """The row of the JSON for `case`. `seconds[i]` and `ceilings[i]`: seconds of the attention call and of the fastest
    other way (ceiling) in repetition i."""
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
