"""The event log: what happened to a node, and what its rules said to do.

A file of length-prefixed MessagePack records. The first is the `CoreConfig`, the second the time of
`NodeCore.start`, then one per event: [time, event, digest of the instructions]. It holds segment keys, but no
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
from tokenlake.errors import ProtocolRefused
from tokenlake.wire.frames import HEADER_BYTES

__all__ = ["Recorder", "Replayed", "replay"]

_encoder = msgspec.msgpack.Encoder()


class _Record(msgspec.Struct, frozen=True, array_like=True):
    at: float
    event: Event
    digest: bytes


_decoder = msgspec.msgpack.Decoder(_Record)


def digest(instructions: Sequence[Instruction]) -> bytes:
    """8 bytes that change when an instruction, a field or their order does."""
    return hashlib.blake2b(_encoder.encode(list(instructions)), digest_size=8).digest()


class Recorder:
    """Appends to `path`. Buffered; the tail of a killed daemon's log may be missing."""

    def __init__(self, path: Path, config: CoreConfig, started: float) -> None:
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._write(_encoder.encode(config))
        self._write(_encoder.encode(started))

    def add(self, at: float, event: Event, instructions: Sequence[Instruction]) -> None:
        """One event and what it led to."""
        self._write(_encoder.encode(_Record(at, event, digest(instructions))))

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
    """Empty, or the first event after which the instructions were others."""


def replay(path: Path) -> Replayed:
    """Feed a log through a fresh `NodeCore`. Raises `ProtocolRefused` when the file is no event log."""
    records = _records(path)
    try:
        core = NodeCore(msgspec.msgpack.decode(next(records), type=CoreConfig))
        core.start(msgspec.msgpack.decode(next(records), type=float))
    except (StopIteration, msgspec.MsgspecError) as error:
        raise ProtocolRefused(f"{path} is not an event log of tokenlake: {error}") from error
    events = total = 0
    for body in records:
        record = _decoder.decode(body)
        try:
            instructions = core.handle(record.event, record.at)
        except Exception:
            # The live daemon refused it as well, and recorded that nothing came of it.
            instructions = []
        events += 1
        total += len(instructions)
        if digest(instructions) != record.digest:
            return Replayed(events, total, f"event {events} at {record.at:.6f}: {record.event} -> {instructions}")
    return Replayed(events, total)


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(header := file.read(HEADER_BYTES)) == HEADER_BYTES:
            body = file.read(int.from_bytes(header, "little"))
            if len(body) < int.from_bytes(header, "little"):
                return
            yield body
