"""Events of a node (requests of engines, messages of other nodes, ended transfers, time). A driver passes them to
`NodeCore.handle`, one at a time.

There is an event per request, never per token. Keys, slots and codes are packed into bytes as in the messages of
`tokenlake.wire`.
"""

from __future__ import annotations

import msgspec

from tokenlake.directory.ring_record import RingRecord
from tokenlake.hints import Hints
from tokenlake.location import NOWHERE, Location
from tokenlake.trace import NO_TRACE
from tokenlake.wire import engine, peer

MAX_FOUND = 256
"""Maximum number of segments in one `DiskFound`."""
MAX_KEPT = 64
"""Maximum number of segments in one `SegmentsKept`: each takes the rules 10 us."""


class _Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Joined(_Event, frozen=True, tag=1):
    """A process of an engine connected, and the daemon accepted its credential, layout and protocol version."""

    connection: int
    request: int
    tenant: str
    slot_bytes: int
    shards: int
    segment_tokens: int
    session: int
    """Number of the session to join; 0 opens a new one."""
    resume: int
    """Earlier connection of the process, whose leases and writes it keeps; 0 for none."""
    survivor: int = 0
    """Number of the process in `MemoryKept.survivors`, if it is one that has not returned yet; else 0. `session` is
    then the number of its session at the daemon before, which goes on under the number that `Welcomed` gives. The
    process is still a survivor until it has said in `Regrant` what it holds, and joins as one again over a further
    connection."""


class Requested(_Event, frozen=True, tag=2):
    """A process that has joined a session sent a request."""

    connection: int
    message: engine.EngineRequest


class ProcessGone(_Event, frozen=True, tag=3):
    """A process of an engine is dead, or said `Bye`: it does not read or write any slot any more."""

    connection: int


class PeerUp(_Event, frozen=True, tag=4):
    """A control connection to `node` was made."""

    node: str
    incarnation: int
    location: Location = NOWHERE


class PeerDown(_Event, frozen=True, tag=5):
    """The control connection to the incarnation `incarnation` of `node` broke."""

    node: str
    incarnation: int


class PeerSent(_Event, frozen=True, tag=6):
    """Another node sent a message on its control connection."""

    node: str
    message: peer.PeerMessage


class FetchDone(_Event, frozen=True, tag=7):
    """The thread that received segments for a `StartFetch`, or read them for a `DiskRead`, has returned: it does not
    write into their slots any more, except into those that are `held`.

    `codes`: per segment, LOCAL where all bytes arrived with the right checksums, otherwise the reason.
    `checksums`: 8 bytes per shard of each segment, zeros where its code is not LOCAL.
    """

    fetch: int
    codes: bytes
    checksums: bytes
    answered: bool | None = True
    """False if the other node was asked and sent no bytes, or stopped sending before the end: the bulk path to it may
    be dead. None if the transfer ended before that could be known."""
    held: bytes = b""
    """Per segment, 1 where a read that cannot be stopped may still write into the slot, else 0; empty: none. The event
    `FetchSettled` follows."""
    notes: bytes = b""
    """Of a `ColdRead`: the note that was written with each segment, `NOTE_BYTES` each, zeros where its code is not
    LOCAL. Empty after other transfers."""


class FetchSettled(_Event, frozen=True, tag=19):
    """No bytes come any more into the slots that a `FetchDone` reported as held."""

    fetch: int


class PullRequested(_Event, frozen=True, tag=8):
    """A request of peer `node` for segments has arrived on the bulk connection `stream`, where it is answered."""

    stream: int
    node: str
    tenant: str
    keys: bytes
    background: bool = False
    """True if no engine of the peer waits for the segments: the peer takes them over as primary copies."""
    trace: bytes = NO_TRACE
    """The span of the transfer at the peer; the rules do not read it."""


class SendDone(_Event, frozen=True, tag=9):
    """The thread that sent segments for a `SendBulk` returned, whether or not it succeeded."""

    stream: int


class RegionReady(_Event, frozen=True, tag=10):
    """The driver has carried out a `MakeRegion`: the memory of the region is there."""

    region: int


class ExplainRequested(_Event, frozen=True, tag=13):
    """A process whose credential belongs to `tenant` asks how a request used the pool; it need not have joined a
    session."""

    connection: int
    tenant: str
    message: engine.Explain


class SlotChecked(_Event, frozen=True, tag=14):
    """The thread that compared a slot with its checksums for a `CheckSlot` returned. `right`: the bytes match; True too
    where they could not be compared, so that the copy stays."""

    check: int
    right: bool


class RingChanged(_Event, frozen=True, tag=15):
    """The driver has read a ring record from the membership. A record that is not newer than that of the rules changes
    nothing."""

    record: RingRecord


class LocateRequested(_Event, frozen=True, tag=16):
    """A scheduler asks where segments of `tenant` are, without a lease; `Located` follows exactly once."""

    request: int
    """Number of the request, chosen by the driver."""
    tenant: str
    keys: bytes
    deadline_s: float = 0.0
    """Maximum seconds of the lookups at other nodes; 0, or a value above the deadline of a match of
    so many keys (`tokenlake.wire.match_deadline`), stands for that."""
    disks: bool = False
    """True if the answer should contain the time that reads from disks take, which needs a second round of lookups."""


class HintGiven(_Event, frozen=True, tag=17):
    """A scheduler or an operator gives hints about segments of `tenant`."""

    tenant: str
    keys: bytes
    hints: Hints


class EvictRequested(_Event, frozen=True, tag=18):
    """An operator orders the eviction of segments of `tenant` at this node; `EvictionDone` follows exactly once."""

    request: int
    """Number of the request, chosen by the driver."""
    tenant: str
    keys: bytes
    """The segments; empty for all of the tenant."""
    slot_bytes: int = 0
    """Without keys: only segments of this size; 0 for all sizes."""


class PrefetchRequested(_Event, frozen=True, tag=27):
    """A scheduler or an operator wants consecutive segments of a prompt of `tenant` in the memory of this node;
    `PrefetchDone` follows exactly once."""

    request: int
    """Number of the request, chosen by the driver."""
    tenant: str
    keys: bytes
    slot_bytes: int
    shards: int
    first: int = 0
    """Index of the first of the keys in its prompt."""
    source: str = ""
    """The node to ask first; empty: the directory says which."""
    pin_s: float = 0.0
    """Seconds for which the segments are pinned then; 0: they are not."""


class UnpinRequested(_Event, frozen=True, tag=28):
    """A scheduler or an operator ends pins of `tenant` at this node; `UnpinDone` follows exactly once."""

    request: int
    """Number of the request, chosen by the driver."""
    tenant: str
    keys: bytes
    """The segments; empty for all of the tenant."""


class DiskReady(_Event, frozen=True, tag=20):
    """A device of the disk tier was opened, or is used again after a failure: `DiskFound` follows for all segments in
    its tables, then `DiskRecovered`, and the rules write to the device from then on. The event also tells a new
    capacity of a device in use: then neither of them follows, and the rates do not count."""

    device: int
    """Index of the device in the setting `disk`."""
    capacity_bytes: int
    """Bytes for all slabs and their tables (`tokenlake.disk.places.slab_bytes`)."""
    read_bytes_per_s: float
    write_bytes_per_s: float


class DiskFound(_Event, frozen=True, tag=21):
    """Segments that an earlier process wrote to a device, at most `MAX_FOUND`. The rules answer with `DiskForget` for
    those that they do not take."""

    device: int
    tenant: str
    slot_bytes: int
    shards: int
    keys: bytes
    places: bytes
    notes: bytes


class DiskRecovered(_Event, frozen=True, tag=22):
    """All segments on a device were passed in."""

    device: int


class DiskGone(_Event, frozen=True, tag=23):
    """A device cannot be used any more, until the next `DiskReady`. Its reads and writes that are under way end with
    their events all the same, before or after this one."""

    device: int
    reason: str


class DiskWritten(_Event, frozen=True, tag=24):
    """A `DiskWrite` has ended. `codes`: per segment, COMMITTED where its bytes and its record are on the device, LOST
    otherwise."""

    write: int
    codes: bytes


class DiskErased(_Event, frozen=True, tag=26):
    """A `DiskErase` has ended. `codes`: per segment, COMMITTED where it is erased on the device, LOST otherwise."""

    erase: int
    codes: bytes


class ColdReady(_Event, frozen=True, tag=35):
    """The cold tier was opened, or is used again after a failure, or its measurements changed by a quarter or more."""

    latency_s: float
    """Seconds from the begin of a read to its first byte."""
    read_bytes_per_s: float
    """Of all reads that run at a time, together."""
    write_bytes_per_s: float


class ColdGone(_Event, frozen=True, tag=36):
    """The cold tier cannot be used, until the next `ColdReady`: `ColdLooked` finds nothing. Its reads and writes that
    are under way end with their events all the same, before or after this one."""

    reason: str


class ColdLooked(_Event, frozen=True, tag=37):
    """Answers `ColdLook`. `found`: per key, 1 where the index of the cold tier names the segment, with the slot size
    that was asked for, else 0. The index may be some seconds old: an object that is named may be gone."""

    look: int
    found: bytes


class ColdWritten(_Event, frozen=True, tag=38):
    """A `ColdWrite` has ended. `codes`: per segment, COMMITTED where its object was written; EXISTS where the index
    names it already, and nothing was written; LOST where it could not be written, or the tier has no room."""

    write: int
    codes: bytes


class SaveRequested(_Event, frozen=True, tag=25):
    """The daemon is about to end: the rules write the segments of highest retention value that are in memory only, for
    at most `limit_s`, without regard to the budget of writes. `Saved` follows exactly once, after the last
    `DiskWritten`."""

    limit_s: float


class RegionKept(_Event, frozen=True, tag=29):
    """The driver has the memory of a region of an earlier daemon of this node. All events of this type come directly
    behind `NodeCore.start`, before any other event. The rules answer with `CloseRegion` for a region that they do not
    take, at once or as soon as no process can read it any more."""

    region: int
    """The number of the region at the earlier daemon, which it keeps."""
    nbytes: int
    """Bytes of the slots, as in `CutRegion`, or of the region without a tenant, as in `MakeRegion`."""
    tenant: str
    """Empty for a region that belongs to no tenant."""
    slot_bytes: int
    """0 for a region that belongs to no tenant."""
    generations: bytes = b""
    """The generation of each slot, uint64, little-endian; new segments get greater ones."""


class SegmentsKept(_Event, frozen=True, tag=30):
    """Segments in regions that were kept, at most `MAX_KEPT`. Their bytes are right: the daemon before ended in order,
    or the driver has compared them with their checksums. The rules answer with a `Record` that clears those that they
    do not take. The driver itself clears each record that it does not pass in, before it says that it has passed in
    all: the slots get other segments then."""

    tenant: str
    slot_bytes: int
    slots: bytes
    """Packed as in messages; the generation is the one in the header of the region."""
    records: tuple[bytes, ...]
    """The record of each slot (`tokenlake.memory.ledger`), as the ledger has it."""


class MemoryKept(_Event, frozen=True, tag=31):
    """All regions that were kept are known; engines may join from here on. Comes once, before the first `Tick`, if the
    driver kept any memory.

    ::

        RegionKept ... SegmentsKept ... MemoryKept                                      the daemon before ended in order
        RegionKept ... MemoryKept(unchecked) ... SegmentsKept ... SegmentsKeptDone      it crashed: bytes are checked
    """

    incarnation: int
    """That of the daemon before."""
    next_region: int
    """A number that no region of this node has had, and none above it: clients keep regions mapped that have ended."""
    survivors: tuple[tuple[int, str], ...] = ()
    """(number, tenant) of each process that may still read or write slots of the daemon before: those that have not
    released the lock that the daemon gave them. The driver chooses the numbers. No slot in a kept region of the tenant
    gets another segment until each of them has returned (`Joined.survivor`, `Regrant`) or is gone."""
    unchecked: bool = False
    """True if events of the type `SegmentsKept` still follow, and `SegmentsKeptDone` behind them. Until then no slot in
    a kept region gets another segment."""


class SegmentsKeptDone(_Event, frozen=True, tag=32):
    """All segments that were kept were passed in: the other slots of the regions are free, as far as survivors allow.
    Follows `MemoryKept.unchecked`."""


class SurvivorGone(_Event, frozen=True, tag=33):
    """The lock of a survivor is free: the process is dead, or maps no memory of the daemon before any more. May come
    for a survivor that has returned."""

    survivor: int


class SealRequested(_Event, frozen=True, tag=34):
    """The daemon is about to end: the records of all segments get their newest notes. `Sealed` follows exactly once.
    Records are true at any time, also behind it."""


class Tick(_Event, frozen=True, tag=11):
    """The time that `NodeCore.next_wake` named has come: the rules fire the earliest timer. Where several are due, the
    driver passes in one Tick for each."""


Event = (
    Joined
    | Requested
    | ProcessGone
    | PeerUp
    | PeerDown
    | PeerSent
    | FetchDone
    | FetchSettled
    | PullRequested
    | SendDone
    | SlotChecked
    | RegionReady
    | RingChanged
    | ExplainRequested
    | LocateRequested
    | HintGiven
    | EvictRequested
    | PrefetchRequested
    | UnpinRequested
    | DiskReady
    | DiskFound
    | DiskRecovered
    | DiskGone
    | DiskWritten
    | DiskErased
    | ColdReady
    | ColdGone
    | ColdLooked
    | ColdWritten
    | SaveRequested
    | RegionKept
    | SegmentsKept
    | MemoryKept
    | SegmentsKeptDone
    | SurvivorGone
    | SealRequested
    | Tick
)
