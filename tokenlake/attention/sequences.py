"""Groups slots at evenly spaced addresses, so that one strided array reaches all slots of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class EvenSequence(NamedTuple):
    """The `length` addresses `start`, `start + step`, ..."""

    start: int
    step: int
    length: int


def even_sequences(addresses: Sequence[int]) -> list[EvenSequence]:
    """Split distinct `addresses`, in any order, into sequences of evenly spaced ones.

    The order of segments does not matter for attention, so the result is sorted. Any two addresses are evenly spaced:
    there are at most half as many sequences as addresses, rounded up. A prompt stored in neighbouring slots is one
    sequence.
    """
    sequences: list[EvenSequence] = []
    for address in sorted(addresses):
        last = sequences[-1] if sequences else None
        if last is not None and (last.length == 1 or address - last.start == last.step * last.length):
            sequences[-1] = EvenSequence(last.start, (address - last.start) // last.length, last.length + 1)
        else:
            sequences.append(EvenSequence(address, 0, 1))
    return sequences
