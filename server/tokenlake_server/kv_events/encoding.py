"""vLLM's KV events in MessagePack: [time, events, data-parallel rank].

vLLM encodes an event as a map that is tagged `type`. Earlier versions encoded it as an array that begins with the tag,
which is all that some routers read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

ENCODINGS = ("map", "array")


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Consecutive blocks of a prompt can be loaded."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The hash of the block before the first one; None at the beginning of a prompt."""
    token_ids: list[int]
    block_size: int
    """Tokens of a block."""
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks can no longer be loaded."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No block can be loaded, until further ones are stored."""


Event = BlockStored | BlockRemoved | AllBlocksCleared

_encoder = msgspec.msgpack.Encoder()


def encode(events: Sequence[Event], encoding: str) -> bytes:
    """One message with events. `encoding`: one of `ENCODINGS`."""
    coded = [_array(event) for event in events] if encoding == "array" else events
    return _encoder.encode([time.time(), coded, 0])


def _array(event: Event) -> list[object]:
    return [type(event).__name__, *(getattr(event, name) for name in event.__struct_fields__)]
