"""What left, when, and by which rule: for those who ask why a request found nothing."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tokenlake.identity import SegmentKey, TenantId

__all__ = ["CORRUPT_RULE", "MAX_REMEMBERED", "RECLAIMED_RULE", "CACHED_RULE", "NOT_ADMITTED_RULE", "Gone", "History"]

CACHED_RULE = "least recently used of the cached copies"
RECLAIMED_RULE = "its memory went to another tenant or layout"
NOT_ADMITTED_RULE = "not worth storing"
CORRUPT_RULE = "its bytes were wrong"
"""Of what went by no policy of eviction."""

MAX_REMEMBERED = 1 << 15
"""Segments; the oldest is forgotten first."""


class Gone(NamedTuple):
    """How a segment left, or was not kept."""

    at: float
    rule: str
    node: str = ""
    """Where; empty: here."""
    unused_s: float = 0.0
    """Since it had been used last; 0 where it is not known."""


class History:
    """Of one node: its own segments, and what other nodes told it as their home."""

    def __init__(self) -> None:
        self._gone: OrderedDict[tuple[TenantId, SegmentKey], Gone] = OrderedDict()

    def add(self, tenant: TenantId, key: SegmentKey, gone: Gone) -> None:
        """The newest of a segment counts."""
        self._gone[tenant, key] = gone
        self._gone.move_to_end((tenant, key))
        if len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)

    def get(self, tenant: TenantId, key: SegmentKey) -> Gone | None:
        """How it left, if that is remembered."""
        return self._gone.get((tenant, key))

    def __len__(self) -> int:
        return len(self._gone)
