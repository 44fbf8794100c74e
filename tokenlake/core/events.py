"""Events: what happened to a node. A driver passes them to `NodeCore.handle`, one at a time.

Events are per request, never per token. Packed fields are as in `tokenlake.wire`.
"""

from __future__ import annotations

import msgspec

from tokenlake.wire import engine, peer


class _Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Joined(_Event, frozen=True, tag=1):
    """A process connected, and the daemon accepted its credential, layout and version."""

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
    """A joined process sent a frame."""

    connection: int
    message: engine.EngineRequest


class ProcessGone(_Event, frozen=True, tag=3):
    """The process is dead, or said `Bye`: it does not touch a slot any more."""

    connection: int


class PeerUp(_Event, frozen=True, tag=4):
    """A control connection to `node` was made."""

    node: str
    incarnation: int


class PeerDown(_Event, frozen=True, tag=5):
    """The control connection broke."""

    node: str
    incarnation: int


class PeerSent(_Event, frozen=True, tag=6):
    """A peer sent a frame on its control connection."""

    node: str
    message: peer.PeerMessage


class FetchDone(_Event, frozen=True, tag=7):
    """The receiver of a `StartFetch` returned: no thread writes into its slots any more.

    `codes`: LOCAL where all bytes arrived with the right checksums, otherwise the reason.
    `checksums`: 8 bytes per shard for each key, zeros where not LOCAL.
    """

    fetch: int
    codes: bytes
    checksums: bytes


class PullRequested(_Event, frozen=True, tag=8):
    """A request of peer `node` for segments has arrived on the bulk connection `stream`, where it is answered."""

    stream: int
    node: str
    tenant: str
    keys: bytes
    background: bool = False
    """No engine waits for them: the peer will keep them as primary copies or replicas."""


class SendDone(_Event, frozen=True, tag=9):
    """The sender of a `SendBulk` returned, whether it succeeded or not."""

    stream: int


class RegionReady(_Event, frozen=True, tag=10):
    """The new region of a `ReplaceRegion` exists."""

    region: int


class StatisticsLoaded(_Event, frozen=True, tag=12):
    """Result of `NodeCore.learned` in an earlier process; the first event, if there is one."""

    data: bytes


class ExplainRequested(_Event, frozen=True, tag=13):
    """A process that proved to be of `tenant`, joined or not, asks what became of a request."""

    connection: int
    tenant: str
    message: engine.Explain


class SlotChecked(_Event, frozen=True, tag=14):
    """The thread of a `CheckSlot` returned. `right`: the bytes match the checksums; False also where they could not be
    read."""

    check: int
    right: bool


class Tick(_Event, frozen=True, tag=11):
    """A timer is due."""


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
