"""A request as the scheduler's side knows it, from its arrival to its end. Imports no engine."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from tokenlake.hints import NO_HINTS, Hints, Outlook
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix
from tokenlake_client.engines.vllm.adapters import AdapterUse, RequestAdapter
from tokenlake_client.engines.vllm.disaggregated import NOT_SPLIT, Split, has_tail
from tokenlake_client.engines.vllm.lookup import Lookup
from tokenlake_client.pool import Pool
from tokenlake_client.salts import joined_salt

HINTS_KEY = "tokenlake"
"""The key in vLLM's `kv_transfer_params` under which a request carries its hints."""
_STOP_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_REPETITION": "repetition",
    "FINISHED_ABORTED": "abort",
}
MAX_SHOWN = 200
"""Limit of the characters of an error that a client's values may make long."""
_OUTLOOKS = {outlook.name.lower(): outlook for outlook in Outlook}
_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""A hash of vLLM's: BLAKE3, SHA-256 or SHA-512 in hexadecimal digits."""


class _RequestHints(msgspec.Struct, forbid_unknown_fields=True):
    """The hints of a request as its client states them."""

    outlook: Literal["unknown", "goes_on", "over"] = "unknown"
    category: str = ""
    priority: int = 0
    ttl_s: float = 0.0
    pin_s: float = 0.0


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
class ServedRequest:
    """What both connectors know of a request on the scheduler's side: its hints, its adapter and its permissions."""

    hints: Hints | None = None
    """The hints that the request carried in vLLM's `kv_transfer_params`."""
    adapter: RequestAdapter | None = None
    """The request's LoRA adapter."""
    placed: bool = False
    """True: vLLM has given the request blocks. If it then asks for the request's matched tokens again, the request has
    lost its blocks and begins anew."""
    may_store: bool = True
    """False: the weights changed after the request got its blocks, so they may hold cache of two versions."""
    may_load: bool = True
    """False: a lookup was late or a load failed; the request does not use the pool again."""

    @property
    def identified(self) -> bool:
        """True if all values are known on which the keys depend."""
        return self.adapter is None or self.adapter.digest is not None

    @property
    def adapter_use(self) -> AdapterUse | None:
        """The request's adapter for the ranks."""
        return self.adapter.use if self.adapter is not None else None


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
                msgspec.msgpack.encode([feature.modality, _media_hash(feature), place, tokens])
            )
    return extras or None


def unnamed_media(features: Sequence[Any]) -> str | None:
    """The reason why the pool cannot serve a request with these inputs; None if it can. vLLM hashes the content of an
    input, unless the client names it (`multi_modal_uuids`): such a name may stand for another content elsewhere."""
    if all(_HASH.fullmatch(_media_hash(feature)) for feature in features):
        return None
    return "requests whose images, sounds or videos have names of the client (multi_modal_uuids)"


def _media_hash(feature: Any) -> str:
    # The identifier may have the name of a LoRA adapter before the hash; the keys have the adapter's digest.
    hashed: str = feature.mm_hash or feature.identifier
    return hashed


def hints_of(params: object) -> Hints | None:
    """The hints in a request's `kv_transfer_params`, which a client of vLLM may set to any value; None without hints::

        {"tokenlake": {"outlook": "goes_on", "category": "agent", "priority": 1, "ttl_s": 600}}

    Raises `ValueError` that names an unknown or invalid field.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise ValueError(f"kv_transfer_params must be an object, and is {reprlib.repr(params)}")
    fields = params.get(HINTS_KEY)
    if fields is None:
        return None
    try:
        said = msgspec.convert(fields, _RequestHints)
        return Hints(_OUTLOOKS[said.outlook], said.category, priority=said.priority, ttl_s=said.ttl_s, pin_s=said.pin_s)
    except ValueError as error:
        text = str(error)
        shown = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]}...{text[-MAX_SHOWN // 2 :]}"
        raise ValueError(f"field {HINTS_KEY!r} of kv_transfer_params: {shown}") from None
