"""The contents of segments for routers, and the hashes of their blocks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tokenlake.content import Content, block_hash, content_limit, contents_of, decode_content
from tokenlake.errors import ProtocolRefused
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix

ROOT = SegmentKey(b"r" * 32)
GOOD = Content("m", "", b"r" * 8, b"p" * 8, b"\1\0\0\0")


def test_the_contents_of_some_segments_of_a_prompt() -> None:
    tokens = [7, 1 << 31, 3, 4, 5, 6, 7, 8, 9]
    prefix = Prefix(ROOT, 2)
    prefix.extend(tokens)
    first, second, third = map(decode_content, contents_of(prefix, tokens, range(3), "m", "lora"))
    assert first == Content("m", "lora", b"r" * 8, b"", np.array([7, 1 << 31], "<u4").tobytes())
    assert second.parent == prefix.keys[0][:8]
    assert third.tokens == np.array([5, 6], "<u4").tobytes()
    assert (
        contents_of(prefix, tokens, range(1, 3), "m", "lora") == contents_of(prefix, tokens, range(3), "m", "lora")[1:]
    )


def test_the_hashes_of_blocks() -> None:
    """The hashes of blocks follow from the key and do not exceed 64 bits."""
    assert [block_hash(bytes(7) + b"\5" + bytes(24), block) for block in range(3)] == [5, 6, 7]
    assert block_hash(b"\xff" * 32, 1) == 0
    assert block_hash(b"\xff" * 8, 0) == (1 << 64) - 1


def test_a_content_has_a_limit() -> None:
    """As documented 1 KiB for 256 tokens; a layout that names many tokens gets no more than its segments have bytes."""
    tokens = list(range(256))
    prefix = Prefix(ROOT, 256)
    prefix.extend(tokens)
    longest = "n" * 200
    for limit in (content_limit(8192, 256), content_limit(8192)):
        (content,) = contents_of(prefix, tokens, range(1), longest, longest)
        assert len(content) <= limit <= 1536
    assert content_limit(16 << 10, 1 << 20) == content_limit(16 << 10) == 2048
    assert content_limit(1 << 20, 16) == 576


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["m", "", b"r" * 8, b"", "text"]),
        msgspec.msgpack.encode(msgspec.structs.replace(GOOD, root=b"r")),
        msgspec.msgpack.encode(msgspec.structs.replace(GOOD, parent=b"p")),
        msgspec.msgpack.encode(msgspec.structs.replace(GOOD, tokens=b"")),
        msgspec.msgpack.encode(msgspec.structs.replace(GOOD, tokens=b"12345")),
    ],
)
def test_a_malformed_content_is_refused(encoded: bytes) -> None:
    assert decode_content(msgspec.msgpack.encode(GOOD)) == GOOD
    with pytest.raises(ProtocolRefused):
        decode_content(encoded)
