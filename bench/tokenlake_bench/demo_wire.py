"""Messages between the demo and its engine processes, over the pipes of standard input and output.

A frame is its length (4 bytes, little-endian) and one MessagePack struct. The engine sends one reply per request; a
`Fetching` may come before the reply to a `Run`.
"""

from __future__ import annotations

from typing import BinaryIO, Literal

import msgspec

from tokenlake.errors import Unreachable


class Load(msgspec.Struct, frozen=True, tag=True):
    """Message to a demo engine: load the model in `directory`; an empty text stands for the tiny model."""

    directory: str
    segment_tokens: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Reply of a demo engine to `Load`. `prefill_ms`: milliseconds of a prefill of `prefill_tokens` tokens without any
    cache. `problem`: the reason why the pool cannot serve the model, or ''."""

    layout: bytes
    vocabulary: int
    positions: int
    q_heads: int
    prefill_tokens: int
    prefill_ms: float
    problem: str


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Message to a demo engine: leave the present daemon, if any, and connect to the one at `socket`; fetch `window`
    segments at a time. `mode`: as in `EngineOptions`, whether prefixes are fetched or queries are shipped."""

    socket: str
    window: int
    mode: Literal["fetch", "ship"] = "fetch"


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Reply to `Attach`."""


class Run(msgspec.Struct, frozen=True, tag=True):
    """Message to a demo engine: generate `new_tokens` tokens with the pool. `cold`: then generate them once more
    without the pool, for comparison. `flip`: flip bits of the bytes read from the pool, and store nothing. `announce`:
    send `Fetching` before the first read of segments of other nodes."""

    tokens: list[int]
    new_tokens: int
    cold: bool = True
    flip: bool = False
    announce: bool = False


class Fetching(msgspec.Struct, frozen=True, tag=True):
    """Message of a demo engine: it now begins to read `remote` segments from other nodes."""

    remote: int


class Ran(msgspec.Struct, frozen=True, tag=True):
    """Reply to `Run`. `tokens`: ids of the tokens generated with the pool; `ttft_ms`: their TTFT in milliseconds.
    `cold_tokens`, `cold_ttft_ms`: the same without the pool. `shipped_tokens`: number of prompt tokens whose cache
    stayed in the pool, so that queries were sent to it; `queries_sent`: number of query tokens sent to other nodes,
    counted once for each layer and node; `query_bytes`: bytes sent and received for that. `error` is the text of the
    error that generating with the pool raised, otherwise ''."""

    tokens: list[int]
    ttft_ms: float
    hit_tokens: int
    remote_segments: int
    read_segments: int
    shipped_tokens: int
    queries_sent: int
    query_bytes: int
    cold_tokens: list[int] = []
    cold_ttft_ms: float = 0.0
    error: str = ""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Message to a demo engine: store all segments that wait to be stored, then reply with an `EngineReport`."""


class EngineReport(msgspec.Struct, frozen=True, tag=True):
    """Measurements of the engine's calls to the pool. Times are those of the monotonic clock, 0 for events that did not
    happen. `longest_s`: the longest call that a request waited for. `recovered_at`: the first successful read or store
    after the last failed call."""

    longest_s: float
    failed_calls: int
    recovered_at: float
    cut_by: dict[str, int]
    """Number of matches that did not find all keys, by the name of the first missing key's `Code`; LOST: the segment
    was found, but its read failed."""


Message = Load | Loaded | Attach | Attached | Run | Fetching | Ran | Finish | EngineReport

_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def write_message(pipe: BinaryIO, message: Message) -> None:
    """Write one message as a frame to the pipe. Raises `Unreachable` when the other process has ended."""
    body = _encoder.encode(message)
    try:
        pipe.write(len(body).to_bytes(4, "little") + body)
        pipe.flush()
    except OSError as error:
        raise Unreachable(f"the other process is gone: {error}") from error


def read_message(pipe: BinaryIO) -> Message:
    """Read one frame from the pipe and return its message. Raises `Unreachable` when the other process has ended."""
    head = pipe.read(4)
    body = pipe.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
    if not body:
        raise Unreachable("the other process is gone")
    message: Message = _decoder.decode(body)
    return message
