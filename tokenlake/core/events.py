"""What happens to a node. A driver makes these and hands them to `NodeCore.handle`, one at a time.

Events are per request, never per token. Packed fields are as in `tokenlake.wire`.
"""

from __future__ import annotations

import msgspec

from tokenlake.wire import engine, peer

__all__ = [
    "ExplainRequested",
    "Event",
    "FetchDone",
    "Joined",
    "PeerDown",
    "PeerSent",
    "PeerUp",
    "ProcessGone",
    "PullRequested",
    "RegionReady",
    "Requested",
    "SendDone",
    "SlotChecked",
    "Tick",
]


class _Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Joined(_Event, frozen=True, tag=1):
    """A process connected and its credential, layout and version were accepted."""

    connection: int
    request: int
    tenant: str
    slot_bytes: int
    shards: int
    segment_tokens: int
    session: int
    """0 opens a session."""
    resume: int
    """The process's earlier connection, or 0."""


class Requested(_Event, frozen=True, tag=2):
    """A frame of a joined process."""

    connection: int
    message: engine.EngineRequest


class ProcessGone(_Event, frozen=True, tag=3):
    """The process is dead, or said `Bye`: it can touch no slot any more."""

    connection: int


class PeerUp(_Event, frozen=True, tag=4):
    """A control connection to `node` stands."""

    node: str
    incarnation: int


class PeerDown(_Event, frozen=True, tag=5):
    """It broke."""

    node: str
    incarnation: int


class PeerSent(_Event, frozen=True, tag=6):
    """A frame of a peer's control connection."""

    node: str
    message: peer.PeerMessage


class FetchDone(_Event, frozen=True, tag=7):
    """The receiver of a `StartFetch` has returned: from here on nobody writes into its slots.

    `codes`: LOCAL where the bytes arrived whole and their checksums were right, else the reason.
    `checksums`: 8 bytes per shard for each key, zeros where not LOCAL.
    """

    fetch: int
    codes: bytes
    checksums: bytes


class PullRequested(_Event, frozen=True, tag=8):
    """A peer asks for segments on the bulk connection `stream`."""

    stream: int
    node: str
    tenant: str
    keys: bytes
    background: bool = False
    """To keep them there: no engine reads them now."""


class SendDone(_Event, frozen=True, tag=9):
    """The sender of a `SendBulk` has returned, whatever became of it."""

    stream: int


class RegionReady(_Event, frozen=True, tag=10):
    """The fresh region that `ReplaceRegion` asked for is there."""

    region: int


class StatisticsLoaded(_Event, frozen=True, tag=12):
    """What `NodeCore.learned` gave in an earlier life; the first event, if there is such a thing."""

    data: bytes


class ExplainRequested(_Event, frozen=True, tag=13):
    """A process, joined or not, that proved to be of `tenant` asks about a request."""

    connection: int
    tenant: str
    message: engine.Explain


class SlotChecked(_Event, frozen=True, tag=14):
    """The thread of a `CheckSlot` has returned. `right`: the bytes match the checksums; False as well where they could
    not be read."""

    check: int
    right: bool


class Tick(_Event, frozen=True, tag=11):
    """Time passed; a timer is due."""


Event = (
    Joined
    | Requested
    | ProcessGone
    | PeerUp
    | PeerDown
    | PeerSent
    | FetchDone
    | PullRequested
    | SendDone
    | SlotChecked
    | RegionReady
    | StatisticsLoaded
    | ExplainRequested
    | Tick
)
