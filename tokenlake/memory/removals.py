"""A log of the segments that left this node, or became no primary copy: when, where and by which rule. `tokenlake
explain` reads it to say why a request missed."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tokenlake.identity import SegmentKey, TenantId

POLICY_RULE = "least retention value"
CACHED_RULE = "least retention value of the cached copies"
RECLAIMED_RULE = "its memory went to another tenant or layout"
NOT_ADMITTED_RULE = "not admitted: the next victim had a higher retention value"
DISK_RULE = "the disk needed its place"
REDUNDANT_RULE = "another node owns it"
DISK_DAMAGED_RULE = "its bytes on disk were wrong or could not be read"
DISK_GONE_RULE = "its disk was set aside"
COLD_DAMAGED_RULE = "its bytes in the cold tier were wrong"
CORRUPT_RULE = "its bytes were wrong"
OPERATOR_RULE = "an operator evicted it"
SALT_RULE = "the quota of its salt was used"

VOID_RULES = (CORRUPT_RULE, OPERATOR_RULE)
"""The rules after which no copy of the segment on this node may be read any more, on disk either."""
MAX_REMOVALS = 1 << 15
"""Maximum number of segments in the log; the oldest entry is dropped first."""


class Removal(NamedTuple):
    """How a segment left a node, or why it became no primary copy."""

    at: float
    rule: str
    node: str = ""
    """Name of the node that the segment left; empty for this node."""
    unused_s: float = 0.0
    """Seconds from the segment's last access until it left; 0 if they are not known."""


class RemovalLog:
    """A log of segments that left this node, and of segments that left other nodes and that these reported to this node
    as the directory node."""

    def __init__(self) -> None:
        self._removals: OrderedDict[tuple[TenantId, SegmentKey], tuple[float, str, str, float]] = OrderedDict()
        """The fields of each `Removal`, which is made when it is read: each eviction adds one."""

    def add(
        self, tenant: TenantId, key: SegmentKey, at: float, rule: str, node: str = "", unused_s: float = 0.0
    ) -> None:
        """Add an entry with the fields of a `Removal`; it replaces an earlier entry of the same segment."""
        name = tenant, key
        self._removals[name] = at, rule, node, unused_s
        self._removals.move_to_end(name)
        if len(self._removals) > MAX_REMOVALS:
            self._removals.popitem(last=False)

    def get(self, tenant: TenantId, key: SegmentKey) -> Removal | None:
        """Returns the newest entry of a segment, or None if the log has none."""
        known = self._removals.get((tenant, key))
        return None if known is None else Removal._make(known)

    def __len__(self) -> int:
        return len(self._removals)
