"""A request as the scheduler's side knows it, from its arrival to its end. Imports no engine."""

from __future__ import annotations

import re
import reprlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from tokenlake.hints import Hints, Outlook
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix
from tokenlake_client.engines.vllm.adapters import RequestAdapter
from tokenlake_client.engines.vllm.disaggregated import NOT_SPLIT, Split, has_tail
from tokenlake_client.engines.vllm.lookup import Lookup
from tokenlake_client.engines.vllm.pool import SchedulerPool
from tokenlake_client.salts import joined_salt

HINTS_KEY = "tokenlake"
"""The key in vLLM's `kv_transfer_params` under which a request carries its hints."""
_STOP_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_REPETITION": "repetition",
    "FINISHED_ABORTED": "abort",
}
_OUTLOOKS = {outlook.name.lower(): outlook for outlook in Outlook}
_HINT_FIELDS = {"outlook": str, "category": str, "priority": int, "ttl_s": int | float}


_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""A hash of vLLM's: BLAKE3, SHA-256 or SHA-512 in hexadecimal digits."""


class MediaPlace(Protocol):
    """The place of an input's tokens in the prompt."""

    offset: int
    length: int


class MediaInput(Protocol):
    """The part of vLLM's `MultiModalFeatureSpec` that the connector uses: an image, a sound or a video of a request."""

    modality: str
    identifier: str
    mm_hash: str | None

    @property
    def mm_position(self) -> MediaPlace:
        """The place of the input's tokens in the prompt."""
        ...


class EngineRequest(Protocol):
    """The part of vLLM's `Request` that the connector uses."""

    request_id: str
    num_computed_tokens: int
    cache_salt: str | None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the request that are known: the prompt and the sampled tokens."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The known tokens."""
        ...


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


@dataclass(slots=True)
class RequestState:
    """The scheduler side's state of one request: its keys, its lookup, and its permissions to load and to store."""

    request: EngineRequest
    saved: SavedTokens
    hints: Hints | None = None
    """The hints that the request carried in vLLM's `kv_transfer_params`."""
    weights: str | None = None
    """The weights digest for the keys, after the weights were changed in place; None: the layout's digest."""
    adapter: RequestAdapter | None = None
    """The request's LoRA adapter."""
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
    placed: bool = False
    """True: vLLM has given the request blocks. If vLLM then asks for its matched tokens again, the request has lost its
    blocks and begins anew."""
    may_store: bool = True
    """False: the weights changed after the request got its blocks, so they may hold cache of two versions."""
    may_load: bool = True
    """False: a lookup was late or a load failed; the request does not use the pool again."""
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

    @property
    def identified(self) -> bool:
        """True if all values are known on which the keys depend."""
        return self.adapter is None or self.adapter.digest is not None

    def keys(self, pool: SchedulerPool, salt: str | None) -> Sequence[SegmentKey]:
        """The keys of all full segments of the request's known tokens. Only tokens that were not hashed before are
        hashed, or all tokens after a restart of the daemon, which may have another secret then. `salt`: the salt of the
        engine, which is part of the keys. Only for a request that is `identified`."""
        if self.prefix is None or self.incarnation != pool.incarnation:
            self.prefix = pool.prefix(
                adapter=self.adapter.digest if self.adapter is not None else None,
                salt=joined_salt(salt, self.request.cache_salt),
                extras=self.extras,
                weights_digest=self.weights,
            )
            self.incarnation = pool.incarnation
        known = self.prefix.tokens
        if known < self.request.num_tokens:
            self.prefix.extend(self.request.all_token_ids[known : self.request.num_tokens])
        return self.prefix.keys

    def contents(self, pool: SchedulerPool, segments: range, model: str) -> tuple[bytes, ...]:
        """The contents of `segments`, whose keys are known, for routers. `model`: the name under which vLLM serves it.
        Empty where the daemon does not publish them, and for a prompt that a router does not know by its tokens: one
        with a salt of its own or with media."""
        if not model or self.prefix is None or self.extras or self.request.cache_salt is not None:
            return ()
        adapter = self.adapter.name if self.adapter is not None else ""
        return pool.contents(self.prefix, self.request.all_token_ids, segments, model, adapter)

    def tail_key(self, pool: SchedulerPool, salt: str | None, segment: int) -> SegmentKey | None:
        """The key of the tail of the prompt; None where the prompt has no tail that the engine that decodes it needs.
        Arguments as of `keys`. `segment`: the number of tokens of a segment."""
        if not has_tail(self.prompt, segment):
            return None
        self.keys(pool, salt)
        full = self.prompt // segment
        assert self.prefix is not None
        return self.prefix.tail_key(full, self.request.all_token_ids[full * segment : self.prompt])

    def drop_lookup(self) -> None:
        """Give up the request's lookup: the segments that it found or will find are released."""
        if self.lookup is not None:
            self.lookup.drop()
            self.lookup = None


class SavedTokens:
    """The segments of one request that were handed out to be stored, and those that may be next.

    A segment may be stored once all its tokens are computed from a correct prefix. A step that waits for loads may turn
    out to have computed from blocks that were never filled, for every request that shares these blocks. While such a
    step is under way, only tokens are stored that an earlier step computed, whose outcome is known::

        0      saved     confirmed          end of this step
        |--------|-----------|---------------------|
                 | store now | store once the outcome of the steps is known
    """

    def __init__(self, segment_tokens: int) -> None:
        self._segment = segment_tokens
        self.segments = 0
        """The number of segments, from the first on, that were handed out to be stored or need not be stored."""
        self._confirmed = 0
        self._steps: deque[tuple[int, int]] = deque()
        """For each step of the engine whose outcome is not known: (the step's number, the number of the request's
        tokens that are computed at its end)."""

    def add_step(self, step: int, computed: int) -> None:
        """Record that `computed` tokens of the request are computed when the engine's step `step` ends."""
        self._steps.append((step, computed))

    def confirm(self, step: int) -> None:
        """Record that no load failed in the engine's steps up to `step`."""
        while self._steps and self._steps[0][0] <= step:
            self._confirmed = self._steps.popleft()[1]

    def void(self) -> None:
        """To be called when a load failed: the steps under way confirm no tokens, and all segments may be handed out
        again, because loaded ones may have to be stored again."""
        self._steps.clear()
        self.segments = 0

    def restart(self) -> None:
        """To be called when the request has lost its blocks and begins again."""
        self._steps.clear()
        self._confirmed = 0

    def computed(self, *, certain: bool) -> int:
        """The number of the request's tokens that are computed from a correct prefix when this step ends. `certain`: no
        step that waits for loads is under way."""
        return self._steps[-1][1] if certain and self._steps else self._confirmed

    def take(self, known: int, *, certain: bool) -> range:
        """The indices of the segments to store now, which count as handed out afterwards. `known`: the number of the
        request's tokens whose ids are known. `certain`: as of `computed`."""
        end = max(min(self.computed(certain=certain), known) // self._segment, self.segments)
        segments = range(self.segments, end)
        self.segments = end
        return segments


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


def media_digests(features: Sequence[MediaInput], segment: int) -> dict[int, list[bytes]] | None:
    """The extras of `Pool.prefix` for a prompt with these images, sounds or videos: by the index of a segment, a digest
    of each input that has tokens in it, and its place relative to the segment. None without inputs."""
    extras: dict[int, list[bytes]] = {}
    for feature in sorted(features, key=lambda one: one.mm_position.offset):
        start, tokens = feature.mm_position.offset, feature.mm_position.length
        for index in range(start // segment, -(-(start + tokens) // segment)):
            place = start - index * segment
            extras.setdefault(index, []).append(
                msgspec.msgpack.encode([feature.modality, _media_hash(feature), place, tokens])
            )
    return extras or None


def unnamed_media(features: Sequence[MediaInput]) -> str | None:
    """The reason why the pool cannot serve a request with these inputs; None if it can. vLLM hashes the content of an
    input, unless the client names it (`multi_modal_uuids`): such a name may stand for another content elsewhere."""
    if all(_HASH.fullmatch(_media_hash(feature)) for feature in features):
        return None
    return "requests whose images, sounds or videos have names of the client (multi_modal_uuids)"


def _media_hash(feature: MediaInput) -> str:
    # The identifier may have the name of a LoRA adapter before the hash; the keys have the adapter's digest.
    return feature.mm_hash or feature.identifier


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
    known = ", ".join(_HINT_FIELDS)
    if not isinstance(fields, Mapping):
        raise ValueError(f"field {HINTS_KEY!r} of kv_transfer_params must be an object with the fields {known}")
    for name, value in fields.items():
        if name not in _HINT_FIELDS:
            raise ValueError(
                f"field {HINTS_KEY!r} of kv_transfer_params has the unknown field {reprlib.repr(name)}; known: {known}"
            )
        if not isinstance(value, _HINT_FIELDS[name]) or isinstance(value, bool):
            raise ValueError(f"field {name!r} of {HINTS_KEY!r} in kv_transfer_params is {reprlib.repr(value)}")
    outlook = fields.get("outlook", "unknown")
    if outlook not in _OUTLOOKS:
        raise ValueError(
            f"field 'outlook' of {HINTS_KEY!r} in kv_transfer_params is {reprlib.repr(outlook)}; expected one of "
            f"{', '.join(_OUTLOOKS)}"
        )
    others = {name: value for name, value in fields.items() if name != "outlook"}
    return Hints(_OUTLOOKS[outlook], **others)
