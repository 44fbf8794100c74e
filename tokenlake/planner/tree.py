"""The prefix tree of some requests: the cached sequences of segments that they read, and the owners of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from tokenlake.identity import NodeId, SegmentKey


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a scheduler."""

    name: str
    keys: tuple[SegmentKey, ...]
    """Keys of the prompt's full segments; the last token belongs to none (`tokenlake.keys.Prefix`)."""
    tokens: int
    """Number of tokens of the prompt."""
    answer_tokens: int | None = None
    """Expected number of decode steps; None for the mean of earlier answers (`Rates.answer_tokens`)."""


class SegmentSequence(msgspec.Struct, frozen=True):
    """Consecutive segments of a prompt that the same requests read and the same nodes own, all in memory or all on
    disk."""

    parent: int
    """Index of the preceding sequence; -1 for the first one of a prompt."""
    keys: tuple[SegmentKey, ...]
    owners: tuple[NodeId, ...]
    """Nodes that have all segments of the sequence; never empty."""
    requests: tuple[int, ...]
    """Indices of the requests whose prefix contains the sequence, ascending."""
    disk_s: float = 0.0
    """Expected seconds until the owner has read the sequence from its disk, behind the reads that wait there; 0: it is
    in memory."""


class PrefixTree:
    """The cached prefixes of `requests`. Immutable. It records the owners at the time of `grow`: segments may be
    evicted before a plan that was made from the tree is carried out."""

    def __init__(self, requests: Sequence[Request], segment_tokens: int, sequences: Sequence[SegmentSequence]) -> None:
        """`sequences`: each sequence after the one that precedes it in the prompt, in the order of the requests. Only
        `grow` makes a tree."""
        self.requests = tuple(requests)
        self.segment_tokens = segment_tokens
        self.sequences = tuple(sequences)
        self.tokens = tuple(len(sequence.keys) * segment_tokens for sequence in sequences)
        """Number of tokens of each sequence."""
        starts: list[int] = []
        paths: list[list[int]] = [[] for _ in requests]
        for index, sequence in enumerate(sequences):
            starts.append(0 if sequence.parent < 0 else starts[sequence.parent] + self.tokens[sequence.parent])
            for request in sequence.requests:
                paths[request].append(index)
        self.starts = tuple(starts)
        """Number of tokens of the prompt before each sequence."""
        self.paths = tuple(tuple(path) for path in paths)
        """Indices of the sequences of each request's prefix, from its first token on."""
        self.hit_tokens = tuple(sum(self.tokens[index] for index in path) for path in paths)
        """Number of cached tokens in the prefix of each request."""

    def owners(self) -> dict[SegmentKey, tuple[NodeId, ...]]:
        """Returns the nodes that have each cached segment of the tree."""
        return {key: sequence.owners for sequence in self.sequences for key in sequence.keys}

    def disk_s(self) -> dict[SegmentKey, float]:
        """Returns, for each segment on a disk, its part of the seconds of its sequence."""
        on_disk = [sequence for sequence in self.sequences if sequence.disk_s]
        return {key: sequence.disk_s / len(sequence.keys) for sequence in on_disk for key in sequence.keys}

    def slots(self) -> dict[NodeId, int]:
        """Per node, the number of segments of this prefix tree that it has a copy of."""
        held: dict[NodeId, int] = {}
        for sequence in self.sequences:
            for node in sequence.owners:
                held[node] = held.get(node, 0) + len(sequence.keys)
        return held


class _Node:
    """One segment while `grow` builds the tree."""

    __slots__ = ("children", "key", "owners", "requests")

    def __init__(self, key: SegmentKey, owners: tuple[NodeId, ...]) -> None:
        self.key = key
        self.owners = owners
        self.children: dict[SegmentKey, _Node] = {}
        self.requests: list[int] = []


def grow(
    requests: Sequence[Request],
    owners: Mapping[SegmentKey, tuple[NodeId, ...]],
    segment_tokens: int,
    disk_s: Mapping[SegmentKey, float] = MappingProxyType({}),
) -> PrefixTree:
    """Build the tree of `requests`. `owners`: the nodes that have each segment. `disk_s`: of each segment that is on
    the disk of its only owner, the seconds that reading it there takes. The prefix of a request ends before the
    first segment without an owner, and leaves at least one token of the prompt to compute."""
    top: dict[SegmentKey, _Node] = {}
    for index, request in enumerate(requests):
        level = top
        for key in request.keys[: max(0, request.tokens - 1) // segment_tokens]:
            nodes = owners.get(key, ())
            if not nodes:
                break
            node = level.get(key)
            if node is None:
                node = level[key] = _Node(key, nodes)
            node.requests.append(index)
            level = node.children
    sequences: list[SegmentSequence] = []
    waiting = [(-1, node) for node in reversed(top.values())]
    while waiting:
        parent, node = waiting.pop()
        keys = [node.key]
        last = node
        requests_here, owners_here = node.requests, node.owners
        while len(last.children) == 1:
            (child,) = last.children.values()
            if child.owners != owners_here or child.requests != requests_here:
                break
            if (child.key in disk_s) != (last.key in disk_s):
                break
            keys.append(child.key)
            last = child
        seconds = sum(disk_s.get(key, 0.0) for key in keys)
        waiting += [(len(sequences), child) for child in reversed(last.children.values())]
        sequences.append(SegmentSequence(parent, tuple(keys), node.owners, tuple(node.requests), seconds))
    return PrefixTree(requests, segment_tokens, sequences)
