"""Instructions to the driver. It carries them out in order and decides nothing."""

from __future__ import annotations

import msgspec

from tokenlake.wire import engine, peer


class _Instruction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Welcomed(_Instruction, frozen=True, tag=1):
    """Tell a joined process its session."""

    connection: int
    request: int
    session: int


class Answer(_Instruction, frozen=True, tag=2):
    """Send a reply to a process."""

    connection: int
    message: engine.EngineReply


class SendToPeer(_Instruction, frozen=True, tag=3):
    """Send a frame to a peer; dropped where there is no connection."""

    node: str
    message: peer.PeerMessage


class StartFetch(_Instruction, frozen=True, tag=4):
    """Pull segments from a peer into reserved slots, in a thread. `FetchDone` follows exactly once."""

    fetch: int
    node: str
    tenant: str
    keys: bytes
    slots: bytes
    slot_bytes: int
    shards: int
    request: str = ""
    """Name of the engine's request, for the logs; empty where it has none."""
    background: bool = False
    """No engine waits for the segments."""


class AbortFetch(_Instruction, frozen=True, tag=5):
    """The deadline passed: make the receiver return now. `FetchDone` still follows."""

    fetch: int


class SendBulk(_Instruction, frozen=True, tag=6):
    """Answer a `PullRequested`: send the header, then the bytes of the slots, in a thread. `SendDone` follows exactly
    once."""

    stream: int
    slot_bytes: int
    codes: bytes
    slots: bytes
    checksums: bytes


class Stamp(_Instruction, frozen=True, tag=7):
    """These slots were reissued: write their new generations into the shared page, before anything else."""

    slots: bytes


class ReplaceRegion(_Instruction, frozen=True, tag=8):
    """Close this region's memory and open a region of equal size under the number `fresh`; `RegionReady` follows. The
    number is new because clients keep their mapping of the old region."""

    region: int
    fresh: int


class Note(_Instruction, frozen=True, tag=9):
    """Write a line to the log."""

    text: str


class CheckSlot(_Instruction, frozen=True, tag=10):
    """Compare the bytes in a slot with `checksums`, 8 bytes per shard, in a thread. `SlotChecked` follows exactly once;
    the slot is pinned until then."""

    check: int
    slot: bytes
    slot_bytes: int
    checksums: bytes


Instruction = (
    Welcomed | Answer | SendToPeer | StartFetch | AbortFetch | SendBulk | Stamp | ReplaceRegion | Note | CheckSlot
)
