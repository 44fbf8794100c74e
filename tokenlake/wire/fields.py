"""Types of message fields. Their bounds let a decoder refuse values that no correct sender uses."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

from tokenlake.directory.ring_record import MAX_EPOCH
from tokenlake.layout import MAX_SEGMENT_BYTES, MAX_SHARDS
from tokenlake.trace import CONTEXT_BYTES

CHECKSUM_BYTES = 8
"""Bytes of the checksum of one shard, which is xxh3-64, little-endian."""

MAX_AMOUNT = 1e15
Amount = Annotated[float, Meta(ge=0, le=MAX_AMOUNT)]
"""An amount of bytes, or of bytes per second. The bound is above the speed of any machine; NaN and infinity are
refused."""

Index = Annotated[int, Meta(ge=0, lt=1 << 32)]
"""Index of a segment in its prompt, of a key in a batch, of a region; a count."""

Name = Annotated[str, Meta(max_length=64)]
"""Name of a node, or of a rule; bounded because messages with names are decoded before their sender is
authenticated."""

Address = Annotated[str, Meta(max_length=280)]
"""Address of a node as `HOST:PORT`; a host name has at most 255 characters."""
MAX_ADDRESSES = 8
Addresses = Annotated[tuple[Name, ...], Meta(max_length=MAX_ADDRESSES)]
"""Addresses of one node as `HOST:PORT`, the host being an IP address."""

AgentName = Annotated[str, Meta(max_length=128)]
"""Name of an agent by which the memory of a node is read, another one in each of its lives; empty: none."""

LocationText = Annotated[str, Meta(max_length=260)]
"""Location of a node (`tokenlake.location`), as text."""

NONCE_BYTES = 32
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
"""32 bytes that one side draws at random for one handshake."""

Proof = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""32 bytes: keyed hash of a handshake, by which a node proves that it knows the cluster's secret."""

RECORD_KEY_BYTES = 16
RecordKey = Annotated[bytes, Meta(min_length=RECORD_KEY_BYTES, max_length=RECORD_KEY_BYTES)]
"""Key of the records of one direction of a connection (`tokenlake.wire.records`)."""


class RecordKeys(NamedTuple):
    """The keys of one side of a connection."""

    sending: RecordKey
    receiving: RecordKey

    def __repr__(self) -> str:
        return "RecordKeys(***)"


MAX_REQUEST_NAME = 64
RequestName = Annotated[str, Meta(max_length=MAX_REQUEST_NAME)]
"""Name of a request in the logs of engine, daemon and peers, chosen by the engine; empty: none."""

MAX_SECONDS = 1e9
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
"""A duration in seconds. NaN and infinity are refused, because a deadline made from one would never pass."""

Share = Annotated[float, Meta(ge=0, le=1)]
"""A fraction, 0 to 1."""

RingVersion = tuple[Annotated[int, Meta(ge=0, lt=MAX_EPOCH)], Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]]
"""The ring of a node: (epoch, digest) of its record. Equal epochs with different digests: the two nodes were configured
with different lists of members."""
NO_RING = (0, 0)
"""The ring of a sender that does not name it."""

Shards = Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
"""Number of shards of a segment."""
ShardMask = Annotated[int, Meta(ge=1)]
"""Bit mask of shards. MessagePack bounds it to `MAX_SHARDS` bits."""

Statistics = Annotated[bytes, Meta(max_length=1 << 18)]
"""Statistics of one pool, as an eviction policy saves them."""

TraceContext = Annotated[bytes, Meta(max_length=CONTEXT_BYTES)]
"""The context of a trace (`tokenlake.trace`)."""

RetentionValue = Annotated[float, Meta(ge=0, le=1e9)]
"""Retention value: the eviction policy's value of keeping a segment."""

SlotBytes = Annotated[int, Meta(ge=1, le=MAX_SEGMENT_BYTES)]
"""Bytes of one segment."""
