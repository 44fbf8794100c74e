"""The order in which nodes get copies of a hot segment, and the choice of the copy to read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenlake.identity import NodeId, SegmentKey

__all__ = ["less_loaded_of_two", "rendezvous_order", "splitmix64"]


def rendezvous_order(key: SegmentKey, nodes: Iterable[NodeId]) -> list[NodeId]:
    """`nodes` in the order in which they get copies of `key` (rendezvous hashing): when a node joins or leaves, the
    order of the others does not change."""

    def rank(node: NodeId) -> bytes:
        return hashlib.blake2b(node.encode(), key=key, digest_size=8).digest()

    return sorted(nodes, key=lambda node: (rank(node), node))


def less_loaded_of_two(nodes: Sequence[NodeId], draw: int, load: Callable[[NodeId], float]) -> NodeId:
    """Pick two of `nodes`, which must not be empty, by the 64-bit `draw`; return the one with the lower load, the first
    if the loads are equal."""
    count = len(nodes)
    first = (draw >> 32) % count
    if count == 1:
        return nodes[first]
    second = (first + 1 + (draw & 0xFFFFFFFF) % (count - 1)) % count
    return min((nodes[first], nodes[second]), key=load)


def splitmix64(seed: int) -> Iterator[int]:
    """Pseudorandom 64-bit numbers, the same for the same seed (SplitMix64, Steele et al. 2014)."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        yield mixed ^ (mixed >> 31)
