"""The event log: what happened to a node, and what its rules said to do.

A file of length-prefixed MessagePack records. The first is the `CoreConfig`, the second the time of
`NodeCore.start`, then one per event: [time, event, digest]. Each digest covers the one before it, the time, the
event and the instructions, so that a log in which anything was changed is found; one that ends in the middle of a
record was cut off there. It holds segment keys, but no
token ids, secrets or bytes of segments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from tokenlake.core import CoreConfig, NodeCore
from tokenlake.core.events import Event
from tokenlake.core.instructions import Instruction
from tokenlake.core.node import HandlerFailed
from tokenlake.errors import ProtocolRefused
from tokenlake.wire.frames import HEADER_BYTES

__all__ = ["Recorder", "Replayed", "replay"]

_encoder = msgspec.msgpack.Encoder()


class _Record(msgspec.Struct, frozen=True, array_like=True):
    at: float
    event: Event
    digest: bytes


_decoder = msgspec.msgpack.Decoder(_Record)


def digest(previous: bytes, at: float, event: Event, instructions: Sequence[Instruction]) -> bytes:
    """8 bytes that change when anything before them did."""
    body = _encoder.encode([previous, at, event, list(instructions)])
    return hashlib.blake2b(body, digest_size=8).digest()


class Recorder:
    """Appends to `path`. Buffered; the tail of a killed daemon's log may be missing."""

    def __init__(self, path: Path, config: CoreConfig, started: float) -> None:
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._digest = _first_digest(config, started)
        self._write(_encoder.encode(config))
        self._write(_encoder.encode(started))

    def add(self, at: float, event: Event, instructions: Sequence[Instruction]) -> None:
        """One event and what it led to."""
        self._digest = digest(self._digest, at, event, instructions)
        self._write(_encoder.encode(_Record(at, event, self._digest)))

    def _write(self, body: bytes) -> None:
        self._file.write(len(body).to_bytes(HEADER_BYTES, "little") + body)

    def close(self) -> None:
        """Write what is buffered."""
        self._file.close()


class Replayed(msgspec.Struct, frozen=True):
    """What a replay found."""

    events: int
    instructions: int
    difference: str = ""
    """Empty, or the first event that is not as it was, or after which the instructions were others."""
    cut_off: int = 0
    """Bytes at the end that are no whole record: the daemon was killed, or a length was changed."""


def replay(path: Path) -> Replayed:
    """Feed a log through a fresh `NodeCore`. Raises `ProtocolRefused` when the file is no event log."""
    records = _records(path)
    try:
        first, second = next(records), next(records)
        config = msgspec.msgpack.decode(first, type=CoreConfig)
        started = msgspec.msgpack.decode(second, type=float)
        core = NodeCore(config)
        core.start(started)
    except (StopIteration, msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise ProtocolRefused(f"{path} is not an event log of tokenlake: {error}") from error
    expected = _first_digest(config, started)
    events = total = 0
    whole = 2 * HEADER_BYTES + len(first) + len(second)
    for body in records:
        events += 1
        whole += HEADER_BYTES + len(body)
        try:
            record = _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return Replayed(events, total, f"event {events}: it cannot be read: {error}")
        try:
            instructions = core.handle(record.event, record.at)
        except HandlerFailed as failure:
            instructions = failure.instructions
        except Exception:
            # The live daemon refused it as well, and recorded that nothing came of it.
            instructions = []
        total += len(instructions)
        expected = digest(expected, record.at, record.event, instructions)
        if expected != record.digest:
            return Replayed(events, total, f"event {events} at {record.at:.6f}: {record.event} -> {instructions}")
    return Replayed(events, total, cut_off=path.stat().st_size - whole)


def _first_digest(config: CoreConfig, started: float) -> bytes:
    return hashlib.blake2b(_encoder.encode([config, started]), digest_size=8).digest()


def _records(path: Path) -> Iterator[bytes]:
    """The bodies of whole records."""
    left = path.stat().st_size
    with path.open("rb") as file:
        while len(header := file.read(HEADER_BYTES)) == HEADER_BYTES:
            size = int.from_bytes(header, "little")
            left -= HEADER_BYTES + size
            # Before it is read: memory for what a damaged length says would be taken first.
            if left < 0:
                return
            yield file.read(size)
