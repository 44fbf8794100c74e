"""Messages between engine and daemon and between daemons: length-prefixed MessagePack frames."""

from tokenlake.wire.codes import Code
from tokenlake.wire.frames import HEADER_BYTES, FrameDecoder, pack_frame
from tokenlake.wire.version import PROTOCOL_VERSION, agree

__all__ = ["HEADER_BYTES", "PROTOCOL_VERSION", "Code", "FrameDecoder", "agree", "pack_frame"]
