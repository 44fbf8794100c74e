"""The cost in seconds of each way to use a cached sequence, for one batch on one node (design section 8).

Every way includes attention over the sequence, in the prefill and in each decode step. Attention runs in the engine,
where each request has its own copy of the sequence in the engine's cache, or at the peer that the queries are shipped
to, once per step for all requests of the batch. Prompts are prefilled one after the other and decoded together. The
costs of a batch are the sum over its sequences, with one exception: the round trips to a peer are paid once per forward
pass and layer, for any number of sequences that are shipped there. The model leaves out the queries that recomputed
tokens send to shipped sequences before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenlake.attention import AttentionShape
from tokenlake.identity import NodeId
from tokenlake.layout import DTYPE_BYTES, Layout
from tokenlake.planner.fits import PrefillFit
from tokenlake.planner.rates import Rates
from tokenlake.planner.tree import PrefixTree


class Model(msgspec.Struct, frozen=True):
    """Sizes of a model's cache and queries."""

    layers: int
    segment_bytes: int
    query_bytes: int
    """Bytes that one query token of one layer moves between nodes, queries and outputs together
    (`AttentionShape.query_bytes`)."""

    @classmethod
    def of(cls, layout: Layout, shape: AttentionShape) -> Model:
        """Returns the sizes of a model with this layout whose queries and outputs travel in the layout's dtype."""
        size = DTYPE_BYTES[layout.dtype]
        return cls(layout.layers, layout.segment_bytes, shape.query_bytes(size, size))


class Batch:
    """Some requests of a tree that are served in one batch. Immutable."""

    def __init__(self, tree: PrefixTree, requests: Sequence[int], rates: Rates) -> None:
        """`requests`: indices into the tree's. Raises ValueError for an index that is out of range or repeated."""
        if len(set(requests)) != len(requests) or not all(0 <= index < len(tree.requests) for index in requests):
            raise ValueError(f"a batch of requests {list(requests)}; expected different ones of {len(tree.requests)}")
        self.requests = tuple(requests)
        chosen = {index: tree.requests[index] for index in requests}
        self.new = {index: max(1, request.tokens - tree.hit_tokens[index]) for index, request in chosen.items()}
        """Number of tokens behind the cached prefix that each request has to compute."""
        default = rates.answer_tokens.value
        self.steps = {i: default if r.answer_tokens is None else float(r.answer_tokens) for i, r in chosen.items()}
        """Expected number of decode steps of each request."""
        readers: dict[int, list[int]] = {}
        for index in requests:
            for sequence in tree.paths[index]:
                readers.setdefault(sequence, []).append(index)
        self.readers = {sequence: tuple(readers[sequence]) for sequence in sorted(readers)}
        """Indices of the batch's requests that read each sequence; a sequence comes after the one that precedes it in
        the prompt."""

        self.queries = {sequence: sum(self.new[index] for index in group) for sequence, group in self.readers.items()}
        """Number of tokens computed in the prefill that attend to each sequence."""
        self.longest = {sequence: max(self.steps[index] for index in group) for sequence, group in self.readers.items()}
        """Number of decode steps until the last request that reads each sequence is done."""
        self.decoded = {sequence: sum(self.steps[index] for index in group) for sequence, group in self.readers.items()}
        """Sum of the decode steps of all requests that read each sequence."""


LEAST_FETCH_S = 0.050
"""Least limit in seconds of a fetch: the part of a fetch's deadline that covers a busy machine."""


def fetch_limit_s(prefill: PrefillFit, start: int, stop: int) -> float:
    """Returns the seconds after which an engine gives up the fetch of tokens [start, stop) of a prompt: half of the
    time in which it computes them, and at least `LEAST_FETCH_S`. 0, which is no limit, while that time is not known."""
    return max(LEAST_FETCH_S, prefill.seconds(stop - start, start) / 2) if prefill.known else 0.0


class Costs:
    """Costs in seconds of using the cached sequences of one batch in different ways, if the batch runs on `node`."""

    def __init__(self, tree: PrefixTree, batch: Batch, node: NodeId, model: Model, rates: Rates) -> None:
        self.tree = tree
        self.batch = batch
        self.node = node
        self.model = model
        self.rates = rates
        self._attention: dict[int, float] = {}

    def attention(self, sequence: int) -> float:
        """Returns the seconds of attention over a sequence in the engine's own cache, in all steps of all requests that
        read it."""
        known = self._attention.get(sequence)
        if known is None:
            cached, batch = self.tree.tokens[sequence], self.batch
            prefill = self.rates.prefill.attention(len(batch.readers[sequence]), batch.queries[sequence], cached)
            known = self._attention[sequence] = prefill + self.rates.decode.attention(batch.decoded[sequence], cached)
        return known

    def nbytes(self, sequence: int) -> int:
        """Returns the bytes of all segments of a sequence."""
        return len(self.tree.sequences[sequence].keys) * self.model.segment_bytes

    def local(self, sequence: int) -> float:
        """Returns the seconds to read a sequence that is in this node's memory: for each request a copy to the engine's
        cache, and attention there."""
        readers = len(self.batch.readers[sequence])
        # A prompt is matched once: only its first sequence pays for that.
        starts = readers if self.tree.sequences[sequence].parent < 0 else 0
        return self.rates.copy.seconds(readers * self.nbytes(sequence), starts) + self.attention(sequence)

    def fetch(self, sequence: int, owner: NodeId, sharers: int = 1) -> float:
        """Returns the seconds to fetch a sequence from `owner`, or from the disk of this node, to this node's memory
        once; the cost of reading it (`local`) has to be added. `sharers`: number of batches on this node that share the
        fetch."""
        seconds = self.tree.sequences[sequence].disk_s
        if owner != self.node:
            seconds += self.rates.peer(owner).fetch.seconds(self.nbytes(sequence))
        return seconds / max(1, sharers)

    def ship(self, sequence: int, owner: NodeId) -> float:
        """Returns the seconds of sending queries to the sequence at `owner`, in the prefill of each request and in
        every decode step, without the round trips. The owner reads a sequence on its disk once."""
        batch, peer = self.batch, self.rates.peer(owner)
        passes = len(batch.readers[sequence]) + batch.longest[sequence]
        queries = batch.queries[sequence] + batch.decoded[sequence]
        nbytes = queries * self.model.query_bytes
        seconds = self.model.layers * peer.queries.seconds(passes, queries, nbytes, self.tree.tokens[sequence])
        return seconds + self.tree.sequences[sequence].disk_s

    def round_trips(self, owner: NodeId) -> float:
        """Returns the seconds of all round trips of the batch to one peer, over its forward passes and layers, and of
        opening views of sequences there."""
        peer = self.rates.peer(owner)
        passes = len(self.batch.requests) + max(self.batch.steps.values(), default=0.0)
        return peer.open_s.value + self.model.layers * passes * peer.queries.round_trip_s

    def recompute(self, sequence: int) -> float:
        """Returns the seconds to compute all cached tokens from `sequence` on again, for each request that reads it,
        without attention over them in later steps. Valid only if the time of a prefill is known."""
        prefill, new, start = self.rates.prefill, self.batch.new, self.tree.starts[sequence]
        extra = 0.0
        for index in self.batch.readers[sequence]:
            end = self.tree.hit_tokens[index]
            extra += prefill.seconds(new[index] + end - start, start) - prefill.seconds(new[index], end)
        return extra
