"""The prompts of a batch on their way into its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix
from tokenlake_client.engines.base import Asked, CacheLease
from tokenlake_client.engines.transformers.cache import row_cache
from tokenlake_client.engines.transformers.shipped import SharedPrefix
from tokenlake_client.engines.transformers.slots import LayerPair

__all__ = ["Row", "place_rows"]


@dataclass(slots=True)
class Row:
    """One prompt. `layers` are views [1, heads, prompt - 1 - start, dim] of the batch's storage."""

    tokens: list[int]
    padding: int = 0
    name: str | None = None
    """Of the request, in logs."""
    hints: Hints | None = None
    """What the caller knows of it."""
    layers: list[LayerPair] = field(default_factory=list)
    chain: Prefix | None = None
    """The keys of its segments, once the pool told them."""
    limit: int | None = None
    """Segments of its prefix that are worth using; None: all."""
    found: int | None = None
    """Segments of its prefix that the pool had when it was asked last; None: it was not asked."""
    lease: CacheLease | None = None
    """Of what was found, for whoever reads it next."""
    shared: SharedPrefix | None = None
    """What it begins with and is not in `layers`."""
    loaded: int = 0
    """Tokens at the beginning of `layers` that came from the pool."""

    def wanted(self, segment_tokens: int) -> Sequence[SegmentKey]:
        """The keys of what is to be read of it. At least the last token stays to compute."""
        if self.chain is None:
            return ()
        whole = (len(self.tokens) - 1) // segment_tokens
        return self.chain.keys[: whole if self.limit is None else min(whole, self.limit)]

    def awaited(self, segment_tokens: int) -> Sequence[SegmentKey]:
        """As `wanted`, and where all that was found is worth using, what follows as well: others may compute it now."""
        if self.limit is not None and self.limit == self.found:
            return replace(self, limit=None).wanted(segment_tokens)
        return self.wanted(segment_tokens)

    def take_lease(self) -> CacheLease | None:
        """It is the caller's."""
        lease, self.lease = self.lease, None
        return lease

    def give_back(self) -> None:
        """Nobody reads what was leased. Raises what the pool raises."""
        lease = self.take_lease()
        if lease is not None:
            lease.release()

    @property
    def asked(self) -> Asked:
        """On whose behalf it is read."""
        return Asked(self.name, self.hints, len(self.tokens))

    @property
    def start(self) -> int:
        """The first token in `layers`."""
        return 0 if self.shared is None else len(self.shared.tokens)

    @property
    def known(self) -> int:
        """Tokens that prefill need not compute."""
        return self.start + self.loaded

    def counts(self) -> dict[str, int]:
        """Of its tokens, by what became of each."""
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
    """Give each row its place in `storage`, whose first column is token `before` of the padded rows: up to `stop`,
    counted there too."""
    for index, row in enumerate(rows):
        row.layers = row_cache(storage, index, row.padding + row.start - before, stop - before)
