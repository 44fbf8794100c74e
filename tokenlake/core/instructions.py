"""Instructions of the rules to their driver (daemon, simulator or replay), which carries them out in order and decides
nothing itself."""

from __future__ import annotations

import msgspec

from tokenlake.trace import NO_TRACE
from tokenlake.wire import engine, peer


class _Instruction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Welcomed(_Instruction, frozen=True, tag=1):
    """Tell a process that joined the number of its session."""

    connection: int
    request: int
    session: int


class Answer(_Instruction, frozen=True, tag=2):
    """Send a reply to a process of an engine."""

    connection: int
    message: engine.EngineReply


class SendToPeer(_Instruction, frozen=True, tag=3):
    """Send a message to another node over the control connection; it is dropped if there is no connection."""

    node: str
    message: peer.PeerMessage


class StartFetch(_Instruction, frozen=True, tag=4):
    """Receive segments from another node into reserved slots, in a thread. The driver passes in `FetchDone` exactly
    once, whatever the outcome. Without keys (a probe) it only asks whether bytes come over the bulk path."""

    fetch: int
    node: str
    tenant: str
    keys: bytes
    slots: bytes
    slot_bytes: int
    shards: int
    answer_s: float
    """Seconds within which the first bytes must come, or the answer that there are none; otherwise the transfer ends
    without a segment. They count from the moment at which a thread begins to connect, so that a wait for a thread is
    not taken for a silent node."""
    request: str = ""
    """Name of the engine's request that needs the segments, for the logs; empty if it has no name."""
    background: bool = False
    """True if no engine waits for the segments (they are handed over to this node)."""
    trace: bytes = NO_TRACE
    """The span of the transfer, which the driver sets."""


class AbortFetch(_Instruction, frozen=True, tag=5):
    """End the transfer `fetch`, whose deadline has passed: the receiving thread returns at once, and `FetchDone`
    follows."""

    fetch: int


class SendBulk(_Instruction, frozen=True, tag=6):
    """Answer another node's `PullRequested`: send the codes and checksums, then the bytes of the slots, in a thread.
    The driver passes in `SendDone` exactly once."""

    stream: int
    slot_bytes: int
    codes: bytes
    slots: bytes
    checksums: bytes


class Stamp(_Instruction, frozen=True, tag=7):
    """Write the new generations of slots that got new segments into the shared memory, before any other instruction:
    clients detect by them that a slot has a new content."""

    slots: bytes


class Record(_Instruction, frozen=True, tag=27):
    """Write the records of slots into the ledger, from which the next daemon finds the segments. Comes before `Stamp`
    and before any instruction that lets others see the segments, so that the ledger is true whenever the process ends.
    Given only where `CoreConfig.keep` is true. For a region that has ended meanwhile it has no effect."""

    slots: bytes
    records: tuple[bytes, ...]
    """The record of each slot (`tokenlake.memory.ledger`); an empty one clears the place: all its bytes become 0."""


class Sealed(_Instruction, frozen=True, tag=28):
    """Answers `SealRequested`: all records have the newest notes."""


class MakeRegion(_Instruction, frozen=True, tag=8):
    """Allocate the memory of a region; the event `RegionReady` follows once all its pages are there. The number is new,
    because clients keep regions mapped that have ended."""

    region: int
    nbytes: int


class CutRegion(_Instruction, frozen=True, tag=20):
    """The region gets slots of `slot_bytes`: it keeps memory for its header and for `nbytes` of slots, and gives the
    rest back to the system."""

    region: int
    nbytes: int
    slot_bytes: int
    tenant: str
    """The tenant to which the region belongs from now on."""


class CloseRegion(_Instruction, frozen=True, tag=21):
    """Give the memory of the region back to the system: a `MakeRegion` that follows may need it."""

    region: int


class Note(_Instruction, frozen=True, tag=9):
    """Write a line to the log."""

    text: str
    kind: str = ""
    """The kind of a line that requests cause: the driver limits the number of such lines by kind. Empty for a line
    about a change of state, which is always written."""


class CheckSlot(_Instruction, frozen=True, tag=10):
    """Compare the bytes in a slot with `checksums`, 8 bytes per shard, in a thread. `SlotChecked` follows exactly once;
    the slot is pinned until then."""

    check: int
    slot: bytes
    slot_bytes: int
    checksums: bytes


class ReadRing(_Instruction, frozen=True, tag=11):
    """Read the membership: another node has a newer ring than `NodeCore`."""


class Drained(_Instruction, frozen=True, tag=12):
    """This node, which drains, has handed over its primary copies, or all other nodes drain too, or `drain_s` has
    passed: this node may leave the record. Given once."""

    moved: tuple[tuple[str, int, int], ...] = ()
    """(node, segments, bytes) of the nodes that took segments over, the one with most segments first."""
    lost_segments: int = 0
    """Segments that this node still owns, in memory or on disk."""
    lost_bytes: int = 0


class Located(_Instruction, frozen=True, tag=13):
    """Answers `LocateRequested`."""

    request: int
    nodes: tuple[str, ...]
    """The nodes that have some of the segments."""
    owners: tuple[tuple[int, ...], ...]
    """For each key: the indices in `nodes` of the nodes that have the segment; empty if no node is known to have it."""
    disk_s: tuple[float, ...] = ()
    """For each key, if the request asked for it: the seconds that the reads from disk at the only node with the segment
    take, divided by the number of segments of the request that this node has on disk. 0 for a segment in memory; empty
    if no segment is on a disk."""


class EvictionDone(_Instruction, frozen=True, tag=14):
    """Answers `EvictRequested`."""

    request: int
    evicted: int
    kept: int
    """Segments that stay, because an engine is writing them."""
    reached: tuple[int, ...] = ()
    """Devices from which the segments were erased, if they were there."""


class PrefetchDone(_Instruction, frozen=True, tag=25):
    """Answers `PrefetchRequested`."""

    request: int
    codes: bytes
    """Per key: LOCAL, MISSING, LOST, PENDING, or a refusal."""


class UnpinDone(_Instruction, frozen=True, tag=26):
    """Answers `UnpinRequested`."""

    request: int
    unpinned: int


class DiskWrite(_Instruction, frozen=True, tag=15):
    """Write segments to a device: the bytes, then a sync of the batch, then the records of the places. Until the driver
    has passed in `DiskWritten`, exactly once, the memory slots stay pinned and the places get no other segment."""

    write: int
    device: int
    """Index of the device in the setting `disk`."""
    tenant: str
    slot_bytes: int
    shards: int
    keys: bytes
    slots: bytes
    """The slots in memory, packed as in messages."""
    places: bytes
    """The places in the slab of this tenant and slot size (`tokenlake.disk.places`). A place may be beyond the present
    end of the slab. Its generation is greater than any that the place had before."""
    checksums: bytes
    """8 bytes per shard of each segment."""
    notes: bytes
    """`NOTE_BYTES` per segment, kept with its record and given back by `DiskFound`."""


class DiskRead(_Instruction, frozen=True, tag=16):
    """Read segments from a device into reserved slots, in a thread, and compare each with the key, the generation and
    the checksums that were written with it. The driver passes in `FetchDone` exactly once: LOCAL for each sound
    segment, BAD_CHECKSUM for a place with other bytes, LOST for one that could not be read. `AbortFetch` may end it
    early."""

    fetch: int
    device: int
    tenant: str
    slot_bytes: int
    shards: int
    keys: bytes
    slots: bytes
    places: bytes
    request: str = ""
    """Name of the engine's request that needs the segments, for the logs; empty if it has no name."""


class DiskForget(_Instruction, frozen=True, tag=17):
    """The segments at these places are void. That is recorded before another segment's bytes are written there; no
    event follows."""

    device: int
    tenant: str
    slot_bytes: int
    keys: bytes
    places: bytes


class DiskTrim(_Instruction, frozen=True, tag=18):
    """A slab keeps its first `places` places, and none for 0; the device gets the space of the others back. The
    segments there were void before (`DiskForget`), and no read or write of them is under way."""

    device: int
    tenant: str
    slot_bytes: int
    places: int


class DiskErase(_Instruction, frozen=True, tag=22):
    """The segments at these places must never be found again, also after a failure of power: erase their headers, then
    their records. The driver passes in `DiskErased` exactly once; before that, the places get no other segment."""

    erase: int
    device: int
    tenant: str
    slot_bytes: int
    keys: bytes
    places: bytes


class ColdLook(_Instruction, frozen=True, tag=29):
    """Ask the index of the cold tier for segments. The driver answers from memory, with `ColdLooked`, exactly once."""

    look: int
    """Number of the question, chosen by the rules."""
    tenant: str
    slot_bytes: int
    shards: int
    keys: bytes
    """At most `tokenlake.wire.engine.MAX_KEYS` keys."""


class ColdRead(_Instruction, frozen=True, tag=30):
    """Read segments from the cold tier into reserved slots, in threads, and verify each: its object was sealed with a
    key of the tenant for this key, slot size and number of shards, and has the checksums that were written with it. The
    driver passes in `FetchDone` exactly once: LOCAL for each sound segment, BAD_CHECKSUM for an object that is not what
    it should be, LOST for one that is not there or could not be read. `AbortFetch` ends it at once. The index does not
    name an object any more that was not read whole, unless the read was aborted."""

    fetch: int
    tenant: str
    slot_bytes: int
    shards: int
    keys: bytes
    slots: bytes
    request: str = ""
    """Name of the engine's request that needs the segments, for the logs; empty if it has no name."""


class ColdWrite(_Instruction, frozen=True, tag=31):
    """Write segments to the cold tier, in threads. Until the driver has passed in `ColdWritten`, exactly once, the
    slots stay pinned."""

    write: int
    tenant: str
    slot_bytes: int
    shards: int
    keys: bytes
    slots: bytes
    checksums: bytes
    """8 bytes per shard of each segment."""
    notes: bytes
    """`NOTE_BYTES` per segment, kept in its object and given back by `FetchDone`."""


class ColdErase(_Instruction, frozen=True, tag=32):
    """Remove the objects of segments from the cold tier, for every cluster, because an operator evicts them. Objects
    that cannot be removed now are tried again; no event follows."""

    tenant: str
    keys: bytes
    """The segments; empty: all of the tenant that this tier's index names."""
    slot_bytes: int = 0
    """Without keys: only segments of this size; 0 for all sizes."""


class Saved(_Instruction, frozen=True, tag=19):
    """Answers `SaveRequested`, once, when no write to a device is under way any more."""

    segments: int
    """Segments that were written since the request."""


Instruction = (
    Welcomed
    | Answer
    | SendToPeer
    | StartFetch
    | AbortFetch
    | SendBulk
    | Stamp
    | Record
    | Sealed
    | MakeRegion
    | CutRegion
    | CloseRegion
    | Note
    | CheckSlot
    | ReadRing
    | Drained
    | Located
    | EvictionDone
    | PrefetchDone
    | UnpinDone
    | DiskWrite
    | DiskRead
    | DiskForget
    | DiskTrim
    | DiskErase
    | ColdLook
    | ColdRead
    | ColdWrite
    | ColdErase
    | Saved
)
