"""Segments that one strided array reaches: slots at evenly spaced addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["EvenRun", "even_runs"]


class EvenRun(NamedTuple):
    """The addresses `start`, `start + step`, ... : `length` of them."""

    start: int
    step: int
    length: int


def even_runs(addresses: Sequence[int]) -> list[EvenRun]:
    """Distinct `addresses`, in any order, as runs of evenly spaced ones.

    Attention asks for no order, so slots the same distance apart are one strided array. Two always are: there are at
    most half as many runs as addresses, rounded up. A prompt stored in neighbouring slots is one.
    """
    runs: list[EvenRun] = []
    for address in sorted(addresses):
        last = runs[-1] if runs else None
        if last is not None and (last.length == 1 or address - last.start == last.step * last.length):
            runs[-1] = EvenRun(last.start, (address - last.start) // last.length, last.length + 1)
        else:
            runs.append(EvenRun(address, 0, 1))
    return runs
