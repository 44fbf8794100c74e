"""Consistent hashing with virtual nodes: it names the two candidates of a segment key.

A segment key is a uniform hash already, so its own bytes are the two places on the circle: bytes 0..8 name the
directory node, bytes 8..16 the other candidate.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import Epoch, NodeId
from tokenlake.keys import KEY_BYTES

__all__ = ["VIRTUAL_NODES", "Ring"]

VIRTUAL_NODES = 128
"""Virtual nodes per node of average weight; the standard deviation of a node's share of the keys is then about 9 %
(1 / sqrt(128))."""


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
    """The ring of a pool. Immutable. Nodes that are configured with equal `members` have equal rings."""

    def __init__(self, members: Mapping[NodeId, int]) -> None:
        """`members`: weight of each node, in bytes of its memory."""
        if not members or min(members.values()) <= 0:
            raise ValueError("a ring needs at least one member, each of positive weight")
        self.members = tuple(sorted(members))
        self._names = np.array(self.members, dtype=object)
        # The circle is cached: making it takes some 100 ms for 256 members, and a simulation of 256 nodes has a ring
        # for each node.
        self._circle = _circle(tuple(members[node] for node in self.members), self.members)
        self.epoch = Epoch(self._digest(members))

    def _digest(self, members: Mapping[NodeId, int]) -> int:
        weights = [(node, members[node]) for node in self.members]
        text = msgspec.msgpack.encode([VIRTUAL_NODES, weights])
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def candidates(self, keys: bytes) -> list[tuple[NodeId, NodeId]]:
        """Returns (directory node, other candidate) for each of the concatenated 32-byte `keys`. Both are the same node
        only when the ring has one member."""
        if len(keys) <= FEW * KEY_BYTES:
            return [self._pair(keys, at) for at in range(0, len(keys), KEY_BYTES)]
        firsts, others = self._locate(keys)
        return list(zip(self._names[firsts].tolist(), self._names[others].tolist(), strict=True))

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


@functools.lru_cache(maxsize=4)
def _circle(weights: tuple[int, ...], members: tuple[NodeId, ...]) -> _Circle:
    mean = sum(weights) / len(weights)
    points: list[tuple[int, int]] = []
    for index, (node, weight) in enumerate(zip(members, weights, strict=True)):
        for replica in range(max(1, round(VIRTUAL_NODES * weight / mean))):
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
