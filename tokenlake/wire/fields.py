"""Fields of messages, with bounds: a decoder refuses what no sender of this protocol can mean."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenlake.keys import KEY_BYTES
from tokenlake.layout import MAX_SEGMENT_BYTES, MAX_SHARDS

__all__ = [
    "CHECKSUM_BYTES",
    "MAX_AMOUNT",
    "MAX_REQUEST_NAME",
    "MAX_SECONDS",
    "Amount",
    "Index",
    "Key",
    "Name",
    "Nonce",
    "Proof",
    "RequestName",
    "Seconds",
    "Shards",
    "Share",
    "SlotBytes",
    "Statistics",
    "Version",
    "RetentionValue",
]

CHECKSUM_BYTES = 8
"""Checksum of one shard: xxh3-64, little-endian."""

MAX_AMOUNT = 1e15
Amount = Annotated[float, Meta(ge=0, le=MAX_AMOUNT)]
"""Bytes, or bytes per second; more than any machine moves is refused, and so is what is no number."""

Index = Annotated[int, Meta(ge=0, lt=1 << 32)]
"""Of a segment in its prompt, of a key in a batch, of a region; a bit mask of shards."""

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
"""Of one segment."""

Name = Annotated[str, Meta(max_length=64)]
"""Of a node, from somebody who has proven nothing."""

Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""Drawn at random for one handshake."""

Proof = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""Keyed hash of a handshake."""

MAX_REQUEST_NAME = 64
RequestName = Annotated[str, Meta(max_length=MAX_REQUEST_NAME)]
"""What the logs of engine, daemon and peers call a request by, chosen by the engine; empty: it has no name."""

MAX_SECONDS = 1e9
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
"""A duration; not a number and infinity are refused, so that every deadline made of it comes."""

Share = Annotated[float, Meta(ge=0, le=1)]
"""A part of a whole."""

Shards = Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
"""How many shards a segment has."""

Statistics = Annotated[bytes, Meta(max_length=1 << 18)]
"""What a policy of eviction saves of one pool."""

Version = Annotated[int, Meta(ge=0)]
"""Of what a node tells everybody; 0: nothing yet."""

RetentionValue = Annotated[float, Meta(ge=0, le=1e9)]
"""What keeping a segment is worth to the policy of eviction."""

SlotBytes = Annotated[int, Meta(ge=1, le=MAX_SEGMENT_BYTES)]
"""Bytes of one segment."""
