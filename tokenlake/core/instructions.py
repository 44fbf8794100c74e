"""What the driver must do. It carries them out in order and decides nothing."""

from __future__ import annotations

import msgspec

from tokenlake.wire import engine, peer

__all__ = [
    "AbortFetch",
    "Answer",
    "CheckSlot",
    "Instruction",
    "Note",
    "ReplaceRegion",
    "SendToPeer",
    "SendBulk",
    "Stamp",
    "StartFetch",
    "Welcomed",
]


class _Instruction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Welcomed(_Instruction, frozen=True, tag=1):
    """Tell a joined process which session it is in."""

    connection: int
    request: int
    session: int


class Answer(_Instruction, frozen=True, tag=2):
    """Send a reply to a process."""

    connection: int
    message: engine.EngineReply


class SendToPeer(_Instruction, frozen=True, tag=3):
    """Send a frame to a peer; dropped when there is no connection."""

    node: str
    message: peer.PeerMessage


class StartFetch(_Instruction, frozen=True, tag=4):
    """Pull segments from a peer into reserved slots, in a thread; then `FetchDone`, always, exactly once."""

    fetch: int
    node: str
    tenant: str
    keys: bytes
    slots: bytes
    slot_bytes: int
    shards: int
    request: str = ""
    """What the logs call the engine's request by; empty: it has no name."""
    background: bool = False
    """To be kept here: no engine waits for it."""


class AbortFetch(_Instruction, frozen=True, tag=5):
    """The deadline passed: make the receiver return now. `FetchDone` still follows."""

    fetch: int


class SendBulk(_Instruction, frozen=True, tag=6):
    """Answer a `PullRequested`: the header, then the slots' bytes, in a thread; then `SendDone`, always."""

    stream: int
    slot_bytes: int
    codes: bytes
    slots: bytes
    checksums: bytes


class Stamp(_Instruction, frozen=True, tag=7):
    """These slots have a new owner: write their generations into the shared page, before anything else."""

    slots: bytes


class ReplaceRegion(_Instruction, frozen=True, tag=8):
    """Close this region's memory and open as much under the number `fresh`; then `RegionReady`. A new number,
    because clients keep their mapping of the old one."""

    region: int
    fresh: int


class Note(_Instruction, frozen=True, tag=9):
    """Worth a line in the log."""

    text: str


class CheckSlot(_Instruction, frozen=True, tag=10):
    """Compare the bytes in a slot with `checksums`, 8 bytes per shard, in a thread; then `SlotChecked`, always, exactly
    once. The slot is pinned until then."""

    check: int
    slot: bytes
    slot_bytes: int
    checksums: bytes


Instruction = (
    Welcomed | Answer | SendToPeer | StartFetch | AbortFetch | SendBulk | Stamp | ReplaceRegion | Note | CheckSlot
)
