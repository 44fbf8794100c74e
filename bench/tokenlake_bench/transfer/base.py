"""The measurements of `bench transfer`, the sizes of segments, and the interface of the measured systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

MATCH_KEYS: Final = 128
WINDOWS: Final = 9
"""Number of equal sets of segments (windows) that successive calls use in rotation: 9 x 128 MiB, so that the next set
is in no processor cache."""
FAST: Final = 20
"""Number of calls per repetition of a measurement whose calls take well under a millisecond."""

HASH_MANY: Final = "hash_32k_tokens"
HASH_NEW: Final = "hash_256_tokens"
MATCH: Final = f"match_{MATCH_KEYS}"

COPY_CEILING: Final = "copy_1_thread"
COPY_CEILING_2: Final = "copy_2_threads"
WIRE_CEILING: Final = "tcp_loop"


@dataclass(frozen=True, slots=True)
class RowKind:
    """A kind of call to measure. `nbytes`: bytes moved per call, 0 for calls that have no rate; `ceiling`: name of the
    machine's own rate (of `Ceilings`) that bounds the rate of this call."""

    name: str
    nbytes: int = 0
    ceiling: str | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """A segment size to measure. `count`: number of segments in those calls that move many segments."""

    label: str
    segment_bytes: int
    count: int

    @property
    def many(self) -> str:
        """Part of a measurement's name for calls that move `count` segments of this size."""
        return f"{self.count}x{self.label}"

    @property
    def one(self) -> str:
        """Part of a measurement's name for calls that move one segment of this size."""
        return f"1x{self.label}"

    @property
    def window_bytes(self) -> int:
        """Bytes of one window: the `count` segments that one call moves, in calls that move many segments."""
        return self.count * self.segment_bytes

    def transfer_rows(self) -> list[RowKind]:
        """Kinds of calls that move segments of this size, in the order in which they run."""
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
        """Kinds of calls that hash or match keys. Their cost depends on the number of keys and not on the segment size:
        they are measured only with the size whose `count` is `MATCH_KEYS`; for other sizes the list is empty."""
        if self.count != MATCH_KEYS:
            return []
        return [RowKind(name) for name in (HASH_MANY, HASH_NEW, MATCH, f"{MATCH}_remote")]

    def rows(self) -> list[RowKind]:
        """All kinds of calls that the benchmark measures with this segment size: those of `key_rows`, which hash and
        match keys, then those of `transfer_rows`, which move segments."""
        return [*self.key_rows(), *self.transfer_rows()]


SIZES: Final = (Size("1MiB", 1 << 20, 128), Size("32MiB", 32 << 20, 4))
"""The measured segment sizes; a call with many segments moves 128 MiB with either."""


class System(Protocol):
    """A system that `bench transfer` measures: the pool, another store, or the machine itself."""

    name: str

    def rows(self) -> Sequence[str]:
        """Names of the kinds of calls that this system can make."""

    def sample(self, row: str, turn: int) -> list[float]:
        """Make one or several calls of the kind `row` and compare their bytes. Returns the seconds of each call.
        `turn`, the number of the repetition, chooses the set of segments."""

    def close(self) -> None:
        """End the processes of the system. Idempotent."""
