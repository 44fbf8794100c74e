"""The prefix tree of some requests: which cached runs they read, who shares each, and where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tokenlake.identity import NodeId, SegmentKey

__all__ = ["PrefixTree", "Request", "Run", "grow"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as a scheduler knows it."""

    name: str
    keys: tuple[SegmentKey, ...]
    """Of the full segments of its prompt, but for the last token (`tokenlake.keys.Prefix`)."""
    tokens: int
    """Of its prompt, computed or not."""
    answer_tokens: int | None = None
    """Decode steps expected; None: what answers took so far (`Rates.answer_tokens`)."""


class Run(msgspec.Struct, frozen=True):
    """Consecutive segments with the same readers and the same owners."""

    parent: int
    """Index of the run before it; -1 for the first of a prompt."""
    keys: tuple[SegmentKey, ...]
    owners: tuple[NodeId, ...]
    """Nodes that have all of it, in the order given for its keys; never empty."""
    requests: tuple[int, ...]
    """Indices of the requests whose prefix it is part of, ascending."""


class PrefixTree:
    """What is cached of the prefixes of `requests`. Only what `owners` said when it was grown: a plan made from it may
    meet segments that are gone. Not to be changed."""

    def __init__(self, requests: Sequence[Request], segment_tokens: int, runs: Sequence[Run]) -> None:
        """Use `grow`. `runs`: parents before children, in the order in which the requests reach them."""
        self.requests = tuple(requests)
        self.segment_tokens = segment_tokens
        self.runs = tuple(runs)
        self.tokens = tuple(len(run.keys) * segment_tokens for run in runs)
        """Of each run."""
        starts: list[int] = []
        paths: list[list[int]] = [[] for _ in requests]
        for index, run in enumerate(runs):
            starts.append(0 if run.parent < 0 else starts[run.parent] + self.tokens[run.parent])
            for request in run.requests:
                paths[request].append(index)
        self.starts = tuple(starts)
        """Tokens before each run."""
        self.paths = tuple(tuple(path) for path in paths)
        """The runs of each request's prefix, from its first token on."""
        self.hit_tokens = tuple(sum(self.tokens[index] for index in path) for path in paths)
        """Cached tokens of each request's prefix."""

    def slots(self) -> dict[NodeId, int]:
        """Segments of the tree that each node holds, by node."""
        held: dict[NodeId, int] = {}
        for run in self.runs:
            for node in run.owners:
                held[node] = held.get(node, 0) + len(run.keys)
        return held


class _Node:
    """One segment while the tree grows."""

    __slots__ = ("children", "key", "owners", "requests")

    def __init__(self, key: SegmentKey, owners: tuple[NodeId, ...]) -> None:
        self.key = key
        self.owners = owners
        self.children: dict[SegmentKey, _Node] = {}
        self.requests: list[int] = []


def grow(
    requests: Sequence[Request], owners: Mapping[SegmentKey, tuple[NodeId, ...]], segment_tokens: int
) -> PrefixTree:
    """The tree of `requests`. `owners`: the nodes that have each segment; a prefix ends at the first that nobody has,
    and leaves at least one token of its prompt to compute."""
    top: dict[SegmentKey, _Node] = {}
    for index, request in enumerate(requests):
        level = top
        for key in request.keys[: max(0, request.tokens - 1) // segment_tokens]:
            where = owners.get(key, ())
            if not where:
                break
            node = level.setdefault(key, _Node(key, where))
            node.requests.append(index)
            level = node.children
    runs: list[Run] = []
    waiting = [(-1, node) for node in reversed(top.values())]
    while waiting:
        parent, node = waiting.pop()
        keys = [node.key]
        last = node
        while len(last.children) == 1:
            (child,) = last.children.values()
            if child.requests != node.requests or child.owners != node.owners:
                break
            keys.append(child.key)
            last = child
        waiting += [(len(runs), child) for child in reversed(last.children.values())]
        runs.append(Run(parent, tuple(keys), node.owners, tuple(node.requests)))
    return PrefixTree(requests, segment_tokens, runs)
