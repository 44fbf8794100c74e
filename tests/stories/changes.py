"""What changed at a simulated node with an event: its copies of segments, their pins, and its directory entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tokenlake.core import NodeCore
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, Segment, State

RED = TenantId("red")


class Seen(NamedTuple):
    """A segment as one node knew it after an event."""

    segment: Segment | None = None
    copy: str = ""
    pinned: bool = False
    disk: bool = False
    directory: str = ""


def look(core: NodeCore, key: SegmentKey) -> Seen:
    """The segment of tenant red as the node knows it now."""
    segment, on_disk = core.store.get(RED, key), core._context.disk.find(RED, key) >= 0
    entry = core._directory_node._directory.get(RED, key, core._context.now)
    directory = ""
    if entry is not None:
        directory = f"in-flight marker of {entry.node}" if entry.deadline else f"directory entry, owner {entry.node}"
    return Seen(segment, _copy(segment), segment is not None and segment.pins > 0, on_disk, directory)


def _copy(segment: Segment | None) -> str:
    if segment is None:
        return ""
    if segment.state is State.RESERVED:
        return "slot reserved for a write" if segment.kind is Kind.DIRTY else "slot reserved for a fetch"
    cached = f"cached copy, source {segment.source}" if segment.source else "cached copy, owned here"
    return "primary copy" if segment.kind is Kind.PRIMARY else cached


def changes(core: NodeCore, key: SegmentKey, before: Seen, now: Seen) -> Iterator[str]:
    """What changed between `before` and `now`: in memory, on disk, in the directory."""
    reserved = before.copy.startswith("slot")
    if now.copy != before.copy and now.copy:
        yield f"published as {now.copy}" if reserved else now.copy
    elif now.copy != before.copy:
        removal = core._context.removals.get(RED, key)
        yield "slot free" if reserved else f"gone ({'dropped' if removal is None else removal.rule})"
        if before.segment is not None and before.segment.pins:
            yield "its slot in quarantine while it is pinned"
    if now.copy and now.pinned != before.pinned:
        yield "pinned" if now.pinned else "unpinned"
    if now.disk != before.disk:
        yield "on disk" if now.disk else "on disk no more"
    if now.directory != before.directory:
        yield now.directory or "directory entry gone"
