"""Messages between an engine's process and its daemon, over the local socket.

A request carries an `id` that its reply repeats; a message without one is not answered. Keys and slots travel
packed: `keys` is 32 bytes each, `codes` one byte each, `slots` 16 bytes each (`tokenlake.wire.slots`).
The tenant is the connection's, never a field here.
"""

from __future__ import annotations

import msgspec

from tokenlake.hints import Hints
from tokenlake.wire.fields import Index, RequestName, Seconds, SlotBytes
from tokenlake.wire.funnel import Funnel

__all__ = [
    "HERE",
    "Abort",
    "Hint",
    "Attach",
    "Bye",
    "Claim",
    "Commit",
    "Committed",
    "Corrupt",
    "EngineReply",
    "EngineRequest",
    "Explain",
    "Explained",
    "Failed",
    "Fetch",
    "Fetched",
    "Heartbeat",
    "HeartbeatReply",
    "Hello",
    "Holds",
    "Match",
    "Matched",
    "OpenQuery",
    "OpenRegion",
    "Placed",
    "Prepare",
    "Prepared",
    "QueryOpened",
    "Region",
    "Release",
    "Shipped",
    "Welcome",
    "Where",
    "reply_decoder",
    "request_decoder",
]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Hello(_Message, frozen=True, tag=1):
    """First frame of a connection."""

    id: int
    oldest_version: int
    newest_version: int
    layout: bytes
    """`Layout.encode()`."""
    probe: bytes
    """`keys.probe` under the public secret `PROBE_SECRET`: do both sides hash alike?"""
    token: str | None = None
    session: int = 0
    """0 opens a session; else joins this one."""
    resume: int = 0
    """What `Welcome.connection` was: the process holds still what it held over that one; 0 for none."""
    incarnation: int = 0
    """Of the daemon that named `session` and `resume`: another daemon takes neither. 0 when it is not known."""


class Welcome(_Message, frozen=True, tag=2):
    """Answers `Hello`."""

    id: int
    version: int
    node: str
    incarnation: int
    session: int
    connection: int
    """Over which the process holds what it is granted, for `Hello.resume`. The one that was to be resumed, or another:
    then what was granted over the former is gone."""
    tenant: str
    secret: bytes
    """The tenant's, for the root of the key chain."""
    probe: bytes
    """`keys.probe` under `secret`; the client compares."""
    heartbeat_s: Seconds
    max_frame: int


class Failed(_Message, frozen=True, tag=3):
    """Answers a request that broke a rule. `kind` is a class name of `tokenlake.errors`."""

    id: int
    kind: str
    reason: str


class Match(_Message, frozen=True, tag=4):
    """Which of these keys, from the first on, does the pool have? What is found is leased."""

    id: int
    keys: bytes
    deadline_s: Seconds
    checksums: bool = True
    """Does the caller want them?"""
    request: RequestName = ""
    hints: Hints | None = None
    """What is known of the request already; it goes with every read of the lease."""
    tokens: Index = 0
    """Of the prompt, for `Explain`; 0: as many as the keys stand for."""
    in_flight_wait_s: Seconds = 0.0
    """So long the answer may wait for somebody who is about to write the first segment that is missing; where nobody
    is, the others wait so long for the caller."""
    planned: bool = False
    """It is one of a batch that one scheduler plans: hot segments are spread over their copies exactly."""
    in_flight_wait_per_segment_s: Seconds = 0.0
    """Of `in_flight_wait_s`, so much for each segment that is missing; 0: all of it."""


class Matched(_Message, frozen=True, tag=5):
    """Answers `Match` and `Attach`. `lease` is 0 when nothing was found."""

    id: int
    lease: int
    hits: Index
    """Leased segments from the first on without a gap; the others are not leased."""
    codes: bytes
    slots: bytes
    """Of the first `hits` keys; zeros where the code is not LOCAL."""
    checksums: bytes
    """8 bytes per shard for each of the first `hits`, zeros where not LOCAL; empty when they are not wanted."""


class Attach(_Message, frozen=True, tag=6):
    """Hold a lease, or a write, that another process of the session made: answered with `Matched`, or `Prepared`.
    A process must attach before it reads or fills the slots."""

    id: int
    lease: int
    checksums: bool = True
    """Does the caller want them?"""


class Fetch(_Message, frozen=True, tag=7):
    """Bring the segments `start` to `stop` of a lease into this node's arena."""

    id: int
    lease: int
    start: Index
    stop: Index
    deadline_s: Seconds
    """0: the daemon predicts it."""
    checksums: bool = True
    """Does the caller want them?"""
    request: RequestName = ""


class Fetched(_Message, frozen=True, tag=8):
    """Answers `Fetch`: one code, slot and checksum per segment asked for."""

    id: int
    codes: bytes
    slots: bytes
    checksums: bytes


class Release(_Message, frozen=True, tag=9):
    """This process no longer looks at these segments: (lease, start, stop) each. Not answered."""

    ranges: tuple[tuple[int, Index, Index], ...]


class Prepare(_Message, frozen=True, tag=10):
    """Reserve slots for consecutive segments of one prompt, the first at index `first`."""

    id: int
    keys: bytes
    first: Index
    request: RequestName = ""
    hints: Hints | None = None
    """What is known of the request already."""


class Prepared(_Message, frozen=True, tag=11):
    """Answers `Prepare`: RESERVED with a slot, EXISTS, PENDING, or the reason of the refusal."""

    id: int
    write: int
    codes: bytes
    slots: bytes


class Commit(_Message, frozen=True, tag=12):
    """Shards of the segments at `indices` are filled, and this process touches them no more. READY when all shards
    of a segment are in."""

    id: int
    write: int
    indices: tuple[Index, ...]
    shards: Index
    """Bit mask of the shards that this process wrote."""
    checksums: bytes
    """xxh3-64, little-endian, per segment and set bit of `shards`, in that order."""


class Committed(_Message, frozen=True, tag=13):
    """Answers `Commit`: COMMITTED, RESERVED while shards are missing, or EXPIRED."""

    id: int
    codes: bytes


class Abort(_Message, frozen=True, tag=14):
    """Give back what is not committed of a write; its slots will not be written any more. Not answered."""

    write: int


class Heartbeat(_Message, frozen=True, tag=15):
    """Renews the session's leases and reservations."""

    id: int


class HeartbeatReply(_Message, frozen=True, tag=16):
    """`alive` is False when the session's deadline had passed: its reservations are gone, its leases are
    kept only until they are released."""

    id: int
    alive: bool


class OpenRegion(_Message, frozen=True, tag=17):
    """Ask for a region's descriptor; without `write` it can only be mapped for reading."""

    id: int
    region: Index
    write: bool = False


class Region(_Message, frozen=True, tag=18):
    """Answers `OpenRegion`; the descriptor travels beside the frame."""

    id: int
    region: Index
    region_bytes: int
    slot_bytes: SlotBytes


class Bye(_Message, frozen=True, tag=19):
    """This process holds nothing any more and has unmapped. Not answered."""


class Where(_Message, frozen=True, tag=20):
    """On which nodes do the segments of a lease lie?"""

    id: int
    lease: int


class Shipped(_Message, frozen=True, tag=25):
    """The first `stop` segments of a lease were attended to where they lie, on this node or others. Not answered."""

    lease: int
    stop: Index


class Placed(_Message, frozen=True, tag=21):
    """Answers `Where`: one byte per segment, an index into `nodes`, or `HERE` for this node's arena, up to the first
    segment that is lost; a lease that has ended has none."""

    id: int
    nodes: tuple[str, ...]
    owners: bytes


class OpenQuery(_Message, frozen=True, tag=22):
    """Ask for a connection to this node's query engine (`tokenlake.wire.query`)."""

    id: int


class QueryOpened(_Message, frozen=True, tag=23):
    """Answers `OpenQuery`; the descriptor travels beside the frame. `Failed` with `Unreachable` where none runs."""

    id: int


class Holds(_Message, frozen=True, tag=24):
    """First after a process went on over a new connection: of what it was granted it knows these, no others. An answer
    may have been lost with the former connection. Not answered."""

    leases: tuple[int, ...]
    writes: tuple[int, ...]


class Hint(_Message, frozen=True, tag=26):
    """A word that came late, about consecutive segments of one prompt and, unless `lease` is 0, those of a lease. It
    reaches whoever keeps them, and is no use of them. Not answered."""

    keys: bytes
    hints: Hints
    lease: int = 0


class Explain(_Message, frozen=True, tag=27):
    """Explain the request with this name or, where no name is equal, the only one whose name begins so. The empty name
    lists the newest requests. A process may send it before `Hello`; `token` then gives the tenant."""

    id: int
    request: RequestName
    token: str | None = None


class Explained(_Message, frozen=True, tag=28):
    """Answers `Explain`: the funnel of one request of the tenant, or None."""

    id: int
    funnel: Funnel | None
    names: tuple[str, ...] = ()
    """Without a funnel: names of the tenant's requests that begin with the given name, newest first, at most
    `MAX_EXPLAINED_NAMES`."""


class Claim(_Message, frozen=True, tag=29):
    """This process is about to compute these segments: whoever misses them and may wait does, for so long at most.
    0 seconds: it is not, or not any more. Not answered."""

    keys: bytes
    seconds: Seconds


class Corrupt(_Message, frozen=True, tag=30):
    """This process read a segment of a lease in this node's arena, and its checksum was wrong: the daemon checks the
    copy again and drops it if it is wrong. Not answered."""

    lease: int
    index: Index


EngineRequest = (
    Hello
    | Match
    | Attach
    | Fetch
    | Release
    | Prepare
    | Commit
    | Abort
    | Heartbeat
    | OpenRegion
    | Where
    | Shipped
    | OpenQuery
    | Holds
    | Hint
    | Claim
    | Corrupt
    | Explain
    | Bye
)
EngineReply = (
    Welcome
    | Failed
    | Matched
    | Fetched
    | Prepared
    | Committed
    | HeartbeatReply
    | Region
    | Placed
    | QueryOpened
    | Explained
)

HERE = 255
"""Owner of a segment in this node's arena."""

PROBE_SECRET = b"tokenlake probe"

request_decoder: msgspec.msgpack.Decoder[EngineRequest] = msgspec.msgpack.Decoder(EngineRequest)
reply_decoder: msgspec.msgpack.Decoder[EngineReply] = msgspec.msgpack.Decoder(EngineReply)
