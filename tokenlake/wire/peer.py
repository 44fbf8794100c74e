"""Messages between daemons.

The control connection carries all messages. A bulk connection carries the bytes of segments: `Pull` frames in one
direction and, for each, a `Pulled` frame followed by raw bytes in the other; or by no bytes, where the reader takes
them out of the sender's memory and answers with `Taken`. Both begin with the handshake `PeerHello`, `PeerChallenge`,
`PeerProof`, `PeerWelcome`; `PeerRefused` may replace each but the first. Between nodes with
certificates the control connection is encrypted, and bulk and query connections begin with `OpenConnection` and
`PeerWelcome`. A request carries a `call` that its reply repeats.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from tokenlake.hints import NO_ACCESS, AccessRecord, Hints
from tokenlake.trace import NO_TRACE
from tokenlake.wire.fields import (
    NO_RING,
    Address,
    Addresses,
    AgentName,
    Amount,
    Index,
    LocationText,
    Name,
    Nonce,
    Proof,
    RecordKey,
    RequestName,
    RetentionValue,
    RingVersion,
    Seconds,
    Shards,
    Share,
    SlotBytes,
    Statistics,
    TraceContext,
)

MAX_FRAME = 2 << 20
"""Limit of the bytes of a frame between daemons. It is part of the protocol and no setting, because a node would close
the connection of a node that sends larger ones. The longest message is `EvictionStatistics`, about one MiB."""
HANDSHAKE_BYTES = 64 << 10
"""The same until the other side has proven its identity."""


MAX_DESCRIPTION = 1 << 20
"""Limit of the bytes of a `MemoryAgent`."""

PROBE_BYTES = 64 << 10
"""Bytes behind the answer to a `Pull` without keys that names no other number."""
MAX_PROBE_BYTES = 16 << 20
"""Limit of that number."""
ProbeBytes = Annotated[int, Meta(ge=1, le=MAX_PROBE_BYTES)]

DataPurpose = Literal["bulk", "query"]
Purpose = Literal["control", "bulk", "query", "join"]
"""Content of a connection after the handshake: messages, the bytes of segments, frames between query engines
(`tokenlake.wire.query`), or nothing: the handshake itself is the purpose."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class PeerHello(_Message, frozen=True, tag=1):
    """First frame of a connection between daemons: the dialler names itself. Nothing of it is proven."""

    oldest_version: int
    newest_version: int
    cluster: Name
    node: Name
    incarnation: int
    purpose: Purpose
    nonce: Nonce
    bulk: Addresses = ()
    """Further addresses at which the dialler accepts bulk connections."""
    control: Address = ""
    """Where the dialler serves its control plane to other machines, as `HOST:PORT`; empty if it does not."""
    location: LocationText = ""
    """Location of the dialler; empty if it has none."""


class PeerChallenge(_Message, frozen=True, tag=22):
    """Answers `PeerHello`: the dialled daemon names and proves itself."""

    version: int
    cluster: Name
    node: Name
    incarnation: int
    nonce: Nonce
    proof: Proof
    bulk: Addresses = ()
    """Further addresses at which the acceptor accepts bulk connections."""
    control: Address = ""
    """Where the acceptor serves its control plane."""
    location: LocationText = ""
    """Location of the acceptor."""


class PeerProof(_Message, frozen=True, tag=23):
    """Answers `PeerChallenge`: the dialler's proof."""

    proof: Proof


class PeerWelcome(_Message, frozen=True, tag=2):
    """Answers `PeerProof`: the dialler's proof is right, and it is a member of the acceptor's cluster."""


class PeerRefused(_Message, frozen=True, tag=3):
    """Ends a handshake, from either side; the connection closes after it."""

    kind: str
    reason: str


class ConnectionKey(_Message, frozen=True, tag=60):
    """On an encrypted control connection: the sender is about to open a connection, whose records have these keys. It
    names the connection by `connection` in `OpenConnection`."""

    connection: Nonce
    purpose: DataPurpose
    to_acceptor: RecordKey
    to_dialler: RecordKey


class OpenConnection(_Message, frozen=True, tag=61):
    """First frame of a bulk or query connection whose keys were sent as `ConnectionKey`. Answered with `PeerWelcome`,
    after which both directions carry records (`tokenlake.wire.records`), or with `PeerRefused`."""

    connection: Nonce


class MemoryAgent(_Message, frozen=True, tag=62):
    """The agent by which the receiver may read the sender's memory (NIXL). Sent when the two connect, and again when
    the agent or its memory changed. Without a name: there is none any more."""

    agent: AgentName
    version: Index
    """Changes with the memory that `description` names."""
    networks: Annotated[tuple[Name, ...], Meta(max_length=8)]
    """The networks of the sender over which memory can be read, for instance `rdma`."""
    description: Annotated[bytes, Meta(max_length=MAX_DESCRIPTION)]
    """How the agent is reached, and the keys of its memory, as the agent's library writes them."""


class Traced(_Message, frozen=True, tag=64):
    """The `Lookup` with the number `call`, which is sent next, belongs to a sampled trace."""

    call: int
    trace: TraceContext
    """The span of the lookup at the caller."""


class Lookup(_Message, frozen=True, tag=4):
    """Asks which of these segments the receiver has, and for the keys of which it is a candidate, which node owns them.
    Segments that the receiver has are leased to the caller."""

    call: int
    tenant: Name
    keys: bytes
    request: RequestName = ""
    marker_s: Seconds = 0.0
    """Above 0: each key answered with MISSING gets an in-flight marker that names the caller, for so long."""
    may_defer: bool = False
    """A segment that is being sent to other readers may be answered with DEFERRED: the caller asks again."""
    ring: RingVersion = NO_RING
    """The sender's ring."""
    lease: bool = True
    """False: the caller only wants to know where the segments are, and nothing is leased."""


class LookupReply(_Message, frozen=True, tag=5):
    """Answers `Lookup`, per key: LOCAL (leased at the sender), ELSEWHERE (node in `nodes`), DEFERRED, PENDING, MISSING
    or UNKNOWN."""

    call: int
    lease: int
    codes: bytes
    nodes: tuple[Name, ...]
    """The owner of each segment whose code is ELSEWHERE, in the order of the keys."""
    vacancy: tuple[Share, Seconds, RetentionValue]
    """The vacancy of the sender's memory (`tokenlake.memory.vacancy`)."""
    load: Amount
    """Recent rate of bytes that the sender sends to engines of other nodes, per second."""
    known_depth: Index = 0
    """Number of keys up to the deepest one whose segment the sender has or remembers; 0: none."""
    last_access: AccessRecord = NO_ACCESS
    """The record of the request that last accessed the deepest segment that `known_depth` counts."""
    last_access_age_s: Seconds = 0.0
    """Seconds from the last access of that segment to the sending of this reply."""
    redirect: Name = ""
    """A node that was recently sent the leased segments and that the caller should ask first (fan-out limit). Empty:
    none."""
    ring: RingVersion = NO_RING
    """The sender's ring."""
    disk_s: Seconds = 0.0
    """Expected seconds until the sender has read those of the segments with the code LOCAL that are on its disk; 0:
    none is. They are not leased, and stay there for some time if the lookup asked for a lease."""
    on_disk: bytes = b""
    """Per key, 1 for each of those segments, else 0; empty: none."""


class ReleaseLease(_Message, frozen=True, tag=6):
    """The caller no longer needs these leases."""

    leases: tuple[int, ...]


class RenewLease(_Message, frozen=True, tag=30):
    """Engines of the caller still hold the items of these leases."""

    leases: tuple[int, ...]


class MarkInFlight(_Message, frozen=True, tag=7):
    """To the directory node: an engine of the sender is computing or writing these segments."""

    tenant: Name
    keys: bytes
    deadline_s: Seconds


class ClearInFlight(_Message, frozen=True, tag=8):
    """To the directory node: the sender takes back its in-flight markers of these segments."""

    tenant: Name
    keys: bytes


class Offer(_Message, frozen=True, tag=11):
    """To a node with emptier memory: the sender asks it to take over these segments."""

    call: int
    tenant: Name
    keys: bytes
    depths: tuple[Index, ...]
    """Index of each segment in its prompt."""
    slot_bytes: SlotBytes
    shards: Shards
    hints: Hints | None = None
    """The hints of the request that wrote the segments."""


class OfferReply(_Message, frozen=True, tag=12):
    """Answers `Offer`, per key: COMMITTED, LOST where it did not arrive, or the reason of the refusal."""

    call: int
    codes: bytes
    vacancy: tuple[Share, Seconds, RetentionValue]
    """The vacancy of the sender's memory (`tokenlake.memory.vacancy`)."""
    load: Amount
    """Recent rate of bytes that the sender sends to engines of other nodes, per second."""


class Owned(_Message, frozen=True, tag=13):
    """To the directory node: the sender owns these segments."""

    tenant: Name
    keys: bytes
    previous: Name = ""
    """The owner that handed the segments over, whose entries in the directory are replaced; empty: none."""


class Redundant(_Message, frozen=True, tag=14):
    """From the directory node, an answer to `Owned`: `nodes` has, per key, another node that owned the segment before.
    Also from a node to which the receiver has handed over the segments. The copy of the receiver becomes a cached
    copy."""

    tenant: Name
    keys: bytes
    nodes: tuple[Name, ...]
    handed_over: bool = False
    """True from a node to which the receiver has handed over the segments."""


class Evicted(_Message, frozen=True, tag=15):
    """The sender does not have these segments. Sent to their directory node; and to a node that reported reads of its
    copies, by the node that it took for their owner."""

    tenant: Name
    keys: bytes
    rule: Name = ""
    """The rule by which the segments left the sender; empty: not known."""
    last_access: AccessRecord = NO_ACCESS
    """The record of the request that last accessed the segments; the directory node remembers it."""
    last_access_age_s: Seconds = 0.0
    """Seconds from the last access of the segments to the sending of this message."""


class Unfound(_Message, frozen=True, tag=49):
    """`node`, the owner of these segments according to their directory node, has no copy of them. Sent to the directory
    node by a reader, and passed on to `node`, which answers with `Evicted` for those that it does not have: a report
    about another node changes nothing by itself."""

    tenant: Name
    keys: bytes
    node: Name


class Corrupt(_Message, frozen=True, tag=48):
    """To the source of a transfer: these segments arrived with wrong checksums. The source checks its copies again
    and drops those that are wrong."""

    tenant: Name
    keys: bytes


class ExplainMissing(_Message, frozen=True, tag=45):
    """To the directory node: an engine did not find these segments; the sender asks how they left the pool."""

    call: int
    tenant: Name
    keys: bytes


class EvictionStatistics(_Message, frozen=True, tag=47):
    """Recent statistics of the sender's eviction policy, per pool: (tenant, slot bytes, statistics)."""

    pools: tuple[tuple[str, SlotBytes, Statistics], ...]


class ExplainMissingReply(_Message, frozen=True, tag=46):
    """Answers `ExplainMissing`, per key: the rule by which the segment was removed (empty where none is known), the
    node that it left, and the time since then."""

    call: int
    rules: tuple[Name, ...]
    nodes: tuple[Name, ...]
    ago_s: tuple[Seconds, ...]


class Touched(_Message, frozen=True, tag=16):
    """To the owner: copies of these segments were read at another node, or an engine there gave hints about them. The
    keys come deepest first."""

    tenant: Name
    keys: bytes
    hints: Hints | None = None
    """The hints of the requests that read the copies; requests with other hints have a message of their own."""
    used: bool = True
    """False: the message reports no read, but hints that came after a read. Without hints it only asks which segments
    the receiver lacks."""
    relayed: bool = False
    """True: the message was forwarded by the node from which the reader's copy came, and is not forwarded again."""


class AdvertisingDone(_Message, frozen=True, tag=17):
    """The sender has told this incarnation of the receiver all segments that it owns and that hash to the receiver
    on the sender's ring."""

    ring: RingVersion = NO_RING
    """The sender's ring."""


class Ping(_Message, frozen=True, tag=18):
    """Asks for a `Pong`. `vacancy` and `load` (as in `LookupReply`) are the sender's."""

    call: int
    vacancy: tuple[Share, Seconds, RetentionValue]
    load: Amount
    ring: RingVersion = NO_RING
    """The sender's ring."""


class Pong(_Message, frozen=True, tag=19):
    """Answers `Ping`."""

    call: int
    vacancy: tuple[Share, Seconds, RetentionValue]
    load: Amount
    ring: RingVersion = NO_RING
    """The sender's ring."""


class Pull(_Message, frozen=True, tag=20):
    """On a bulk connection: asks for the bytes of these segments. A request without keys (a probe) asks for
    `probe_bytes` bytes of any value, which show that bytes pass, or how fast."""

    tenant: Name
    keys: bytes
    request: RequestName = ""
    background: bool = False
    """True: no engine waits for the segments."""
    probe_bytes: ProbeBytes = PROBE_BYTES
    """Of a probe. A node of an earlier version sends `PROBE_BYTES`."""
    agent: AgentName = ""
    version: Index = 0
    """The `MemoryAgent` of the receiver by which the sender can read its memory; empty: it needs the bytes."""
    trace: TraceContext = NO_TRACE
    """The span of the transfer at the receiver, of a sampled trace."""


class Pulled(_Message, frozen=True, tag=21):
    """Answers `Pull`; the bytes of the segments whose code is LOCAL follow, in order, `slot_bytes` each. In the answer
    to a probe `slot_bytes` is the number of bytes that follow."""

    slot_bytes: int
    codes: bytes
    checksums: bytes
    """The checksums that the writers of the segments computed, 8 bytes per shard of each segment whose code is LOCAL,
    in order."""
    contents: tuple[bytes, ...] = ()
    """The encoded `tokenlake.content.Content` of the segments whose code is LOCAL, in order, empty where the sender has
    none; of the first segments only, or of none."""
    places: bytes = b""
    """The places of these segments in the sender's memory (`tokenlake.wire.places`), in order: no bytes follow, and the
    segments stay there until the receiver has sent `Taken` for all of them, or the connection ends. Only where the
    `Pull` named the present agent of the sender."""


class Taken(_Message, frozen=True, tag=63):
    """Follows a `Pulled` with places: the sender has read so many of the segments, from the first one on."""

    count: Index


MAX_KEYS = 1024
"""Limit of the segments, and of the leases, in one message on a control connection: as many as an engine's match may
have."""
MAX_OFFERED = 128
"""Limit of the segments in one `Offer`: as many as one write may have."""
MAX_PULLED = 256
"""Limit of the segments in one `Pull`: as many as an engine may fetch at once."""

PeerMessage = (
    Lookup
    | LookupReply
    | ReleaseLease
    | RenewLease
    | MarkInFlight
    | ClearInFlight
    | Offer
    | OfferReply
    | Owned
    | Redundant
    | Evicted
    | Unfound
    | Corrupt
    | ExplainMissing
    | EvictionStatistics
    | ExplainMissingReply
    | Touched
    | AdvertisingDone
    | Ping
    | Pong
)

peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
control_decoder: msgspec.msgpack.Decoder[PeerMessage | ConnectionKey | MemoryAgent | Traced] = msgspec.msgpack.Decoder(
    PeerMessage | ConnectionKey | MemoryAgent | Traced
)
Handshake = OpenConnection | PeerHello | PeerChallenge | PeerProof | PeerWelcome | PeerRefused
handshake_decoder: msgspec.msgpack.Decoder[Handshake] = msgspec.msgpack.Decoder(Handshake)
bulk_request_decoder: msgspec.msgpack.Decoder[Pull] = msgspec.msgpack.Decoder(Pull)
pulled_decoder: msgspec.msgpack.Decoder[Pulled] = msgspec.msgpack.Decoder(Pulled)
taken_decoder: msgspec.msgpack.Decoder[Taken] = msgspec.msgpack.Decoder(Taken)


class _Tagged(msgspec.Struct, array_like=True):
    """The beginning of any message."""

    tag: int


_tag_decoder = msgspec.msgpack.Decoder(_Tagged)
_KNOWN_TAGS = {
    message.__struct_config__.tag for message in (*get_args(PeerMessage), ConnectionKey, MemoryAgent, Traced)
}


def unknown_tag(body: bytes) -> int | None:
    """The tag of a message of a control connection whose type this version does not know; None for a message of a known
    type, and for bytes that are no message."""
    try:
        tag = _tag_decoder.decode(body).tag
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if tag in _KNOWN_TAGS else tag
