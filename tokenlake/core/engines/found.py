"""What one match has found: where each segment is, and what is leased for it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.core.context import KnownAccess
from tokenlake.identity import NodeId
from tokenlake.memory import Segment
from tokenlake.wire import Code

# Constants, because in Python 3.11 each access to a member of an enum costs some 100 ns.
_LOCAL, _REMOTE, _UNKNOWN = Code.LOCAL, Code.REMOTE, Code.UNKNOWN


class Found:
    """What one match has found so far, by index of the key in the prompt."""

    __slots__ = (
        "accesses",
        "codes",
        "cold",
        "disk",
        "disk_s",
        "here",
        "leases",
        "owners",
        "segments",
        "silent",
        "slow",
    )

    def __init__(self, segments: list[Segment | None], here: NodeId, disk: Sequence[int] = ()) -> None:
        """`segments`: the copy of this node for each key, pinned for the match; None where this node has none. `disk`:
        the indices of the keys whose segments are on disk here, and not in memory."""
        self.segments = segments
        self.here = here
        self.disk = list(disk)
        self.accesses: list[KnownAccess] = []
        """From each node that answered: the deepest segment of the prompt whose last access it knows, and that
        access."""
        self.forget_remote()

    def forget_remote(self) -> None:
        """Forget what is leased at other nodes, and which did not answer; the copies of this node stay."""
        self.silent: list[NodeId] = []
        """Nodes that did not answer a lookup, or have segments of the prompt and deliver none."""
        self.codes = bytearray(_LOCAL if segment is not None else _UNKNOWN for segment in self.segments)
        self.owners: list[NodeId | None] = [None] * len(self.segments)
        """The other node where each segment is leased, this one for a segment on disk or in the cold tier; None where
        there is none."""
        for index in self.disk:
            self.codes[index], self.owners[index] = _REMOTE, self.here
        self.cold: list[int] = []
        """The indices of the keys whose segments are read from the cold tier."""
        self.slow: frozenset[int] = frozenset()
        """The indices of those that are there and cheaper to compute."""
        self.disk_s: dict[NodeId, float] = {}
        """By node: the seconds that it takes to read segments that it leased from its disk, if there are such."""
        self.leases: dict[NodeId, list[int]] = {}
        """Ids of all leases that other nodes granted to this match, by node."""

    def has(self, index: int) -> bool:
        """True if the segment is on this node, or leased at another."""
        return self.segments[index] is not None or self.owners[index] is not None

    def missing(self) -> list[int]:
        """Indices of the keys without a copy at this node, ascending."""
        disk = frozenset(self.disk)
        return [index for index, segment in enumerate(self.segments) if segment is None and index not in disk]

    def prefix(self, limit: int) -> int:
        """Returns how many of the first `limit` segments, up to the first missing one, are on this node or leased at
        another."""
        places = zip(self.segments[:limit], self.owners, strict=False)
        gaps = (index for index, (segment, owner) in enumerate(places) if segment is None and owner is None)
        return next(gaps, limit)

    def places(self) -> list[int]:
        """Indices of the segments that are on this node or leased at another, ascending."""
        return [index for index in range(len(self.segments)) if self.has(index)]
