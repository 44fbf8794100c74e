"""The blocks that the readers of one stream know, and the events that update them.

A segment of this node is published when its content is known and the segment before it is published::

    prepare, or bytes from a node      the segment is READY         the segment before it is published
      | content: pending ----------------> present ------------------------> published: BlockStored
      |                                       | no: held until it is
                                              | gone ------------------------> BlockRemoved

A router finds the longest known beginning of a prompt. Therefore a segment that is held is of no use to a request, and
a published segment whose predecessor left is found again when that one returns.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from tokenlake.content import Content, block_hash, decode_content
from tokenlake.errors import ProtocolRefused
from tokenlake.identity import SegmentKey
from tokenlake_server.kv_events.encoding import AllBlocksCleared, BlockRemoved, BlockStored, Event

MAX_PENDING_BYTES = 16 << 20
"""Limit of the contents of segments that are not READY, because they are still to come or have left, of one stream; the
oldest are dropped beyond it."""
ENTRY_BYTES = 512
"""Bytes that are charged for each of them beside its content: its key and its places in tables. An engine may send any
number of short contents."""
ROOT_S = 10.0
"""Seconds without a new segment of a layout after which another layout of the same model takes its place."""
MAX_ADAPTERS = 4096


def charge_of(content: bytes) -> int:
    """The bytes that are charged for a content that is kept with its key."""
    return len(content) + ENTRY_BYTES


class _Segment(NamedTuple):
    content: bytes
    name: int
    """`block_hash` of the first block."""
    parent: int | None
    adapter: str
    root: bytes


class _Root:
    __slots__ = ("root", "stored_at")

    def __init__(self, root: bytes, stored_at: float) -> None:
        self.root = root
        self.stored_at = stored_at


class Blocks:
    """The state of one stream. Not thread-safe but for `content`."""

    def __init__(self, model: str, block_tokens: int, medium: str, pending_bytes: int = MAX_PENDING_BYTES) -> None:
        """`pending_bytes`: limit of the contents of segments that are not READY."""
        self._model = model
        self._block_tokens = block_tokens
        self._medium = medium
        self._pending: OrderedDict[SegmentKey, bytes] = OrderedDict()
        self._pending_bytes = 0
        self._pending_limit = pending_bytes
        self._present: dict[SegmentKey, _Segment] = {}
        """The READY segments whose content is known, in the order in which they were stored."""
        self._published: set[int] = set()
        """`name` of the published segments."""
        self._held: dict[int, dict[SegmentKey, None]] = {}
        """By `name` of a segment that is not published, the present segments behind it."""
        self._roots: OrderedDict[str, _Root] = OrderedDict()
        """By adapter, the root of the published segments: the readers know a prompt by its tokens, and so cannot tell
        the segments of two layouts apart."""
        self._events: list[Event] = []
        self.restate_due = False
        """The readers have to be told all blocks anew."""
        self.unknown = 0
        """Number of segments that became READY without a content."""
        self.uneven = 0
        """Tokens of a segment that is no whole number of blocks; 0: none came."""
        self.other_layout = 0
        """Number of segments that were not published because another layout of the model is."""

    @property
    def published(self) -> int:
        """The number of segments that the readers know."""
        return len(self._published)

    @property
    def kept_bytes(self) -> int:
        """The bytes that are charged for the contents of segments that are not READY."""
        return self._pending_bytes

    def content(self, key: SegmentKey) -> bytes:
        """The encoded content of a segment that is READY or may become so; empty if it is not known. May be called from
        any thread."""
        # A content moves from one to the other and back while another thread looks.
        for _ in range(2):
            if content := self._pending.get(key):
                return content
            if segment := self._present.get(key):
                return segment.content
        return b""

    # -- what happens at this node

    def offer(self, key: SegmentKey, content: bytes) -> None:
        """Keep the content of a segment that may become READY."""
        if key not in self._present and content:
            self._keep(key, content)

    def _keep(self, key: SegmentKey, content: bytes) -> None:
        # Replaced in one step, because another thread may look for the content.
        before = self._pending.get(key)
        self._pending[key] = content
        self._pending.move_to_end(key)
        self._pending_bytes += charge_of(content) - (0 if before is None else charge_of(before))
        while self._pending_bytes > self._pending_limit:
            self._forget(next(iter(self._pending)))

    def _forget(self, key: SegmentKey) -> None:
        content = self._pending.pop(key, None)
        if content is not None:
            self._pending_bytes -= charge_of(content)

    def stored(self, key: SegmentKey, now: float) -> None:
        """A segment became READY. `now`: seconds, of a clock that does not go back."""
        if key not in self._present:
            self._arrived(key, self._pending.get(key, b""), now)
        # Last, because another thread may look for the content.
        self._forget(key)

    def _arrived(self, key: SegmentKey, encoded: bytes, now: float) -> None:
        try:
            content = decode_content(encoded)
        except ProtocolRefused:
            self.unknown += 1
            return
        if content.model != self._model:
            return
        if len(content.tokens) // 4 % self._block_tokens:
            self.uneven = len(content.tokens) // 4
            self.unknown += 1
            return
        parent = block_hash(content.parent, 0) if content.parent else None
        segment = _Segment(encoded, block_hash(key, 0), parent, content.adapter, content.root)
        self._present[key] = segment
        if self._accept_root(segment, now):
            self._publish(key, segment, content)
        else:
            self.other_layout += 1

    def gone(self, key: SegmentKey) -> None:
        """A READY segment left. Its content is kept for its return: a request that offered it while the segment was
        READY may have evicted it, and may store it again."""
        segment = self._present.get(key)
        if segment is None:
            return
        self._keep(key, segment.content)
        del self._present[key]
        if segment.name in self._published:
            self._published.discard(segment.name)
            hashes = self._hashes(key, decode_content(segment.content))
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockRemoved):
                last.block_hashes += hashes
            else:
                self._events.append(BlockRemoved(hashes, self._medium))
        elif segment.parent is not None:
            waiting = self._held.get(segment.parent, {})
            waiting.pop(key, None)
            if not waiting:
                self._held.pop(segment.parent, None)

    def only(self, keys: set[SegmentKey], now: float) -> None:
        """Take `keys` for all READY segments of the tenant, after changes were missed."""
        for key in [key for key in self._present if key not in keys]:
            self.gone(key)
        for key in keys:
            if key in self._pending:
                self.stored(key, now)
        self._events.clear()
        self.restate_due = True

    # -- the events for the readers

    def take(self) -> list[Event]:
        """The events since the last call, which tell the readers what happened."""
        events, self._events = self._events, []
        return events

    def restate(self, part: int) -> Iterator[list[Event]]:
        """Events that tell the readers all blocks anew, about `part` segments at a time. Between two parts no other
        method is called."""
        self.restate_due = False
        self._published.clear()
        self._held.clear()
        self._events = [AllBlocksCleared()]
        for key, segment in list(self._present.items()):
            if segment.root == self._roots[segment.adapter].root:
                self._publish(key, segment, None)
            if len(self._events) >= part:
                yield self.take()
        if self._events:
            yield self.take()

    def _accept_root(self, segment: _Segment, now: float) -> bool:
        """True if segments with the root of this one are published. Takes this root as the current one of its adapter
        if there is none, or if no segment with the current one was stored for `ROOT_S`."""
        known = self._roots.get(segment.adapter)
        if known is None:
            self._roots[segment.adapter] = _Root(segment.root, now)
            if len(self._roots) > MAX_ADAPTERS:
                self._forget_an_adapter()
            return True
        if known.root != segment.root:
            if now - known.stored_at < ROOT_S:
                return False
            known.root = segment.root
            self.restate_due = True
        known.stored_at = now
        return True

    def _forget_an_adapter(self) -> None:
        used = {segment.adapter for segment in self._present.values()}
        for adapter in [adapter for adapter in self._roots if adapter not in used]:
            del self._roots[adapter]

    def _publish(self, key: SegmentKey, segment: _Segment, content: Content | None) -> None:
        """Publish a segment and those that were held for it, or hold it. `content`: its decoded content, if known."""
        ready = [(key, segment, content)]
        while ready:
            key, segment, content = ready.pop()
            if segment.parent is not None and segment.parent not in self._published:
                self._held.setdefault(segment.parent, {})[key] = None
                continue
            self._published.add(segment.name)
            self._events.append(self._stored_event(key, segment, content or decode_content(segment.content)))
            for each in reversed(self._held.pop(segment.name, {})):
                ready.append((each, self._present[each], None))

    def _stored_event(self, key: SegmentKey, segment: _Segment, content: Content) -> BlockStored:
        count = len(content.tokens) // 4
        tokens = list(struct.unpack(f"<{count}I", content.tokens))
        hashes = self._hashes(key, content)
        parent = None
        if content.parent:
            # All segments of a prompt have the same number of blocks.
            parent = block_hash(content.parent, len(hashes) - 1)
        return BlockStored(hashes, parent, tokens, self._block_tokens, None, self._medium, content.adapter or None)

    def _hashes(self, key: SegmentKey, content: Content) -> list[int]:
        blocks = len(content.tokens) // 4 // self._block_tokens
        return [block_hash(key, block) for block in range(blocks)]
