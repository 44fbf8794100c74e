"""Replays prompts on a daemon's store and eviction policy, without messages, bytes or simulated time.

The study compares policies on millions of accesses, which whole nodes (`NodeCore`) would take hours for; it shares the
store with them. For each prompt, in order:

1. The longest prefix is found; its segments are pinned.
2. Each missing segment takes a slot, which evicts or refuses. New segments are published, deepest first.
3. The segments that were found are unpinned and touched, deepest first. Segments after the first missing one that were
   held are computed again, and touched as well.

The model leaves out segments being written and delays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from tokenlake.config.rules import RuleSettings
from tokenlake.core.engines.access import access_after, with_access
from tokenlake.errors import ConfigurationError
from tokenlake.hints import AccessRecord, Hints
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import EvictionPolicy, Kind, Segment, SegmentStore
from tokenlake.metrics import Counters
from tokenlake_bench.baselines import Accesses, Prompt

_TENANT = TenantId("study")
_SLOT_BYTES = 64


class StudiedStore:
    """A store of `capacity_tokens` for the segments of the prompts in `accesses`. Raises ConfigurationError where not
    one segment fits."""

    def __init__(self, accesses: Accesses, capacity_tokens: int, policy: Callable[[], EvictionPolicy]) -> None:
        slots = check_capacity(accesses, capacity_tokens)
        self.store = SegmentStore(1, slots * _SLOT_BYTES, RuleSettings().dirty_share, Counters(), policy)
        self._parents = _parents(accesses)
        self._keys = [_key(segment) for segment in range(len(self._parents))]

    def serve(self, prompt: Prompt) -> int:
        """Serve one prompt. Returns the number of segments of the longest prefix that was found."""
        now, chain, store = prompt.at_s, prompt.chain, self.store
        copies = [self._held(segment) for segment in chain]
        hits = next((depth for depth, copy in enumerate(copies) if copy is None), len(chain))
        given = Hints(output_tokens=prompt.output_tokens or -1)
        hints = with_access(given, self._access(chain, copies, hits, now))
        pinned = [copy for copy in copies[:hits] if copy is not None]
        store.pin(*pinned)
        created = [
            made for depth in range(hits, len(chain)) if (made := self._reserve(chain[depth], depth, hints, now))
        ]
        # Segments behind the hits are touched only if they are still held: the new segments may have displaced some.
        again = [copy for segment in chain[hits:] if (copy := self._held(segment)) and not copy.pins]
        store.touch(again, now, hints)
        for segment in reversed(created):
            store.publish(segment, b"", now)
        store.unpin(*created, *pinned)
        store.touch(pinned, now, hints)
        return hits

    def _held(self, segment: int) -> Segment | None:
        return self.store.get(_TENANT, self._keys[segment])

    def _access(self, chain: tuple[int, ...], copies: list[Segment | None], hits: int, now: float) -> AccessRecord:
        """The access record of this request, as a match gets it: derived from the record of the deepest segment of the
        prompt that is held, or that the policy remembers."""
        for index in range(len(chain) - 1, -1, -1):
            copy = copies[index]
            if copy is not None:
                return access_after([(index, copy.hints.access, now - copy.touched)], len(chain), hits)
            remembered = self.store.last_access(_TENANT, [self._keys[chain[index]]], now)
            if remembered is not None:
                return access_after([(index, *remembered[1:])], len(chain), hits)
        return access_after([], len(chain), hits)

    def _reserve(self, segment: int, depth: int, hints: Hints, now: float) -> Segment | None:
        """A slot for a segment that is not held; None where it is, or where the policy refuses it."""
        if self._held(segment) is not None:
            return None
        before = self._parents[segment]
        parent = self._keys[before] if before >= 0 else None
        made = self.store.reserve(_TENANT, _SLOT_BYTES, self._keys[segment], Kind.PRIMARY, depth, now, hints, parent)
        self.store.take_gone()
        self.store.take_slots()
        return made if isinstance(made, Segment) else None


def check_capacity(accesses: Accesses, capacity_tokens: int) -> int:
    """Number of segments that fit into `capacity_tokens`. Raises ConfigurationError if none fits."""
    slots = capacity_tokens // accesses.segment_tokens
    if slots < 1:
        raise ConfigurationError("capacity_tokens", capacity_tokens, f"at least {accesses.segment_tokens}, one segment")
    return slots


def _key(segment: int) -> SegmentKey:
    return SegmentKey(hashlib.blake2b(segment.to_bytes(8, "little"), digest_size=32).digest())


def _parents(accesses: Accesses) -> list[int]:
    """By segment id, the parent: the segment before it in every prompt that contains it; -1 for the first segment of a
    prompt."""
    parents: dict[int, int] = {}
    for prompt in accesses.prompts:
        # The walk from the end of the prompt stops at the first segment with a known parent, because all segments
        # before that one have been seen too.
        for depth in range(len(prompt.chain) - 1, -1, -1):
            if prompt.chain[depth] in parents:
                break
            parents[prompt.chain[depth]] = prompt.chain[depth - 1] if depth else -1
    return [parents[segment] for segment in range(len(parents))]
