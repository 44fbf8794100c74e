"""One transfer of segments into slots of this node, and what callers of transfers need to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenlake.disk.slab import Slab
from tokenlake.identity import NodeId, TenantId
from tokenlake.memory import Kind, Segment
from tokenlake.metrics import Metric
from tokenlake.timers import Timer
from tokenlake.wire import Code

ABORTED = Metric("tokenlake_aborted_fetches_total", "Transfers that missed their deadline")

MAX_DEADLINE_S = 60.0
"""Maximum deadline in seconds that a client may set for a fetch."""
OnArrival = Callable[[Segment | None, Code], None]
"""Called once per wanted segment: with the segment, pinned for the caller, and LOCAL; or with None and the reason."""


def deadline_s(predicted_s: float) -> float:
    """Returns the seconds after which a transfer is given up: three times the predicted time plus 50 ms."""
    return predicted_s * 3 + 0.050


@dataclass(eq=False)
class Transfer:
    """One transfer of segments from another node, or from a device of this node, into reserved slots of this node. The
    slots stay pinned until the receiving thread has returned."""

    node: NodeId
    tenant: TenantId
    kind: Kind
    slot_bytes: int
    shards: int
    wait_s: float
    """Seconds after which the transfer is aborted, or dropped from the queue of background transfers."""
    request: str
    """Name of the engine's request, for the log; empty for none."""
    segments: list[Segment] = field(default_factory=list)
    timer: Timer | None = None
    asked_at: float = 0.0
    """Time in seconds at which the transfer was asked for."""
    started_at: float = 0.0
    answer_s: float = 0.0
    """Seconds that the node has for its first bytes; see `StartFetch`."""
    disk_s: float = 0.0
    """Seconds that the node needs to read the segments from its disk."""
    device: int | None = None
    """The device of this node from which the segments are read, `COLD` for the cold tier; None: they come from another
    node."""
    places: list[tuple[Slab, int]] = field(default_factory=list)
    """The places of the segments on the device."""
    aborted: bool = False
    for_peer: bool = False
    """Another node waits for the segments, and no engine of this one."""

    @property
    def background(self) -> bool:
        """True if no engine waits for the segments."""
        return self.kind is not Kind.CACHED

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * len(self.segments)
