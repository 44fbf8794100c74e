"""Messages between daemons.

The control connection carries everything but segments' bytes. A bulk connection carries `Pull` frames one way
and, for each, a `Pulled` frame followed by raw bytes the other way. Both begin with the handshake: `PeerHello`,
`PeerChallenge`, `PeerProof`, `PeerWelcome`; `PeerRefused` may take the place of any but the first.
A request carries a `call` that its reply repeats.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenlake.hints import NO_ACCESS, AccessRecord, Hints
from tokenlake.wire.fields import (
    Amount,
    Index,
    Key,
    Name,
    Nonce,
    Proof,
    RequestName,
    RetentionValue,
    Seconds,
    Shards,
    Share,
    SlotBytes,
    Statistics,
    Version,
)

__all__ = [
    "AdvertisingDone",
    "MarkInFlight",
    "ExplainMissing",
    "Corrupt",
    "Evicted",
    "Handshake",
    "PrimaryCopies",
    "HotEntry",
    "HotSet",
    "RequestHotSet",
    "EvictionStatistics",
    "Lookup",
    "LookupReply",
    "Offer",
    "OfferReply",
    "PeerChallenge",
    "PeerHello",
    "PeerMessage",
    "PeerProof",
    "PeerRefused",
    "PeerWelcome",
    "Ping",
    "Pong",
    "Pull",
    "Pulled",
    "Purpose",
    "ReadCounts",
    "Ready",
    "ReadyReply",
    "Redundant",
    "ReleaseLease",
    "RenewLease",
    "Replicate",
    "ReplicateReply",
    "ExplainMissingReply",
    "Touched",
    "ClearInFlight",
    "bulk_request_decoder",
    "handshake_decoder",
    "peer_decoder",
    "pulled_decoder",
]


Purpose = Literal["control", "bulk", "query"]
"""What a connection carries after the handshake: messages, segments' bytes, or frames between query engines
(`tokenlake.wire.query`)."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class PeerHello(_Message, frozen=True, tag=1):
    """First frame of a connection between daemons: who dials. Nothing of it is proven."""

    oldest_version: int
    newest_version: int
    node: Name
    incarnation: int
    purpose: Purpose
    nonce: Nonce


class PeerChallenge(_Message, frozen=True, tag=22):
    """Answers `PeerHello`: who was dialled, proven."""

    version: int
    node: Name
    incarnation: int
    nonce: Nonce
    proof: Proof


class PeerProof(_Message, frozen=True, tag=23):
    """Answers `PeerChallenge`: the dialler's ring, told only to who proved itself, and the dialler's proof."""

    epoch: int
    members: tuple[str, ...]
    proof: Proof


class PeerWelcome(_Message, frozen=True, tag=2):
    """Answers `PeerProof`: the dialler is believed, and the sender's epoch is the same."""


class PeerRefused(_Message, frozen=True, tag=3):
    """Ends a handshake, from either side; the connection closes after it."""

    kind: str
    reason: str


class Lookup(_Message, frozen=True, tag=4):
    """Which of these keys do you have, or know of as their directory node? What is there is leased to the caller."""

    call: int
    tenant: str
    keys: bytes
    request: RequestName = ""
    claim_s: Seconds = 0.0
    """Above 0: a key that is answered with MISSING gets an in-flight marker of the caller, for this time."""
    may_defer: bool = False
    """Segments that are being sent to other readers may be answered with DEFERRED: the caller asks again."""


class LookupReply(_Message, frozen=True, tag=5):
    """LOCAL (leased there), ELSEWHERE (node in `nodes`), DEFERRED, PENDING, MISSING or UNKNOWN per key."""

    call: int
    lease: int
    codes: bytes
    nodes: tuple[str, ...]
    """One for each ELSEWHERE, in order."""
    vacancy: tuple[Share, Seconds, RetentionValue]
    """The sender's."""
    load: Amount
    """Bytes read from the sender's arena per second, lately."""
    known_depth: Index = 0
    """Keys up to the last that is there, or that the sender remembers; 0: none."""
    last_access: AccessRecord = NO_ACCESS
    """How that one was used before."""
    last_access_age_s: Seconds = 0.0
    """How long ago."""
    redirect: str = ""
    """Who was sent what is leased here, of late, and is to be asked for it: many read it here. Empty: nobody."""


class ReleaseLease(_Message, frozen=True, tag=6):
    """The caller's leases that it no longer needs."""

    leases: tuple[int, ...]


class RenewLease(_Message, frozen=True, tag=30):
    """The caller's engines still hold what these leases stand for."""

    leases: tuple[int, ...]


class MarkInFlight(_Message, frozen=True, tag=7):
    """To the directory node: the sender is writing these."""

    tenant: str
    keys: bytes
    deadline_s: Seconds


class ClearInFlight(_Message, frozen=True, tag=8):
    """To the directory node: the sender gave up writing these."""

    tenant: str
    keys: bytes


class Ready(_Message, frozen=True, tag=9):
    """To the directory node: the sender has these, not yet pushed."""

    call: int
    tenant: str
    keys: bytes


class ReadyReply(_Message, frozen=True, tag=10):
    """COMMITTED: the first; EXISTS: somebody else's commit came first."""

    call: int
    codes: bytes
    first_writers: tuple[str, ...]
    """One node for each EXISTS, in order."""
    previous_owners: tuple[str, ...] = ()
    """For each COMMITTED, in order, the candidate that had it before, or refused it, and remembers it; "" for none.
    Empty: for none of them."""


class Offer(_Message, frozen=True, tag=11):
    """To the chosen owner: pull these from the sender and keep them."""

    call: int
    tenant: str
    keys: bytes
    depths: tuple[Index, ...]
    """Index of each segment in its prompt."""
    slot_bytes: SlotBytes
    shards: Shards
    request: RequestName = ""
    """That wrote them."""
    hints: Hints | None = None
    """Of that request."""


class OfferReply(_Message, frozen=True, tag=12):
    """COMMITTED, EXISTS, or the reason of the refusal per key."""

    call: int
    codes: bytes
    vacancy: tuple[Share, Seconds, RetentionValue]
    """The sender's."""
    load: Amount
    """As in `LookupReply`."""


class PrimaryCopies(_Message, frozen=True, tag=13):
    """To the directory node: the sender keeps the primary copy of these."""

    tenant: str
    keys: bytes


class Redundant(_Message, frozen=True, tag=14):
    """From the directory node: another node keeps the primary copy; yours may go. One node per key in `nodes`."""

    tenant: str
    keys: bytes
    nodes: tuple[str, ...]


class Evicted(_Message, frozen=True, tag=15):
    """To the directory node: `node` does not have these (any more). Said by the node itself, or by whoever asked it."""

    tenant: str
    keys: bytes
    node: Name
    rule: Name = ""
    """By which they went there, in words; empty: not known."""


class Corrupt(_Message, frozen=True, tag=48):
    """To the sender of a transfer: these arrived with wrong checksums. The receiver of this message checks its copies
    again and drops those that are wrong."""

    tenant: str
    keys: bytes


class ExplainMissing(_Message, frozen=True, tag=45):
    """To the directory node: somebody missed these. What became of them?"""

    call: int
    tenant: str
    keys: bytes


class EvictionStatistics(_Message, frozen=True, tag=47):
    """What the sender's policy of eviction learned lately, by pool: (tenant, slot bytes, statistics)."""

    policy: Name
    pools: tuple[tuple[str, SlotBytes, Statistics], ...]


class ExplainMissingReply(_Message, frozen=True, tag=46):
    """Answers `ExplainMissing`, one of each per key; an empty rule where nothing is known."""

    call: int
    rules: tuple[Name, ...]
    nodes: tuple[Name, ...]
    ago_s: tuple[Seconds, ...]


class Touched(_Message, frozen=True, tag=16):
    """To the owner: copies of these were read elsewhere. Deepest first."""

    tenant: str
    keys: bytes
    hints: Hints | None = None
    """Of the requests that read them; one message for each that differs."""
    used: bool = True
    """False: a word that came after the use."""
    relayed: bool = False
    """By a node that has a copy as well, from a reader that knows of no other: not to be relayed again."""


class AdvertisingDone(_Message, frozen=True, tag=17):
    """The sender has told its primary copies to this incarnation of the receiver, all of them."""


class ReadCounts(_Message, frozen=True, tag=40):
    """To the directory node: these were read from the sender's arena since it last said so, and could have been
    elsewhere."""

    tenant: str
    keys: bytes
    depths: tuple[Index, ...]
    counts: tuple[Index, ...]
    """How often each was read."""
    slot_bytes: SlotBytes
    shards: Shards


class Replicate(_Message, frozen=True, tag=41):
    """From the directory node: take copies of these from `source`, and keep them while the sender's hot set names
    you."""

    call: int
    tenant: str
    keys: bytes
    depths: tuple[Index, ...]
    slot_bytes: SlotBytes
    shards: Shards
    source: str
    owner: str
    """It keeps the primary copies."""


class ReplicateReply(_Message, frozen=True, tag=42):
    """COMMITTED, or why there is no copy, per key."""

    call: int
    codes: bytes


class HotEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A hot segment, and who has a copy: positions in the ring's sorted members, the owner's first."""

    tenant: str
    key: Key
    nodes: tuple[Index, ...]


class HotSet(_Message, frozen=True, tag=43):
    """From a directory node: all its hot segments. A greater version of the same incarnation replaces an earlier
    one."""

    version: Version
    entries: tuple[HotEntry, ...]


class RequestHotSet(_Message, frozen=True, tag=44):
    """To a directory node: send your `HotSet`; one was missed."""


class Ping(_Message, frozen=True, tag=18):
    """Are you there? `vacancy` and `load` (as in `LookupReply`) are the sender's."""

    call: int
    vacancy: tuple[Share, Seconds, RetentionValue]
    load: Amount
    hot_version: Version
    """Of the sender's `HotSet`; 0: it has none."""


class Pong(_Message, frozen=True, tag=19):
    """Answers `Ping`."""

    call: int
    vacancy: tuple[Share, Seconds, RetentionValue]
    load: Amount
    hot_version: Version


class Pull(_Message, frozen=True, tag=20):
    """On a bulk connection: send these segments."""

    tenant: str
    keys: bytes
    request: RequestName = ""
    background: bool = False
    """To keep them there: no engine reads them now."""


class Pulled(_Message, frozen=True, tag=21):
    """Answers `Pull`; the bytes of the segments whose code is LOCAL follow, in order, `slot_bytes` each."""

    slot_bytes: int
    codes: bytes
    checksums: bytes
    """8 bytes per shard of each LOCAL segment, as the writer made them."""


PeerMessage = (
    Lookup
    | LookupReply
    | ReleaseLease
    | RenewLease
    | MarkInFlight
    | ClearInFlight
    | Ready
    | ReadyReply
    | Offer
    | OfferReply
    | PrimaryCopies
    | Redundant
    | Evicted
    | Corrupt
    | ExplainMissing
    | EvictionStatistics
    | ExplainMissingReply
    | Touched
    | AdvertisingDone
    | Ping
    | Pong
    | ReadCounts
    | Replicate
    | ReplicateReply
    | HotSet
    | RequestHotSet
)

peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
Handshake = PeerHello | PeerChallenge | PeerProof | PeerWelcome | PeerRefused
handshake_decoder: msgspec.msgpack.Decoder[Handshake] = msgspec.msgpack.Decoder(Handshake)
bulk_request_decoder: msgspec.msgpack.Decoder[Pull] = msgspec.msgpack.Decoder(Pull)
pulled_decoder: msgspec.msgpack.Decoder[Pulled] = msgspec.msgpack.Decoder(Pulled)
