"""The length of the prefix that SGLang can restore, from the pages that each of its cache pools has. Imports no
engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SidePool(NamedTuple):
    """The pages of a cache pool beside that of the keys and values."""

    name: str
    found: Sequence[bool]
    """For each page of the prefix, whether the pool has it."""
    window: int
    """0: every page of the prefix is needed. Else only the last `window` pages: those of a window of attention, or a
    recurrent state."""

    def restorable(self, pages: int) -> list[int]:
        """The lengths in pages, up to `pages`, of the prefixes that this pool can restore."""
        lengths, run = [], 0
        for length, found in enumerate(self.found[:pages], 1):
            run = run + 1 if found else 0
            if run >= (min(self.window, length) if self.window else length):
                lengths.append(length)
        return lengths


def restorable(pages: int, sides: Sequence[SidePool]) -> tuple[list[int], dict[str, int]]:
    """The lengths in pages that all pools can restore, ascending; and for each side pool that has any, the longest one
    that it can restore. `pages`: the length of the prefix whose keys and values were found."""
    lengths, longest = list(range(1, pages + 1)), {}
    for side in sides:
        own = side.restorable(pages)
        if own:
            longest[side.name] = own[-1]
        kept = set(own)
        lengths = [length for length in lengths if length in kept]
    return lengths, longest


def needed(side: SidePool, length: int) -> range:
    """The pages of a side pool that SGLang reads to restore a prefix of `length` pages."""
    return range(max(0, length - side.window) if side.window else 0, length)
