"""The share of background transfers (hand-overs), for which no engine waits."""

from __future__ import annotations

MAX_PIECES = 2
"""Maximum number of pieces of background transfers under way at a time: half of a daemon's receiving threads, since a
large piece takes two."""
PIECE_S = 0.05
"""Expected duration of a background piece: a read that starts meanwhile is delayed by little more than this."""
MAX_PIECE_BYTES = 16 << 20
MAX_CREDIT = 64 << 20
"""Maximum number of bytes of background transfers for which fetches of engines earn credit in advance (see
`BackgroundLimit`)."""


class BackgroundLimit:
    """Limits background transfers (hand-overs) to a share of the received bytes while engines fetch.

    While no engine fetches, only the number of background transfers is limited. While engines fetch, each byte that
    they fetch earns credit, which a background transfer spends.
    """

    def __init__(self, share: float) -> None:
        """`share` of all received bytes, in (0, 1)."""
        self._credit_per_byte = share / (1 - share)
        self._credit = 0.0
        self._fetches = 0
        self._pieces = 0

    def piece_segments(self, slot_bytes: int, slot_s: float) -> int:
        """Returns how many segments one piece of a background transfer has, at least 1. `slot_s`: expected seconds to
        transfer one segment of `slot_bytes`."""
        return max(1, min(MAX_PIECE_BYTES // slot_bytes, int(PIECE_S / slot_s)))

    def allows(self, nbytes: int) -> bool:
        """Returns True if a piece of `nbytes` of a background transfer may start now."""
        # A single segment may be larger than the maximum credit.
        return self._pieces < MAX_PIECES and (not self._fetches or self._credit >= min(nbytes, MAX_CREDIT))

    def started(self, nbytes: int, *, background: bool) -> None:
        """Count a transfer of `nbytes` that starts. `background`: no engine waits for it."""
        if background:
            self._pieces += 1
            credit = self._credit - nbytes
            self._credit = credit if self._fetches else max(0.0, credit)
        else:
            self._fetches += 1
            self._credit = min(MAX_CREDIT, self._credit + nbytes * self._credit_per_byte)

    def ended(self, *, background: bool) -> None:
        """Count the end of a transfer that had started, whatever its outcome."""
        if background:
            self._pieces -= 1
        else:
            self._fetches -= 1
