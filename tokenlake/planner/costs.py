"""What each way to use a cached run costs one batch on one node, in seconds (design section 8).

Attention over the run is part of each, in the prefill and in each decode step: in the engine, where each request has a
copy of its own in its cache, or where the run is shipped to, once for all requests of the batch that are in a step.
Prompts are prefilled one after the other and decoded together. Costs of a batch add up over its runs, but for one part:
the round trips to a peer are paid once per forward pass and layer, however many runs are shipped to it. Left out: the
queries that recomputed tokens send to shipped runs before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenlake.attention import AttentionShape
from tokenlake.identity import NodeId
from tokenlake.layout import DTYPE_BYTES, Layout
from tokenlake.planner.rates import Rates
from tokenlake.planner.tree import PrefixTree

__all__ = ["Batch", "Costs", "Model"]


class Model(msgspec.Struct, frozen=True):
    """What a model's attention weighs."""

    layers: int
    segment_bytes: int
    query_bytes: int
    """Per query token and layer, both ways (`AttentionShape.query_bytes`)."""

    @classmethod
    def of(cls, layout: Layout, shape: AttentionShape) -> Model:
        """Queries and outputs travel in the layout's dtype."""
        size = DTYPE_BYTES[layout.dtype]
        return cls(layout.layers, layout.segment_bytes, shape.query_bytes(size, size))


class Batch:
    """Some requests of a tree, in one batch. Not to be changed."""

    def __init__(self, tree: PrefixTree, requests: Sequence[int], rates: Rates) -> None:
        """`requests`: indices. Raises ValueError for one that the tree does not have, or that is there twice."""
        if len(set(requests)) != len(requests) or not all(0 <= index < len(tree.requests) for index in requests):
            raise ValueError(f"a batch of requests {list(requests)}; expected different ones of {len(tree.requests)}")
        self.requests = tuple(requests)
        chosen = {index: tree.requests[index] for index in requests}
        self.new = {index: max(1, request.tokens - tree.hit_tokens[index]) for index, request in chosen.items()}
        """Per request, tokens behind its cached prefix."""
        default = rates.answer_tokens.value
        self.steps = {i: default if r.answer_tokens is None else float(r.answer_tokens) for i, r in chosen.items()}
        """Per request, decode steps expected."""
        readers: dict[int, list[int]] = {}
        for index in requests:
            for run in tree.paths[index]:
                readers.setdefault(run, []).append(index)
        self.readers = {run: tuple(readers[run]) for run in sorted(readers)}
        """Per run of theirs, parents first, those that read it."""

        self.queries = {run: sum(self.new[index] for index in group) for run, group in self.readers.items()}
        """Per run, query tokens over it in the prefill."""
        self.longest = {run: max(self.steps[index] for index in group) for run, group in self.readers.items()}
        """Per run, decode steps until its last reader is done."""
        self.decoded = {run: sum(self.steps[index] for index in group) for run, group in self.readers.items()}
        """Per run, decode steps of all its readers, in sum."""


class Costs:
    """Of one batch's runs on `node`."""

    def __init__(self, tree: PrefixTree, batch: Batch, node: NodeId, model: Model, rates: Rates) -> None:
        self.tree = tree
        self.batch = batch
        self.node = node
        self.model = model
        self.rates = rates
        self._attention: dict[int, float] = {}

    def attention(self, run: int) -> float:
        """Over a run that is in the engine's own cache, in all steps: each reader has its own."""
        known = self._attention.get(run)
        if known is None:
            cached, batch = self.tree.tokens[run], self.batch
            prefill = self.rates.prefill.attention(len(batch.readers[run]), batch.queries[run], cached)
            known = self._attention[run] = prefill + self.rates.decode.attention(batch.decoded[run], cached)
        return known

    def nbytes(self, run: int) -> int:
        """Of its segments."""
        return len(self.tree.runs[run].keys) * self.model.segment_bytes

    def local(self, run: int) -> float:
        """Read here, where the run lies: copied to the engine for each reader, attended there."""
        readers = len(self.batch.readers[run])
        # A prompt is matched once, which nothing behind its first run pays again.
        starts = readers if self.tree.runs[run].parent < 0 else 0
        return self.rates.copy.seconds(readers * self.nbytes(run), starts) + self.attention(run)

    def fetch(self, run: int, owner: NodeId, sharers: int = 1) -> float:
        """Brought here once; then it is `local`, which comes on top. `sharers`: batches on this node that read the run
        and share its way."""
        return self.rates.peer(owner).fetch.seconds(self.nbytes(run)) / max(1, sharers)

    def ship(self, run: int, owner: NodeId) -> float:
        """Queries go to the run, in each reader's prefill and in every decode step of the batch; without
        `round_trips`."""
        batch, peer = self.batch, self.rates.peer(owner)
        passes = len(batch.readers[run]) + batch.longest[run]
        queries = batch.queries[run] + batch.decoded[run]
        layer = peer.queries.seconds(passes, queries, queries * self.model.query_bytes, self.tree.tokens[run])
        return self.model.layers * (layer + passes * peer.backlog_s.value)

    def round_trips(self, owner: NodeId) -> float:
        """Of all forward passes and layers of the batch to one peer, and opening its views."""
        peer = self.rates.peer(owner)
        passes = len(self.batch.requests) + max(self.batch.steps.values(), default=0.0)
        return peer.open_s.value + self.model.layers * passes * peer.queries.round_trip_s

    def recompute(self, run: int) -> float:
        """Prefill all cached tokens from `run` on as well, each reader for itself; without attention over them in the
        steps that come after. Only where the prefill's time is known."""
        prefill, new, start = self.rates.prefill, self.batch.new, self.tree.starts[run]
        extra = 0.0
        for index in self.batch.readers[run]:
            end = self.tree.hit_tokens[index]
            extra += prefill.seconds(new[index] + end - start, start) - prefill.seconds(new[index], end)
        return extra
