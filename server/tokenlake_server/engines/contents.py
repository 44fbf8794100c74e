"""The interface of the source of segments' contents (`tokenlake.content`), for the parts of a daemon that use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenlake.identity import SegmentKey
from tokenlake.metrics import Level


class StreamState(NamedTuple):
    """The state of a stream of KV events, for operators."""

    tenant: str
    model: str
    block_tokens: int
    segments: int
    """Segments that routers were told of."""
    readers: int
    """Connections of routers."""
    problem: str
    """Why routers see no segment; empty where nothing is known to be wrong."""
    cure: str


class Contents:
    """The contents of a daemon without streams of KV events: none are requested from engines, and none are kept."""

    def models(self, tenant: str) -> tuple[str, ...]:
        """The models of a tenant whose engines shall send contents."""
        return ()

    def offer(self, tenant: str, keys: list[SegmentKey], contents: Sequence[bytes], limit: int) -> None:
        """Take the contents of segments that may become READY, in the order of `keys`. `limit`: most bytes of one
        content (`content_limit`); a longer one is dropped and counted, and its segment is not published. Short, and
        never blocks. May be called from any thread."""

    def contents(self, tenant: str, keys: Sequence[SegmentKey], limit: int) -> tuple[bytes, ...]:
        """The contents of READY segments, to be sent to another node with their bytes: of the first of `keys`, or of
        none; empty where one is not known. `limit`: most bytes in all. May be called from any thread."""
        return ()

    def unpublished(self, tenant: str, model: str) -> None:
        """An engine of the tenant serves its model under a name whose segments are not published. Short. Called on the
        control loop."""

    def streams(self) -> list[StreamState]:
        """The streams of KV events. Called on the control loop."""
        return []

    def gauges(self) -> list[Level]:
        """Gauges for the metrics page."""
        return []

    async def close(self) -> None:
        """Release everything."""
