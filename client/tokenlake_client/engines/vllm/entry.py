"""A request as the scheduler's side knows it, from its arrival to its end. Imports no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix
from tokenlake_client.engines.vllm.lookup import Lookup, LookupPool
from tokenlake_client.engines.vllm.saving import Progress

__all__ = ["EngineRequest", "Entry", "Scheduled"]


class EngineRequest(Protocol):
    """What is used of vLLM's `Request`."""

    request_id: str
    num_computed_tokens: int
    cache_salt: str | None

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was sampled."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """These tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's part in a step."""

    request: str
    computed: int
    """Tokens before this step."""
    new: int
    fresh: Sequence[int]
    """Blocks it was given for this step; `whole`: all its blocks, shared ones first."""
    whole: bool


@dataclass(slots=True)
class Entry:
    """What is known of it, and where it is on its way."""

    request: EngineRequest
    progress: Progress
    hints: Hints | None = None
    """What it said of itself."""
    weights: str | None = None
    """Digest of weights that were changed in place, as part of its keys; None: the layout's."""
    prefix: Prefix | None = None
    incarnation: int = 0
    """Of the daemon whose secret `prefix` was hashed with."""
    lookup: Lookup | None = None
    placed: bool = False
    """It has blocks; a later question begins anew, because it lost them."""
    may_store: bool = True
    """False: the weights changed after it got its blocks, so they may hold the cache of two versions."""
    may_load: bool = True
    local: int = 0
    """Tokens that vLLM itself had when it last asked."""
    skipped: int = 0
    """Tokens that the pool has and that are not worth loading, when vLLM last asked."""
    gap: int | None = None
    """The first segment that the pool lacks that others wait for because it is computed here; None: there is none."""
    claim_s: float = 0.0
    """How long they are to wait for what is behind it, should it take several steps; 0: they were told."""

    def keys(self, pool: LookupPool, salt: str | None) -> Sequence[SegmentKey]:
        """Of all full segments of the known tokens: what is new is hashed. Another daemon may have another secret.
        `salt`: the engine's."""
        if self.prefix is None or self.incarnation != pool.incarnation:
            self.prefix = pool.prefix(salt=_joined(salt, self.request.cache_salt), weights_digest=self.weights)
            self.incarnation = pool.incarnation
        known = self.prefix.tokens
        if known < self.request.num_tokens:
            self.prefix.extend(self.request.all_token_ids[known : self.request.num_tokens])
        return self.prefix.keys


def _joined(ours: str | None, theirs: str | None) -> str | None:
    """One salt of the engine's and the request's; no two pairs give the same."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return f"{len(ours)}:{ours}{theirs}"
