"""The prompts of a batch, and the part of the batch's key and value tensors that belongs to each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix
from tokenlake_client.engines.common.request import RequestInfo
from tokenlake_client.engines.transformers.cache import row_cache
from tokenlake_client.engines.transformers.segment_copy import LayerPair
from tokenlake_client.engines.transformers.shipped_cache import SharedPrefix, ShippedCache, ShippedLayer
from tokenlake_client.lease import Lease


@dataclass(slots=True)
class Row:
    """One prompt of a batch. `layers`: per layer, views [1, heads, prompt - 1 - start, dim] of the batch's storage, for
    the prompt's tokens from `start` on, except the last."""

    tokens: list[int]
    padding: int = 0
    name: str | None = None
    """The name of the prompt's request in the logs of nodes; None: the pool makes one up."""
    hints: Hints | None = None
    """The hints that the caller gave for the request."""
    traceparent: str | None = None
    """The span of the request, as of `MatchOptions`."""
    layers: list[LayerPair] = field(default_factory=list)
    chain: Prefix | None = None
    """The keys of the prompt's segments; None until they are hashed."""
    limit: int | None = None
    """The number of segments, from the first on, that may be read from the pool; None: all."""
    found: int | None = None
    """The number of the prompt's segments, from the first on, that the last match found in the pool; None: there was no
    match."""
    lease: Lease | None = None
    """The lease of the prompt's segments that were found in the pool, for the load that follows."""
    shared: SharedPrefix | None = None
    """The prefix whose tokens are not in `layers`, because queries are sent to it; None: `layers` begin with the
    prompt."""
    loaded: int = 0
    """The number of the prompt's tokens, at the beginning of `layers`, whose cache came from the pool."""

    def keys_to_use(self, segment_tokens: int) -> Sequence[SegmentKey]:
        """The keys of the prompt's segments that may be read from the pool. At least the last token of the prompt is
        left to compute."""
        if self.chain is None:
            return ()
        whole = (len(self.tokens) - 1) // segment_tokens
        return self.chain.keys[: whole if self.limit is None else min(whole, self.limit)]

    def keys_to_match(self, segment_tokens: int) -> Sequence[SegmentKey]:
        """The keys to look up: `keys_to_use`, and, if these are all segments that were found, also the keys of the
        following segments, which other engines may be computing now."""
        if self.limit is not None and self.limit == self.found:
            return replace(self, limit=None).keys_to_use(segment_tokens)
        return self.keys_to_use(segment_tokens)

    def release_lease(self, *, counted: bool = True) -> None:
        """Release the lease of the prompt's segments, if there is one. `counted`: as of `Lease.release`. Raises
        the errors of the pool."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release(counted=counted)

    @property
    def info(self) -> RequestInfo:
        """The facts about the prompt's request that the pool is told: its name, the length of the prompt, and its
        hints."""
        return RequestInfo(self.name, self.hints, len(self.tokens), self.traceparent)

    @property
    def start(self) -> int:
        """The index, in the prompt, of the first token that `layers` store."""
        return 0 if self.shared is None else len(self.shared.tokens)

    @property
    def known(self) -> int:
        """The number of the prompt's tokens that the prefill does not compute, because they came from the pool or stay
        on their node."""
        return self.start + self.loaded

    def counts(self) -> dict[str, int]:
        """The prompt's part of the engine's counts: the numbers of its tokens by the source of their cache."""
        shared = self.shared
        shipped = self.start if shared is not None and shared.view is not None else 0
        hit = self.loaded if shared is None else shared.loaded
        asked = len(self.tokens)
        return {
            "requests": 1,
            "tokens_asked": asked,
            "tokens_hit": hit,
            "tokens_shipped": shipped,
            "tokens_computed": asked - hit - shipped,
        }


def place_rows(rows: Sequence[Row], storage: Sequence[LayerPair], before: int, stop: int) -> None:
    """Set the rows' layers to their parts of `storage`, up to column `stop` of the padded batch. The first column of
    `storage` is column `before` of the padded batch."""
    for index, row in enumerate(rows):
        row.layers = row_cache(storage, index, row.padding + row.start - before, stop - before)


def cache_of_rows(rows: Sequence[Row], storage: Sequence[LayerPair], before: int, length: int) -> ShippedCache:
    """The cache of the batch's prompts (`rows`) with their `shared` prefixes. `storage` holds the columns of the padded
    batch from column `before` on; those before column `length` are valid."""
    shared: dict[int, tuple[SharedPrefix, list[int]]] = {}
    for index, row in enumerate(rows):
        if row.shared is not None:
            shared.setdefault(id(row.shared), (row.shared, []))[1].append(index)
    layers = [ShippedLayer(keys, values, length - before, before) for keys, values in storage]
    return ShippedCache(layers, list(shared.values()), [row.padding + row.start for row in rows])
