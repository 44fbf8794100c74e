"""Consistent hashing with virtual nodes: it names the two candidates of a segment key.

A segment key is a uniform hash already, so its own bytes are the two places on the circle: bytes 0..8 name the
directory node, bytes 8..16 the other candidate.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenlake.directory.ring_record import RingRecord
from tokenlake.identity import NodeId
from tokenlake.keys import KEY_BYTES

FEW = 12
"""Maximum number of keys that are looked up one by one; more keys are looked up with numpy, whose fixed cost is about
that of so many keys."""


class _Circle(NamedTuple):
    """The virtual nodes: their points in ascending order, and for each point the member that it belongs to and the next
    other member; after the last point comes the first. All three as arrays (members by index), to look up many keys,
    and as lists, to look up a few."""

    points: NDArray[np.uint64]
    owner: NDArray[np.int64]
    next_other: NDArray[np.int64]
    starts: list[int]
    owners: list[NodeId]
    others: list[NodeId]


class Ring:
    """The ring that follows from a record of members. Immutable. Equal records give equal rings on every node."""

    def __init__(self, record: RingRecord) -> None:
        """Takes some 100 ms for 256 members unless the circle of these members is cached: a thread that makes a ring of
        the same record first fills the cache for the rules."""
        weights = record.weights()
        if not weights:
            raise ValueError("a ring needs at least one member")
        self.members = tuple(sorted(weights))
        self._names = np.array(self.members, dtype=object)
        counts = tuple(max(1, round(weights[node] / record.unit)) for node in self.members)
        self._circle = _circle(counts, self.members)

    def candidates(self, keys: bytes) -> list[tuple[NodeId, NodeId]]:
        """Returns (directory node, other candidate) for each of the concatenated 32-byte `keys`. Both are the same node
        only when the ring has one member."""
        if len(keys) <= FEW * KEY_BYTES:
            return [self._pair(keys, at) for at in range(0, len(keys), KEY_BYTES)]
        firsts, others = self._locate(keys)
        return list(zip(self._names[firsts].tolist(), self._names[others].tolist(), strict=True))

    def moved(self, previous: Ring, keys: bytes) -> list[bool]:
        """Returns, for each of the concatenated 32-byte `keys`, whether the ring `previous` names another directory
        node than this one."""
        if len(keys) <= FEW * KEY_BYTES:
            pairs = zip(self.candidates(keys), previous.candidates(keys), strict=True)
            return [now[0] != before[0] for now, before in pairs]
        hashes = np.frombuffer(keys, dtype=">u8").reshape(-1, KEY_BYTES // 8)[:, 0].astype(np.uint64)
        moved: list[bool] = (self._first(hashes) != previous._first(hashes)).tolist()
        return moved

    def _first(self, hashes: NDArray[np.uint64]) -> NDArray[np.object_]:
        return self._names[self._circle.owner[np.searchsorted(self._circle.points, hashes)]]

    def _pair(self, keys: bytes, at: int) -> tuple[NodeId, NodeId]:
        starts, owners = self._circle.starts, self._circle.owners
        directory_node = owners[bisect_left(starts, int.from_bytes(keys[at : at + 8], "big"))]
        place = bisect_left(starts, int.from_bytes(keys[at + 8 : at + 16], "big"))
        other = owners[place]
        return directory_node, other if other != directory_node else self._circle.others[place]

    def _locate(self, keys: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        hashes = np.frombuffer(keys, dtype=">u8").reshape(-1, KEY_BYTES // 8)[:, :2].astype(np.uint64)
        points = np.searchsorted(self._circle.points, hashes)
        firsts, others = self._circle.owner[points].T
        return firsts, np.where(others == firsts, self._circle.next_other[points[:, 1]], others)


@functools.lru_cache(maxsize=8)
def _circle(counts: tuple[int, ...], members: tuple[NodeId, ...]) -> _Circle:
    """The circle of members with these numbers of virtual nodes."""
    points: list[tuple[int, int]] = []
    for index, (node, count) in enumerate(zip(members, counts, strict=True)):
        for replica in range(count):
            digest = hashlib.blake2b(f"{node}#{replica}".encode(), digest_size=8).digest()
            points.append((int.from_bytes(digest, "big"), index))
    points.sort()
    owners = [owner for _, owner in points]
    following = _next_distinct(owners)
    starts = [point for point, _ in points]
    owners, following = [*owners, owners[0]], [*following, following[0]]
    return _Circle(
        np.array(starts, dtype=np.uint64),
        np.array(owners, dtype=np.int64),
        np.array(following, dtype=np.int64),
        starts,
        [members[index] for index in owners],
        [members[index] for index in following],
    )


def _next_distinct(owners: list[int]) -> list[int]:
    """Returns, for each virtual node of the circle, the first member after it that differs from its own."""
    count = len(owners)
    result = list(owners)
    following = owners[0]
    # Goes backwards through the circle twice, because the owner that follows the last points is at the beginning.
    for index in range(2 * count - 1, -1, -1):
        at = index % count
        after = (at + 1) % count
        following = owners[after] if owners[after] != owners[at] else result[after]
        result[at] = following
    return result
