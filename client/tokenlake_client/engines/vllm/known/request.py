"""A request as the scheduler's side knows it, from its arrival to its end. Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from tokenlake.hints import NO_HINTS
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix
from tokenlake_client.engines.vllm.known.disaggregated import NOT_SPLIT, Split, has_tail
from tokenlake_client.engines.vllm.known.lookup import Lookup
from tokenlake_client.engines.vllm.served_request import ServedRequest, media_hash
from tokenlake_client.pool import Pool
from tokenlake_client.salts import joined_salt

_STOP_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_REPETITION": "repetition",
    "FINISHED_ABORTED": "abort",
}


@dataclass(frozen=True, slots=True)
class ScheduledPart:
    """The part of one step of the engine that belongs to one request."""

    request: str
    computed: int
    """The number of tokens of the request that were computed before the step."""
    new: int
    """The number of tokens of the request that the step computes."""
    blocks: Sequence[int]
    """The numbers of the blocks that vLLM gave the request for this step; with `whole`, all its blocks, first those
    that vLLM's own prefix cache shares with other requests."""
    whole: bool


@dataclass(slots=True, kw_only=True)
class RequestState(ServedRequest):
    """The scheduler side's state of one request, with its keys and its lookup."""

    request: Any
    """vLLM's `Request`."""
    saved: int = 0
    """The number of segments, from the first on, that were handed out to be stored or need not be stored."""
    weights: str | None = None
    """The weights digest for the keys, after the weights were changed in place; None: the layout's digest."""
    extras: Mapping[int, Sequence[bytes]] | None = None
    """By the index of a segment, digests of the images and other inputs in it."""
    split: Split = NOT_SPLIT
    """The part of the request that this engine serves, where prefill and decode have different engines."""
    prompt: int = 0
    """The number of the request's tokens when it arrived."""
    tail: SegmentKey | None = None
    """The key of the tail of the prompt, if the lookup asks for it."""
    offered: tuple[SegmentKey, ...] | None = None
    """The segments of the prompt that are stored for the engine that decodes it; None until all their tokens are
    planned to be computed, empty where the pool has refused them."""
    taken: bool | None = None
    """Of a prompt that another engine has computed: is all of it but the last token loaded? None before that is known,
    and for other requests."""
    last_job: int = 0
    """The number of the newest save job of the request; 0 before the first."""
    prefix: Prefix | None = None
    incarnation: int = 0
    """The incarnation of the daemon whose tenant secret the keys in `prefix` were hashed with."""
    lookup: Lookup | None = None
    local: int = 0
    """The number of the request's tokens in vLLM's own prefix cache when vLLM last asked for matched tokens."""
    skipped: int = 0
    """The number of the request's tokens that the pool has and that are not loaded, because computing them is
    faster."""
    remote: int = 0
    """The number of the request's tokens that are loaded from segments of other nodes."""
    waits_since: float | None = None
    """The time at which vLLM first asked for the matched tokens of a lookup, since the request last had no blocks."""
    waited: bool = False
    """True: the wait since that time has ended and was measured."""
    gap: int | None = None
    """The index of the first segment that this engine computes and for which it sets in-flight markers; None: there is
    none."""
    marker_s: float = 0.0
    """Seconds that the in-flight markers from segment `gap` on should last, if the prompt takes several steps; 0: they
    are set already, or not needed."""

    def keys(self, pool: Pool, salt: str | None) -> Sequence[SegmentKey]:
        """The keys of all full segments of the request's known tokens. Only tokens that were not hashed before are
        hashed, or all tokens after a restart of the daemon, which may have another secret then. `salt`: the salt of the
        engine, which is part of the keys. Only for a request that is `identified`."""
        if self.prefix is None or self.incarnation != pool.engine.incarnation:
            self.prefix = self._chain(pool, salt, self.extras)
            self.incarnation = pool.engine.incarnation
        known = self.prefix.tokens
        if known < self.request.num_tokens:
            self.prefix.extend(self.request.all_token_ids[known : self.request.num_tokens])
        return self.prefix.keys

    def keys_of(self, pool: Pool, salt: str | None, tokens: Sequence[int]) -> Sequence[SegmentKey]:
        """The keys of another prompt of the same sender: it has the adapter and the salts of this request."""
        chain = self._chain(pool, salt)
        chain.extend(tokens)
        return chain.keys

    def _chain(self, pool: Pool, salt: str | None, extras: Mapping[int, Sequence[bytes]] | None = None) -> Prefix:
        return pool.prefix(
            adapter=self.adapter.digest if self.adapter is not None else None,
            salt=joined_salt(salt, self.request.cache_salt),
            extras=extras,
            weights_digest=self.weights,
        )

    def contents(self, pool: Pool, segments: range, model: str) -> tuple[bytes, ...]:
        """The contents of `segments`, whose keys are known, for routers. `model`: the name under which vLLM serves it.
        Empty where the daemon does not publish them, and for a prompt that a router does not know by its tokens: one
        with a salt of its own or with media."""
        if not model or self.prefix is None or self.extras or self.request.cache_salt is not None:
            return ()
        adapter = self.adapter.name if self.adapter is not None else ""
        return pool.engine.contents(self.prefix, self.request.all_token_ids, segments, model, adapter)

    def tail_key(self, pool: Pool, salt: str | None, segment: int) -> SegmentKey | None:
        """The key of the tail of the prompt; None where the prompt has no tail that the engine that decodes it needs.
        Arguments as of `keys`. `segment`: the number of tokens of a segment."""
        if not has_tail(self.prompt, segment):
            return None
        self.keys(pool, salt)
        full = self.prompt // segment
        assert self.prefix is not None
        return self.prefix.tail_key(full, self.request.all_token_ids[full * segment : self.prompt])

    def end(self, end: RequestEnd, pool: Pool | None, salt: str | None) -> None:
        """Set the final hints of the request: send them for the segments that were handed out or loaded; segments that
        are stored later carry them. `pool`, `salt`: as of `keys`; without a pool nothing is sent. Raises the errors of
        the pool."""
        known = self.hints or NO_HINTS
        self.hints = known.ended(end.stop_reason, end.output_tokens)
        if pool is not None and self.prefix is not None and self.hints != known and self.saved:
            pool.hint(self.keys(pool, salt)[: self.saved], self.hints)

    def take(self, segments: int) -> range:
        """The segments to store now, of which `segments` are computed. They count as handed out afterwards."""
        taken = range(self.saved, max(segments, self.saved))
        self.saved = taken.stop
        return taken

    def drop_lookup(self) -> None:
        """Give up the request's lookup: the segments that it found or will find are released."""
        if self.lookup is not None:
            self.lookup.drop()
            self.lookup = None


class RequestEnd(NamedTuple):
    """The facts about the end of a request."""

    complete: bool
    """True: the request was not aborted, and all its tokens but the last are computed."""
    stop_reason: str = ""
    """The reason why the request ended, in the terms of `tokenlake.hints`; empty if the request was refused."""
    output_tokens: int = -1
    """The number of tokens that the request generated; -1: unknown."""


def end_of(status: str, output_tokens: int) -> RequestEnd:
    """The facts about the end of a request, from vLLM's `status` of the request and the length of its answer."""
    reason = _STOP_REASONS.get(status, "")
    return RequestEnd(reason in ("stop", "length"), reason, output_tokens if reason else -1)


def loadable_until(hits: int, total: int, segment: int, block: int) -> int:
    """The token at which a load ends, of a request of `total` tokens whose first `hits` segments the pool has; the last
    one of them may be the tail of the prompt. It is a multiple of `block`, and leaves at least one token to compute,
    because vLLM needs the logits of the last token. `block`: the block size, or 1 where a load may end within a block::

        0      local hit            hits * segment      total
        |------|---------------------|------------------|
        | vLLM | loaded from the pool| computed         |
               ^ a multiple of the block size, which may lie within a segment
    """
    return max(0, min(hits * segment, (total - 1) // block * block))


def loadable_segments(total: int, segment: int, block: int) -> int:
    """The largest number of segments, from the first on, that a load of a request of `total` tokens could use."""
    return -(-loadable_until(total // segment, total, segment, block) // segment)


def media_digests(features: Sequence[Any], segment: int) -> dict[int, list[bytes]] | None:
    """The extras of `Pool.prefix` for a prompt with these images, sounds or videos: by the index of a segment, a digest
    of each input that has tokens in it, and its place relative to the segment. None without inputs. `features`: vLLM's
    `MultiModalFeatureSpec` of each."""
    extras: dict[int, list[bytes]] = {}
    for feature in sorted(features, key=lambda one: one.mm_position.offset):
        start, tokens = feature.mm_position.offset, feature.mm_position.length
        for index in range(start // segment, -(-(start + tokens) // segment)):
            place = start - index * segment
            extras.setdefault(index, []).append(
                msgspec.msgpack.encode([feature.modality, media_hash(feature), place, tokens])
            )
    return extras or None
