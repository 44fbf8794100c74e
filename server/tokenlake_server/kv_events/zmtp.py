"""ZMTP 3.0 with the mechanism NULL, the protocol of ZMQ's sockets, as the side that accepts connections. No I/O.

::

    greeting (64 bytes) | READY command | messages and commands
    frame: flags (1 byte: 1 more frames of the message follow, 2 long, 4 command), size (1 byte, or 8 if long), body

A subscription is a message of one frame: 1 and the beginning of a topic; 0 and the same ends it. Versions 3.1 and later
of the protocol are spoken as 3.0 with a side that announces 3.0.
"""

from __future__ import annotations

from tokenlake.errors import ProtocolRefused

MAX_FRAME_BYTES = 1024
"""Limit of a frame from the other side."""
MAX_FRAMES = 8
"""Limit of the frames of a message from the other side."""
MORE, LONG, COMMAND = 1, 2, 4
_GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_NULL = b"NULL".ljust(20, b"\0")


def opening(kind: str) -> bytes:
    """What this side sends first: its greeting, and the READY command of a socket of this kind (XPUB, ROUTER)."""
    greeting = (_SIGNATURE + b"\3\0" + _NULL).ljust(_GREETING_BYTES, b"\0")
    return greeting + _frame(
        b"\5READY" + _property(b"Socket-Type", kind.encode()) + _property(b"Identity", b""), COMMAND
    )


def message(frames: tuple[bytes, ...]) -> bytes:
    """The bytes of a message."""
    *first, last = frames
    return b"".join([*(_frame(each, MORE) for each in first), _frame(last, 0)])


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


class Incoming:
    """The bytes that the other side of one connection sends. Keeps at most one frame and one message that are not
    complete."""

    def __init__(self, kinds: frozenset[str]) -> None:
        """`kinds`: the kinds of sockets that may be on the other side."""
        self._kinds = kinds
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._greeted = False
        self.ready = False
        """True once the other side has sent its greeting and its READY command."""

    def take(self, data: bytes | memoryview) -> tuple[list[tuple[bytes, ...]], bytes]:
        """The messages that `data` completes, and the bytes to answer at once. `SUBSCRIBE` and `CANCEL` commands are
        returned as the messages that mean the same. Raises `ProtocolRefused`, after which the connection is of no
        use."""
        self._buffer += data
        messages: list[tuple[bytes, ...]] = []
        answer = b""
        if not self._greeted and not self._greeting():
            return messages, answer
        at = 0
        while (found := self._split(at)) is not None:
            flags, body, at = found
            if flags & COMMAND or not self.ready:
                answer += self._command(flags, body, messages)
                continue
            self._frames.append(body)
            if len(self._frames) > MAX_FRAMES:
                raise ProtocolRefused(f"a message of more than {MAX_FRAMES} frames")
            if not flags & MORE:
                messages.append(tuple(self._frames))
                self._frames.clear()
        del self._buffer[:at]
        return messages, answer

    def _greeting(self) -> bool:
        head = self._buffer
        # What no greeting begins with is refused before all of it has come.
        if (head and head[0] != 0xFF) or (len(head) > 9 and not head[9] & 1) or (len(head) > 10 and head[10] < 3):
            raise ProtocolRefused("it does not speak ZMTP 3")
        if len(head) < _GREETING_BYTES:
            return False
        if bytes(head[12:32]) != _NULL:
            raise ProtocolRefused("it asks for a security mechanism, and this stream has none")
        del head[:_GREETING_BYTES]
        self._greeted = True
        return True

    def _split(self, at: int) -> tuple[int, bytes, int] | None:
        """(flags, body, where the next one begins) of the frame at `at`; None where it is not complete."""
        buffer = self._buffer
        if at >= len(buffer):
            return None
        flags = buffer[at]
        if flags & ~(MORE | LONG | COMMAND) or (flags & MORE and flags & COMMAND):
            raise ProtocolRefused(f"a frame with the flags {flags}")
        size_bytes = 8 if flags & LONG else 1
        start = at + 1 + size_bytes
        if start > len(buffer):
            return None
        size = int.from_bytes(buffer[at + 1 : start], "big")
        if size > MAX_FRAME_BYTES:
            raise ProtocolRefused(f"a frame of {size} bytes, more than {MAX_FRAME_BYTES}")
        if start + size > len(buffer):
            return None
        return flags, bytes(buffer[start : start + size]), start + size

    def _command(self, flags: int, body: bytes, messages: list[tuple[bytes, ...]]) -> bytes:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if not self.ready:
            if not flags & COMMAND or name != b"READY":
                raise ProtocolRefused("no READY command")
            kind = _properties(rest).get(b"socket-type", b"").decode(errors="replace")
            if kind not in self._kinds:
                raise ProtocolRefused(f"a socket of the kind {kind[:16]!r}, not {', '.join(sorted(self._kinds))}")
            self.ready = True
        elif name == b"PING":
            return _frame(b"\4PONG" + rest[2:18], COMMAND)
        elif name in (b"SUBSCRIBE", b"CANCEL"):
            messages.append(((b"\1" if name == b"SUBSCRIBE" else b"\0") + rest,))
        return b""


def _properties(encoded: bytes) -> dict[bytes, bytes]:
    """The properties of a READY command, by their names in small letters."""
    found, at = {}, 0
    while at < len(encoded):
        name_end = at + 1 + encoded[at]
        value = name_end + 4
        end = value + int.from_bytes(encoded[name_end:value], "big")
        if value > len(encoded) or end > len(encoded):
            raise ProtocolRefused("a READY command that is cut off")
        found[encoded[at + 1 : name_end].lower()] = encoded[value:end]
        at = end
    return found
