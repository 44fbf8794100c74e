"""Access records and hints: how requests use their segments, and the reports that tell the owners of segments of reads
and hints at other nodes.

A match builds the access record of its request (`access_of_match`). A store that follows the match attaches the same
record to the segments that it writes (`RecentMatches`). A read touches the copies of this node at once, and reports the
reads of cached copies to the owners of the segments in batches (`Touches`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context, KnownAccess, Part
from tokenlake.core.engines.pins import Pins
from tokenlake.hints import NO_ACCESS, NO_HINTS, AccessRecord, Hints
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.keys import KEY_BYTES
from tokenlake.memory import Segment, State
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys, split_keys

MAX_RECENT_MATCHES = 32
"""Number of matches with missing segments that a session remembers: an upper bound on the requests that its engine
computes at a time."""
MAX_RECENT_BYTES = 64 << 10
"""Limit of the bytes of their keys: those of 32 prompts of 64 segments, or of 2 of the longest prompts of a match."""
MAX_REPORTED = 4096
"""Maximum number of keys whose reads are reported to one owner per gossip interval; further reads in the interval are
not reported."""
TOUCHED = 128
"""Maximum number of keys of one report: the owner takes up to 5 us for each, during which it serves no other
message."""
REPORTS = 64
"""Maximum number of messages with reports that one event sends. Each takes up to 10 us."""
_READY = State.READY


def access_of_match(
    context: Context,
    tenant: TenantId,
    keys: Sequence[SegmentKey],
    segments: Sequence[Segment | None],
    hits: int,
    reported: Sequence[KnownAccess],
) -> AccessRecord:
    """Returns the access record of a request whose match found `hits` of its `keys`.

    The record continues that of the last access of the deepest segment of the prompt whose last access is known.
    `segments`: the copies of this node, None where it has none. `reported`: the accesses that other nodes told. The
    history of this node is searched only for keys deeper than all of these.
    """
    index = len(segments) - 1
    while index >= 0 and segments[index] is None:
        index -= 1
    deepest = segments[index] if index >= 0 else None
    known: list[KnownAccess] = []
    if deepest is not None:
        age_s = context.since(deepest.touched)
        if index == len(segments) - 1:
            # The usual case: this node has the last segment of the prompt, so no other node knows a deeper one.
            return AccessRecord.after(deepest.hints.access, age_s, len(segments), hits, len(segments))
        known.append((index, deepest.hints.access, age_s))
    known = [*reported, *known]
    beyond = max((at for at, _, _ in known), default=-1) + 1
    remembered = context.store.last_access(tenant, keys[beyond:], context.now)
    if remembered is not None:
        known.append((beyond + remembered[0], *remembered[1:]))
    return access_after(known, len(segments), hits)


def access_after(known: Iterable[KnownAccess], segments: int, hits: int) -> AccessRecord:
    """Returns the access record of a request that found `hits` of its `segments`. Of the earlier accesses in `known`,
    the one of the deepest segment counts as the previous request; of equally deep ones the most recent."""
    index, access, age_s = max(known, default=(-1, NO_ACCESS, 0.0), key=lambda each: (each[0], -each[2]))
    return AccessRecord.after(access, age_s, segments, hits, max(hits, index + 1))


def with_access(hints: Hints | None, access: AccessRecord) -> Hints:
    """Returns the engine's `hints` with `access` in place of the access record that the engine sent."""
    return Hints(access=access) if hints is None else msgspec.structs.replace(hints, access=access)


class RecentMatches:
    """The last matches of one session that did not find their whole prompt. The engine stores the missing segments of
    these prompts, which get the access records of the matches."""

    def __init__(self) -> None:
        self._matches: deque[tuple[bytes, AccessRecord, bool]] = deque()
        self._nbytes = 0

    def add(self, keys: bytes, access: AccessRecord, *, independent: bool = False) -> None:
        """Remember a match, so that `access` finds it when the engine stores the segments that it missed. `keys`: the
        concatenated keys of the match. `independent`: they are independent keys, so the engine may store them in
        another order and from another index on."""
        self._matches.append((keys, access, independent))
        self._nbytes += len(keys)
        while len(self._matches) > MAX_RECENT_MATCHES or self._nbytes > MAX_RECENT_BYTES:
            oldest, _, _ = self._matches.popleft()
            self._nbytes -= len(oldest)

    def access(self, keys: Sequence[SegmentKey], first: int) -> tuple[AccessRecord, tuple[SegmentKey | None, ...]]:
        """Returns the access record of the request that stores `keys`, the first of which is segment `first` of its
        prompt, a new record if no remembered match fits; and for each key the one before it in the prompt, None where
        there is none or it is not known."""
        at = first * KEY_BYTES
        for known, access, independent in reversed(self._matches):
            if keys and (known[at : at + KEY_BYTES] == keys[0] or (independent and known.find(keys[0]) >= 0)):
                if independent:
                    return access, (None,) * len(keys)
                return access, (SegmentKey(known[at - KEY_BYTES : at]) if first else None, *keys[:-1])
        return AccessRecord(first + len(keys), first), (None, *keys[:-1])


class _Report(NamedTuple):
    """A report to the owner of segments: another node has read its copies of them, or has received hints about them.
    A `Touched` message carries one report and the keys of the segments to which it applies."""

    hints: Hints | None
    """Hints of the request that read the copies, or those that an engine gave later; None: the request had none."""
    used: bool
    """True if the segments were read; False if the report only carries hints."""
    relayed: bool
    """True if the receiver must not forward the report to another node."""


@dataclass(eq=False, slots=True)
class _Batch:
    """Reports that wait to be sent to one owner, and the keys of the segments of one tenant to which each applies."""

    count: int = 0
    keys: dict[_Report, list[SegmentKey]] = field(default_factory=dict)


class Touches(Part):
    """Records reads and hints in the local store, and reports them to the owners of the primary copies."""

    def __init__(
        self,
        context: Context,
        peers: Peers,
        recorded_owner: Callable[[TenantId, SegmentKey], NodeId | None],
        on_read: Callable[[list[Segment]], None],
        pins: Pins,
    ) -> None:
        """`recorded_owner`: returns the owner of a segment according to this node's directory. `on_read`: called with
        the READY segments of one prompt, in prompt order, after a read of them was counted."""
        self._recorded_owner = recorded_owner
        self._on_read = on_read
        self._pins = pins
        self._context = context
        self._peers = peers
        self._batches: dict[tuple[NodeId, TenantId], _Batch] = {}
        self._reporting = False
        """True while messages of the last `report` are left."""

    def read(self, segments: list[Segment], hints: Hints | None = None) -> None:
        """Count a read of segments of one prompt, in prompt order, that a local engine stopped reading or wrote again.
        `hints`: those of the engine's request."""
        segments = [segment for segment in segments if segment.state is _READY]
        if hints is not None and hints.pin_s:
            self._pins.pin(segments, hints.pin_s)
            hints = hints.without_pin()
        self._context.store.touch(segments, self._context.now, hints)
        self._report_copies(segments, _Report(hints, used=True, relayed=False))
        self._on_read(segments)

    def hint(self, tenant: TenantId, keys: list[SegmentKey], hints: Hints) -> None:
        """Apply hints that an engine gave after its match to segments of one prompt, in prompt order.

        Hints for segments that this node has neither in memory nor on disk go to their directory nodes, which relay
        them to the owners.
        """
        found = self._context.ready(tenant, keys)
        here = [segment for segment in found if segment is not None]
        if hints.pin_s:
            self._pins.pin(here, hints.pin_s)
            hints = hints.without_pin()
            if hints == NO_HINTS:
                return
        self._context.store.hint(here, hints, self._context.now)
        on_disk = self._context.on_disk(tenant, keys, found)
        for entry in on_disk.values():
            self._context.disk.hint(entry, hints)
        report = _Report(hints, used=False, relayed=False)
        self._report_copies(here, report)
        absent = [keys[at] for at, segment in enumerate(found) if segment is None and at not in on_disk]
        for node, its_keys in self._peers.by_directory_node(absent).items():
            if node != self._context.node:
                self._add(node, tenant, report, its_keys)
            else:
                self._relay(tenant, its_keys, report)

    def touched(self, node: NodeId, message: wire.Touched) -> None:
        """Handle a report of `node` that copies were read there, or that hints came; its keys come deepest first. The
        report counts for the segments that this node owns, and is forwarded once to the owners of the others. If this
        node neither has a segment nor knows an owner, it tells `node`, which may take this node for the owner."""
        tenant, keys = TenantId(message.tenant), split_keys(message.keys)
        found = self._context.ready(tenant, keys)
        owned = [segment for segment in reversed(found) if segment is not None and segment.owned]
        if message.used:
            self._context.store.touch(owned, self._context.now, message.hints)
            self._on_read(owned)
        elif message.hints is not None:
            self._context.store.hint(owned, message.hints, self._context.now)
        on_disk = self._context.on_disk(tenant, keys, found)
        # A report may name a segment twice.
        for entry in dict.fromkeys(on_disk.values()):
            if message.used:
                self._context.disk.touch(entry, message.hints, self._context.now)
            elif message.hints is not None:
                self._context.disk.hint(entry, message.hints)
        if not message.relayed:
            report = _Report(message.hints, message.used, relayed=True)
            self._report_copies([segment for segment in reversed(found) if segment is not None], report)
            absent = [keys[at] for at, segment in enumerate(found) if segment is None and at not in on_disk]
            unknown = self._relay(tenant, absent, report)
            if unknown:
                self._peers.tell(node, wire.Evicted(tenant, join_keys(unknown)))

    def _relay(self, tenant: TenantId, keys: list[SegmentKey], report: _Report) -> list[SegmentKey]:
        """Queue a report about segments that this node lacks, for the owners that its directory records. Returns the
        keys of which it records no owner."""
        unknown: list[SegmentKey] = []
        for key in keys:
            owner = self._recorded_owner(tenant, key)
            if owner is not None and owner != self._context.node:
                self._add(owner, tenant, report._replace(relayed=True), [key])
            else:
                unknown.append(key)
        return unknown

    def _report_copies(self, segments: list[Segment], report: _Report) -> None:
        """Queue a report for the owners of those segments of which this node has a cached copy of another node's
        segment."""
        by_source: dict[NodeId, list[SegmentKey]] = {}
        for segment in reversed(segments):
            if segment.source is not None:
                by_source.setdefault(segment.source, []).append(segment.key)
        for node, keys in by_source.items():
            self._add(node, segments[0].tenant, report, keys)

    def _add(self, node: NodeId, tenant: TenantId, report: _Report, keys: list[SegmentKey]) -> None:
        batch = self._batches.setdefault((node, tenant), _Batch())
        keys = keys[: MAX_REPORTED - batch.count]
        if keys:
            batch.count += len(keys)
            batch.keys.setdefault(report, []).extend(keys)

    def report(self) -> None:
        """Send the queued reports of reads and hints to the owners, some at a time; the deepest segments of each prompt
        come first. While messages of an earlier call are still to be sent, new reports stay queued."""
        if self._reporting:
            return
        batches, self._batches = self._batches, {}
        messages = [
            (node, tenant, report, keys[start : start + TOUCHED])
            for (node, tenant), batch in batches.items()
            for report, keys in batch.keys.items()
            for start in range(0, len(keys), TOUCHED)
        ]
        messages.reverse()

        def work() -> bool:
            for _ in range(min(REPORTS, len(messages))):
                node, tenant, report, keys = messages.pop()
                self._peers.tell(node, wire.Touched(tenant, join_keys(keys), *report))
            self._reporting = bool(messages)
            return self._reporting

        self._context.in_slices(work)

    def census(self) -> dict[str, int]:
        return {"reads to report": sum(batch.count for batch in self._batches.values())}
