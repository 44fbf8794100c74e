"""Any MessagePack library speaks the wire: plain `msgpack` reads frames of this project, which reads its frames."""

from __future__ import annotations

import msgpack
import msgspec
from hypothesis import given

from tests.rules.wire_messages import any_message
from tokenlake.wire import HEADER_BYTES, FrameDecoder, pack_frame


@given(any_message)
def test_plain_msgpack_reads_and_writes_frames(message: msgspec.Struct) -> None:
    frame = pack_frame(message)
    packed = msgpack.packb(msgpack.unpackb(frame[HEADER_BYTES:]))
    written = len(packed).to_bytes(HEADER_BYTES, "little") + packed
    assert written == frame
    [received] = FrameDecoder(1 << 20).feed(written)
    assert msgspec.msgpack.decode(received, type=type(message)) == message
