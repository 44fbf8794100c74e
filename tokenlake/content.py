"""The content of segments, for routers: token ids and the place in the prompt, which the keys do not show.

Only the segments of tenants with a stream of KV events have one. An engine sends it with its `Prepare`, and it travels
with the bytes of a segment to other nodes. The rules do not know it.

Routers know a segment as blocks of their own size. The hash of a block follows from the key of its segment, so that a
removal needs no tokens::

    hash(block i of a segment) = first 8 bytes of the segment's key, as a number, + i
"""

from __future__ import annotations

import msgspec

from tokenlake.errors import ProtocolRefused
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix, TokenIds, encode_tokens

MAX_CONTENT_BYTES = 256 << 10
"""Limit of the bytes of all contents in one message of an engine."""
NAME_BYTES = 8
OTHER_BYTES = 512
"""Bytes that a content may have beside the token ids: the names of the model and the adapter, keys."""
SHARE = 16
"""A content takes at most 1 KiB and this part of its segment: the cache of a token has 16 times the bytes of its id."""
_HASHES = 1 << 64


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The content of one segment."""

    model: str
    """The name under which engines and routers know the model."""
    adapter: str
    """The name of the LoRA adapter; empty for none."""
    root: bytes
    """The first 8 bytes of the root of the key chain, which stands for layout, weights and the adapter's files."""
    parent: bytes
    """The first 8 bytes of the key of the segment before; empty for the first segment of a prompt."""
    tokens: bytes
    """The token ids of the segment, uint32 little-endian."""


_decoder = msgspec.msgpack.Decoder(Content)
_encoder = msgspec.msgpack.Encoder()


def contents_of(prefix: Prefix, tokens: TokenIds, segments: range, model: str, adapter: str = "") -> tuple[bytes, ...]:
    """The encoded contents of `segments` of a prompt. `tokens`: the token ids of the prompt from its first one on,
    those of all `segments` included. Raises the errors of `Prefix.extend`."""
    size = prefix.segment_tokens
    packed = encode_tokens(tokens[segments.start * size : segments.stop * size])
    root, keys = prefix.root[:NAME_BYTES], prefix.keys
    return tuple(
        _encoder.encode(
            Content(
                model,
                adapter,
                root,
                keys[index - 1][:NAME_BYTES] if index else b"",
                packed[at * size * 4 : (at + 1) * size * 4],
            )
        )
        for at, index in enumerate(segments)
    )


def content_limit(segment_bytes: int, segment_tokens: int = 0) -> int:
    """Limit of the bytes of the content of one segment, which a daemon keeps for as long as the segment.
    `segment_tokens`: 0 where the layout is not known."""
    limit = 2 * OTHER_BYTES + segment_bytes // SHARE
    return min(limit, 4 * segment_tokens + OTHER_BYTES) if segment_tokens else limit


def decode_content(encoded: bytes) -> Content:
    """The inverse of the encoding. Raises `ProtocolRefused` for anything else."""
    try:
        content = _decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolRefused(f"the content of a segment cannot be decoded: {error}") from error
    if len(content.root) != NAME_BYTES or len(content.parent) not in (0, NAME_BYTES):
        raise ProtocolRefused("the content of a segment names a root or a parent of another length than 8 bytes")
    if not content.tokens or len(content.tokens) % 4:
        raise ProtocolRefused(f"the content of a segment has {len(content.tokens)} bytes of token ids")
    return content


def block_hash(name: SegmentKey | bytes, block: int) -> int:
    """The hash of a block, 0 to 2**64 - 1. `name`: the key of its segment, or the first 8 bytes of it."""
    return (int.from_bytes(name[:NAME_BYTES], "big") + block) % _HASHES
