"""The rows of the benchmark, the sizes of segments, and the interface of the measured systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["FAST", "HASH_MANY", "HASH_NEW", "MATCH", "MATCH_KEYS", "SIZES", "WINDOWS", "RowKind", "Size", "System"]

MATCH_KEYS: Final = 128
WINDOWS: Final = 9
"""Number of sets of segments (windows) that the rows use in rotation: 9 x 128 MiB, so that the next window is in no
processor cache."""
FAST: Final = 20
"""Number of calls per turn in a row whose calls take well under a millisecond."""

HASH_MANY: Final = "hash_32k_tokens"
HASH_NEW: Final = "hash_256_tokens"
MATCH: Final = f"match_{MATCH_KEYS}"

COPY_CEILING: Final = "copy_1_thread"
COPY_CEILING_2: Final = "copy_2_threads"
WIRE_CEILING: Final = "tcp_loop"


@dataclass(frozen=True, slots=True)
class RowKind:
    """A row to measure. `nbytes`: bytes moved per call, 0 for a row without a rate; `ceiling`: the row of `Ceilings`
    that bounds its rate."""

    name: str
    nbytes: int = 0
    ceiling: str | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """Segments of one size. `count`: segments of a call that moves many."""

    label: str
    segment_bytes: int
    count: int

    @property
    def many(self) -> str:
        """Label of a call with `count` segments in the names of rows."""
        return f"{self.count}x{self.label}"

    @property
    def one(self) -> str:
        """Label of a call with one segment in the names of rows."""
        return f"1x{self.label}"

    @property
    def window_bytes(self) -> int:
        """Bytes of one set of segments."""
        return self.count * self.segment_bytes

    def transfer_rows(self) -> list[RowKind]:
        """Rows that move segments of this size, in the order in which they run."""
        many, one, whole, single = self.many, self.one, self.window_bytes, self.segment_bytes
        return [
            RowKind(f"lease_{many}"),
            RowKind(f"copy_{many}", whole, COPY_CEILING),
            RowKind(f"copy_{many}_2_threads", whole, COPY_CEILING_2),
            RowKind(f"store_{many}", whole, COPY_CEILING),
            RowKind(f"fetch_tcp_{many}", whole, WIRE_CEILING),
            RowKind(f"copy_{one}", single, COPY_CEILING),
            RowKind(f"store_{one}", single, COPY_CEILING),
            RowKind(f"fetch_{one}", single, WIRE_CEILING),
        ]

    def key_rows(self) -> list[RowKind]:
        """Rows whose cost depends on the number of keys, and not on the size of segments. They are measured only with
        the size that has `MATCH_KEYS` segments per call."""
        if self.count != MATCH_KEYS:
            return []
        return [RowKind(name) for name in (HASH_MANY, HASH_NEW, MATCH, f"{MATCH}_remote", f"{MATCH}_under_load")]

    def rows(self) -> list[RowKind]:
        """All rows of this size."""
        return [*self.key_rows(), *self.transfer_rows()]


SIZES: Final = (Size("1MiB", 1 << 20, 128), Size("32MiB", 32 << 20, 4))
"""Both move 128 MiB per call."""


class System(Protocol):
    """A system to measure: the pool, another store, or the machine itself."""

    name: str

    def rows(self) -> Sequence[str]:
        """The rows that `sample` knows."""

    def sample(self, row: str, turn: int) -> list[float]:
        """Make one or several calls of a row and compare their bytes. Returns the seconds of each call. `turn` chooses
        the window."""

    def close(self) -> None:
        """End its processes. Idempotent."""
