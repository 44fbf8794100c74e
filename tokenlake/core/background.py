"""How much of what comes in may be what no engine waits for: pushes from other nodes, and copies of hot segments.

While nothing is read from other nodes it may take all. Else each byte that is read gives it a right to some: `share` of
all bytes is what it comes to. It comes in pieces, so that a read waits for little more than what is on its way already.
"""

from __future__ import annotations

__all__ = ["Background"]

FLIGHTS = 2
"""Pieces on their way at a time: half of a daemon's receiving threads, since a large piece takes two."""
PIECE_S = 0.05
PIECE_BYTES = 16 << 20
"""At most; a slow peer sends smaller ones, which take `PIECE_S`."""
MOST_CREDIT = 64 << 20
"""Saved up while nothing waited."""


class Background:
    """Counts; whoever has something to bring asks."""

    def __init__(self, share: float) -> None:
        """`share`: more than 0, less than 1."""
        self._per_read_byte = share / (1 - share)
        self._credit = 0.0
        self._reads = 0
        self._pieces = 0

    def piece(self, slot_bytes: int, slot_s: float) -> int:
        """How many segments, of which one takes `slot_s`, should come at a time."""
        return max(1, min(PIECE_BYTES // slot_bytes, int(PIECE_S / slot_s)))

    def may_depart(self, nbytes: int) -> bool:
        """May a piece of so many bytes be asked for now?"""
        # A single segment may be more than can be saved up.
        return self._pieces < FLIGHTS and (not self._reads or self._credit >= min(nbytes, MOST_CREDIT))

    def departs(self, nbytes: int, *, background: bool) -> None:
        """So many bytes are asked for."""
        if background:
            self._pieces += 1
            left = self._credit - nbytes
            self._credit = left if self._reads else max(0.0, left)
        else:
            self._reads += 1
            self._credit = min(MOST_CREDIT, self._credit + nbytes * self._per_read_byte)

    def returned(self, *, background: bool) -> None:
        """Those bytes are here, or will not come."""
        if background:
            self._pieces -= 1
        else:
            self._reads -= 1
