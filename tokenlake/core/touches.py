"""Reads keep segments alive: here at once, at the owners of copies in batches."""

from __future__ import annotations

from collections.abc import Callable

from tokenlake.core.context import Context
from tokenlake.core.peers import Peers
from tokenlake.hints import Hints
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.store import Kind, Segment, State
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys

__all__ = ["Touches"]

MAX_TOUCHED = 4096
"""Keys in one report to one owner; more reads of copies in one gossip interval are not reported."""
_READY, _PRIMARY = State.READY, Kind.PRIMARY


Word = tuple[Hints | None, bool, bool]
"""(hints, was it a use, is it relayed?): what is told of a segment."""


class _Batch:
    """What there is to tell one owner."""

    def __init__(self) -> None:
        self.count = 0
        self.by_word: dict[Word, list[SegmentKey]] = {}


class Touches:
    """What was read here of copies whose primary copy is elsewhere, and words that came late, until it is reported."""

    def __init__(self, context: Context, peers: Peers, on_read: Callable[[list[Segment]], None]) -> None:
        """`on_read`: called with READY segments of one prompt, in its order, after they were touched."""
        self._on_read = on_read
        self._context = context
        self._peers = peers
        self._batches: dict[tuple[NodeId, TenantId], _Batch] = {}

    def read(self, segments: list[Segment], hints: Hints | None = None) -> None:
        """Segments of one prompt, in its order, were read until now, or were written again, here. `hints`: of the
        request that did."""
        segments = [segment for segment in segments if segment.state is _READY]
        self._context.store.touch(segments, self._context.now, hints)
        self._note(segments, (hints, True, False))
        self._on_read(segments)

    def hint(self, tenant: TenantId, keys: list[SegmentKey], hints: Hints) -> None:
        """A word that came late about segments of one prompt, in its order. What is not here is told to both
        candidates: the owner is one of them, unless a run was kept together."""
        found = self._context.ready(tenant, keys)
        here = [segment for segment in found if segment is not None]
        self._context.store.hint(here, hints, self._context.now)
        word = (hints, False, False)
        self._note(here, word)
        absent = [key for key, segment in zip(keys, found, strict=True) if segment is None]
        elsewhere: dict[NodeId, list[SegmentKey]] = {}
        for key, pair in zip(absent, self._context.ring.candidates(join_keys(absent)), strict=True):
            for node in dict.fromkeys(pair):
                if node != self._context.node:
                    elsewhere.setdefault(node, []).append(key)
        for node, told in elsewhere.items():
            self._tell(node, tenant, word, told)

    def _note(self, segments: list[Segment], word: Word) -> None:
        by_owner: dict[NodeId, list[SegmentKey]] = {}
        for segment in reversed(segments):
            if segment.kind is not _PRIMARY and segment.source is not None:
                by_owner.setdefault(segment.source, []).append(segment.key)
        for node, keys in by_owner.items():
            self._tell(node, segments[0].tenant, word, keys)

    def relay(self, copies: list[Segment], hints: Hints | None, *, used: bool) -> None:
        """Copies here, deepest first, were read by engines of other nodes, which know of no other."""
        self._note(copies[::-1], (hints, used, True))

    def _tell(self, node: NodeId, tenant: TenantId, word: Word, keys: list[SegmentKey]) -> None:
        batch = self._batches.setdefault((node, tenant), _Batch())
        keys = keys[: MAX_TOUCHED - batch.count]
        if keys:
            batch.count += len(keys)
            batch.by_word.setdefault(word, []).extend(keys)

    def report(self) -> None:
        """Send the batches, deepest segments of each prompt first."""
        batches, self._batches = self._batches, {}
        for (node, tenant), batch in batches.items():
            for (hints, used, relayed), keys in batch.by_word.items():
                self._peers.tell(node, wire.Touched(tenant, join_keys(keys), hints, used, relayed))

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"reads to report": sum(batch.count for batch in self._batches.values())}
