"""Messages between an engine's process and its daemon, over the local socket.

A request carries an `id` that its reply repeats; a message without an id is not answered. Keys and slots are packed:
`keys` has 32 bytes each, `codes` one byte each, `slots` 16 bytes each (`tokenlake.wire.slots`). The daemon knows the
tenant of each connection; no message names one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from tokenlake.hints import Hints
from tokenlake.where import HOST, Where
from tokenlake.wire.fields import Index, Name, RequestName, Seconds, ShardMask, SlotBytes, TraceContext
from tokenlake.wire.funnel import Funnel

MAX_FRAME = 512 << 10
"""Limit of the bytes of a request, above the longest ones that the other limits allow (`ReconcileGrants`, 300 KiB)."""
MAX_KEYS = 1024
"""Limit of the segments in one `Match` or `MarkInFlight`: they take the daemon's loop one millisecond."""
MAX_CHANGED = 128
"""Limit of the segments in one `Prepare`, `Commit`, `Release`, `Hint` or `Unpin`: each takes the loop up to 7 us."""
MAX_FETCHED = 256
"""Limit of the segments in one `Fetch` or `Prefetch`: those at other nodes take the daemon's loop 5 us each."""
MAX_REGRANTED = 128
"""Limit of the slots in one `Regrant`, and of its leases and writes."""
MAX_RANGES = 32
"""Limit of the ranges in one `Release`, each of which may end a lease."""
MAX_MODEL = 256
"""Limit of the characters of the name under which an engine serves its model."""
MAX_REASON = 1000
"""Limit of the characters of `Bye.reason`."""
MAX_GRANTS = 16384
"""Limit of the leases of a session, and of its writes, so that a `ReconcileGrants` can name all of them. Their decoder
takes half a millisecond."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Hello(_Message, frozen=True, tag=1):
    """First frame of a connection."""

    id: int
    oldest_version: int
    newest_version: int
    layout: bytes
    """The layout of the engine's segments, encoded by `Layout.encode()`."""
    probe: bytes
    """`keys.probe` under the public secret `PROBE_SECRET`: shows whether both sides hash alike."""
    token: str | None = None
    session: int = 0
    """0 opens a session; another number joins that session."""
    resume: int = 0
    """`Welcome.connection` of the process's earlier connection, whose grants it still holds; 0 for none."""
    incarnation: int = 0
    """Incarnation of the daemon that gave the numbers `session` and `resume`; a daemon of another incarnation refuses
    both. 0 when it is not known."""


class Welcome(_Message, frozen=True, tag=2):
    """Answers `Hello`."""

    id: int
    version: int
    node: str
    incarnation: int
    session: int
    connection: int
    """Number under which the daemon keeps the grants (leases and writes) of the process, for `Hello.resume` of its next
    connection. If it differs from `resume` of the answered `Hello`, the earlier grants have ended."""
    tenant: str
    secret: bytes
    """The tenant's secret, for the root of the key chain."""
    probe: bytes
    """`keys.probe` under `secret`; the client compares it with its own result."""
    heartbeat_s: Seconds
    max_frame: int
    lock: bool = False
    """Does a descriptor travel beside the frame? The process must hold a POSIX record lock on that file before it opens
    a region, and until it maps none any more: the daemon has no other way to notice its death."""
    published: tuple[str, ...] = ()
    """The names of the models of the tenant whose segments the daemon publishes to routers: for them the process sends
    `Prepare.contents`."""
    kept: bool = False
    """Has this daemon kept the memory of the daemon that `Hello.incarnation` names, where the process is known? Then
    the regions that the process maps are those of this daemon, slots and generations are as before, the session of that
    `Hello` goes on under the number `session`, and the process says in `Regrant`, before any other request, what it
    holds. False for a process that speaks protocol version 1: it opens its regions anew."""
    keep_s: Seconds = 0.0
    """Seconds for which the process keeps its mappings when the connection has ended: the memory outlives the daemon,
    and the next one may go on with it. 0: it drops them at once."""


class Failed(_Message, frozen=True, tag=3):
    """Answers a request that broke a rule. `kind` is a class name of `tokenlake.errors`."""

    id: int
    kind: str
    reason: str


class Match(_Message, frozen=True, tag=4):
    """Asks which of these keys the pool has: the longest prefix of them or, if they are `independent`, all that it
    finds. These segments are leased."""

    id: int
    keys: bytes
    deadline_s: Seconds
    checksums: bool = True
    """Should the reply contain checksums?"""
    request: RequestName = ""
    hints: Hints | None = None
    """Hints about the request; they apply to every read of the lease."""
    tokens: Index = 0
    """Number of tokens of the prompt; 0: as many as the segments of `keys` have."""
    in_flight_wait_s: Seconds = 0.0
    """Maximum time to wait while another engine computes the first missing segment. If no engine does, the in-flight
    marker of that segment is set for this caller and for this time, and matches of other engines wait for the
    caller."""
    in_flight_wait_per_segment_s: Seconds = 0.0
    """Maximum part of `in_flight_wait_s` for each missing segment; 0: no such bound."""
    independent: bool = False
    """Should every segment that is found be leased? Such a match does not wait for a segment in flight."""
    in_flight_expected_s: Seconds = 0.0
    """For this part of `in_flight_wait_s`, from its beginning on, a missing segment counts as in flight also without an
    in-flight marker, because another engine has said that it stores it: the marker may arrive after the match."""
    counted: Index = MAX_KEYS
    """Number of keys, from the first on, whose segments stand for the tokens of the prompt, in order. The others are of
    further cache groups of an opaque layout, whose segments stand for the same tokens."""


class Matched(_Message, frozen=True, tag=5):
    """Answers `Match` and `Attach`. A lease also stands for the account of the match, so that one without segments is
    to be released too. `lease` is 0 where there were no keys, or a limit of the session is reached."""

    id: int
    lease: int
    hits: Index
    """Number of leased segments: the first ones without a gap or, of `independent` keys, those with the code LOCAL or
    REMOTE. No other segment is leased."""
    codes: bytes
    """One per key of the `Match`, or per leased segment of the `Attach`."""
    slots: bytes
    """Slots of the leased segments, in the order of the keys; zeros where the code is not LOCAL."""
    checksums: bytes
    """8 bytes per shard for each of the leased segments, zeros where not LOCAL; empty where the request had no
    `checksums`."""


class Attach(_Message, frozen=True, tag=6):
    """Asks that this process too holds a lease or write that another process of its session holds; answered with
    `Matched` or `Prepared`. A process must attach before it reads or fills the slots."""

    id: int
    lease: int
    checksums: bool = True
    """Should the reply contain checksums?"""


class Fetch(_Message, frozen=True, tag=7):
    """Bring the segments `start` to `stop` of a lease into this node's arena, at most `MAX_FETCHED`."""

    id: int
    lease: int
    start: Index
    stop: Index
    deadline_s: Seconds
    """Seconds after which the daemon answers with the segments that have arrived; 0: the daemon chooses the time from
    the predicted duration of the fetch."""
    checksums: bool = True
    """Should the reply contain checksums?"""
    request: RequestName = ""
    at_most_s: Seconds = 0.0
    """Limit of the deadline in seconds, whether the engine or the daemon chose it: a part of the time in which the
    engine computes the segments itself; 0: none."""


class Fetched(_Message, frozen=True, tag=8):
    """Answers `Fetch`: one code, slot and checksum per segment asked for."""

    id: int
    codes: bytes
    slots: bytes
    checksums: bytes


class Release(_Message, frozen=True, tag=9):
    """This process no longer reads these segments, at most `MAX_CHANGED`: (lease, start, stop) each. Not answered."""

    ranges: Annotated[tuple[tuple[int, Index, Index], ...], Meta(max_length=MAX_RANGES)]
    read: bool = False
    """Has it read them, here or by queries to the nodes where they are?"""
    took: Annotated[tuple[tuple[int, Index, Index, Seconds], ...], Meta(max_length=MAX_RANGES)] = ()
    """What the engine took of a match: (lease, start, stop, seconds). Its own cache had the prompt's tokens before
    `start`, and it computes those from `stop` on. `seconds`: the time in which it would have computed those between;
    0: it is not known. Without an entry it took all that it has read."""
    uncounted: Annotated[tuple[int, ...], Meta(max_length=MAX_RANGES)] = ()
    """Leases of matches that the engine has given up before their answer, or asks again: their tokens do not count."""


class Prepare(_Message, frozen=True, tag=10):
    """Reserve slots for consecutive segments of one prompt, of which the first is segment `first`. Answered with
    `Prepared`."""

    id: int
    keys: bytes
    first: Index
    request: RequestName = ""
    hints: Hints | None = None
    """Hints about the request that computed the segments."""
    contents: Annotated[tuple[bytes, ...], Meta(max_length=MAX_CHANGED)] = ()
    """The encoded `tokenlake.content.Content` of the segments, for routers, in the order of the keys; of the first
    segments only, or of none."""


class Prepared(_Message, frozen=True, tag=11):
    """Answers `Prepare`: RESERVED with a slot, EXISTS, PENDING, or the reason of the refusal."""

    id: int
    write: int
    codes: bytes
    slots: bytes


class Commit(_Message, frozen=True, tag=12):
    """Shards of the segments at `indices` are filled, and this process does not write them again. A segment is READY
    once all its shards are committed."""

    id: int
    write: int
    indices: Annotated[tuple[Index, ...], Meta(max_length=MAX_CHANGED)]
    shards: ShardMask
    """The shards that this process wrote, consecutive ones."""
    checksums: bytes
    """xxh3-64, little-endian, per segment and set bit of `shards`, in that order."""


class Committed(_Message, frozen=True, tag=13):
    """Answers `Commit`: COMMITTED, RESERVED while shards are missing, or EXPIRED."""

    id: int
    codes: bytes


class Abort(_Message, frozen=True, tag=14):
    """Give back the segments of a write that are not committed: this process does not write into their slots any more.
    Not answered."""

    write: int


class Heartbeat(_Message, frozen=True, tag=15):
    """Renews the session's leases and reservations."""

    id: int


class HeartbeatReply(_Message, frozen=True, tag=16):
    """`alive` is False when the session's deadline had passed: its reservations have ended; its leases remain until
    they are released."""

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
    where: Where = HOST


class RegionClosed(_Message, frozen=True, tag=31):
    """Sent to each process that opened a region when the region is given to another tenant: its memory is freed, and
    the process holds no grant in it. `id` is 0, because the message answers no request."""

    id: int
    region: Index


class Bye(_Message, frozen=True, tag=19):
    """This process holds no grant any more and has unmapped the regions. Not answered. May also be the first frame."""

    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    """Why an engine goes without the pool, although the daemon does not refuse it."""


class Locate(_Message, frozen=True, tag=20):
    """Asks on which nodes the segments of a lease are."""

    id: int
    lease: int


class Located(_Message, frozen=True, tag=21):
    """Answers `Locate`, one byte per segment: an index into `nodes`, or `HERE` for this node's arena. It ends before
    the first lost segment, and is empty for a lease that has ended."""

    id: int
    nodes: tuple[str, ...]
    owners: bytes
    disk_s: tuple[Seconds, ...] = ()
    """For each of `nodes`, the expected seconds until it has read those of its segments that are on its disk, behind
    the reads that wait there; empty where no segment is on a disk. A segment whose node in `nodes` is this one is on
    its disk."""


class OpenQuery(_Message, frozen=True, tag=22):
    """Ask for a connection to this node's query engine (`tokenlake.wire.query`)."""

    id: int


class QueryOpened(_Message, frozen=True, tag=23):
    """Answers `OpenQuery`; the descriptor travels beside the frame. `Failed` with `Unreachable` where none runs."""

    id: int


class ReconcileGrants(_Message, frozen=True, tag=24):
    """First message of a process that continues over a new connection: the leases and writes (grants) that it knows.
    The daemon takes back every other grant of the process, because the reply that granted it may have been lost with
    the earlier connection. Not answered."""

    leases: Annotated[tuple[int, ...], Meta(max_length=MAX_GRANTS)]
    writes: Annotated[tuple[int, ...], Meta(max_length=MAX_GRANTS)]


class Hint(_Message, frozen=True, tag=26):
    """Hints that an engine gives after its match, about consecutive segments of one prompt. They apply on all nodes
    that have these segments, and do not count as a read; later reads with `lease`, unless it is 0, carry them too. Not
    answered."""

    keys: bytes
    hints: Hints
    lease: int = 0


class Explain(_Message, frozen=True, tag=27):
    """Asks how the request with this name used the pool. If no request has exactly this name, the only one whose name
    begins with it is meant. The empty name lists the newest requests. A process may send this message before `Hello`;
    `token` then gives the tenant."""

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


class MarkInFlight(_Message, frozen=True, tag=29):
    """This process is about to compute these segments: set their in-flight markers for at most `seconds`, or, if that
    is 0, clear them. Not answered."""

    keys: bytes
    seconds: Seconds


class Corrupt(_Message, frozen=True, tag=30):
    """This process read a segment of a lease in this node's arena, and its checksum was wrong: the daemon checks the
    copy again and drops it if it is wrong. Not answered."""

    lease: int
    index: Index


class Unpublished(_Message, frozen=True, tag=32):
    """This engine serves its model under a name that none of the daemon's streams of KV events has
    (`Welcome.published`), so that routers are told of none of its segments. Not answered."""

    model: Annotated[str, Meta(max_length=MAX_MODEL)]


class Prefetch(_Message, frozen=True, tag=33):
    """Bring consecutive segments of one prompt to the memory of this node, as cached copies, before a request needs
    them."""

    id: int
    keys: bytes
    first: Index = 0
    """Index of the first of the keys in its prompt."""
    source: Name = ""
    """The node that is asked first; empty: the directory says which."""
    pin_s: Seconds = 0.0
    """Seconds for which the segments are pinned then; 0: they are not."""


class Prefetched(_Message, frozen=True, tag=34):
    """Answers `Prefetch`. `codes`: LOCAL (it is in memory here, and pinned if that was asked for), MISSING, LOST (it
    did not come), PENDING (an engine of this node is writing it), or the code of a refusal; QUOTA: the pins of the
    tenant are used up."""

    id: int
    codes: bytes


class Unpin(_Message, frozen=True, tag=35):
    """End the pins of these segments at this node. Not answered."""

    keys: bytes


class Traced(_Message, frozen=True, tag=36):
    """The `Match` with this id, which is sent next, belongs to a trace, and so do the fetches of its lease and the
    stores of the session that name the same request. Sent only for a sampled trace. Not answered."""

    match: int
    trace: TraceContext
    """The span of the caller."""


class Regrant(_Message, frozen=True, tag=37):
    """Part of the leases and writes that the process holds of the daemon before (`Welcome.kept`): they go on under
    their numbers. Until the last part was answered, none of the memory that was kept gets other segments. Answered with
    `Regranted`; a part that was answered may be repeated."""

    id: int
    leases: Annotated[tuple[tuple[int, Index, Index, bytes], ...], Meta(max_length=MAX_REGRANTED)]
    """(lease, number of its items, index of the first item here, slots) each: the slots of this node's arena that the
    process holds, 16 bytes for each item from that index on; zeros where it holds none. A lease may be named several
    times. One that is not named has ended."""
    writes: Annotated[tuple[tuple[int, bytes], ...], Meta(max_length=MAX_REGRANTED)]
    """(write, slots) each: the slots that the process may still write into, 16 bytes for each index of the `Prepare`
    from 0 on; zeros where it will not. It gives them back by `Abort`, or by a `Commit`, which is answered EXPIRED."""
    last: bool
    """Is this the last part?"""


class Regranted(_Message, frozen=True, tag=38):
    """Answers `Regrant`: one code for each 16 bytes of its slots, those of the leases first.

    Of leases: LOCAL where the lease goes on with the segment; LOST where the segment is gone, or the slot is not known.
    Of writes: EXPIRED where the slot is the process's until it gives it back, and nothing can be committed; COMMITTED
    where the segment had been published; LOST where the slot is not known. SESSION_LIMIT: the grant exceeds a limit of
    the session. Arrays over the slots stay valid after each of these codes: what the daemon does not know as a grant it
    does not reuse before the process ends."""

    id: int
    codes: bytes


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
    | Locate
    | OpenQuery
    | ReconcileGrants
    | Hint
    | MarkInFlight
    | Corrupt
    | Prefetch
    | Unpin
    | Unpublished
    | Explain
    | Traced
    | Regrant
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
    | RegionClosed
    | Located
    | QueryOpened
    | Explained
    | Prefetched
    | Regranted
)


def releasable(ranges: Iterable[tuple[int, int, int]]) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Yields ranges (lease, start, stop) in parts, each of which one `Release` may name. A long range is given back
    from its end on: the eviction policy keeps the segment longest that was given back last."""
    part: list[tuple[int, int, int]] = []
    room = MAX_CHANGED
    for lease, start, stop in ranges:
        # A range without segments, which ends a lease without segments, is one of its own.
        for end in range(stop, start, -MAX_CHANGED) if start < stop else (stop,):
            first = max(start, end - MAX_CHANGED)
            if part and (end - first > room or len(part) == MAX_RANGES):
                yield tuple(part)
                part, room = [], MAX_CHANGED
            part.append((lease, first, end))
            room -= end - first
    if part:
        yield tuple(part)


HERE = 255
"""In `Located.owners`: the segment is in this node's arena."""

PROBE_SECRET = b"tokenlake probe"

request_decoder: msgspec.msgpack.Decoder[EngineRequest] = msgspec.msgpack.Decoder(EngineRequest)
reply_decoder: msgspec.msgpack.Decoder[EngineReply] = msgspec.msgpack.Decoder(EngineReply)
