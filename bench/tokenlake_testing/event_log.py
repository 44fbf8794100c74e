"""Records the events of a node and a digest of the instructions that its rules return, and replays them.

The file holds length-prefixed MessagePack records: the `CoreConfig`, the time of `NodeCore.start`, then one record per
event, [time, event, digest]. Each digest covers the previous digest, the time, the event and the instructions, so that
a replay detects every change of the file. A file that ends in the middle of a record was cut off there. The log holds
segment keys, and no token ids, secrets or bytes of segments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from tokenlake.core import CoreConfig, NodeCore
from tokenlake.core.events import Event
from tokenlake.core.instructions import Instruction
from tokenlake.core.node import HandlerFailed
from tokenlake.errors import ProtocolRefused
from tokenlake.wire.frames import HEADER_BYTES

Handle = Callable[[Event, float], list[Instruction]]
_encoder = msgspec.msgpack.Encoder()


class _Record(msgspec.Struct, frozen=True, array_like=True):
    at: float
    event: Event
    digest: bytes


_decoder = msgspec.msgpack.Decoder(_Record)


def digest(previous: bytes, at: float, event: Event, instructions: Sequence[Instruction]) -> bytes:
    """A digest of 8 bytes over one event, its time, its instructions and the digest of the record before."""
    body = _encoder.encode([previous, at, event, list(instructions)])
    return hashlib.blake2b(body, digest_size=8).digest()


class Recorder:
    """Writes an event log to `path`, a file for this user only. Writes are buffered: a killed process loses the last
    records."""

    def __init__(self, path: Path, config: CoreConfig, started: float) -> None:
        path.touch(0o600)
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._digest = _first_digest(config, started)
        self._write(_encoder.encode(config))
        self._write(_encoder.encode(started))

    def rules(self, handle: Handle) -> Handle:
        """Rules that do what `handle` does, and record it: the first argument of a driver's `wrap`."""

        def recorded(event: Event, now: float) -> list[Instruction]:
            instructions: list[Instruction] = []
            try:
                instructions = handle(event, now)
            except HandlerFailed as failure:
                instructions = failure.instructions
                raise
            finally:
                self.add(now, event, instructions)
            return instructions

        return recorded

    def add(self, at: float, event: Event, instructions: Sequence[Instruction]) -> None:
        """Append one event and the instructions that the rules returned for it."""
        self._digest = digest(self._digest, at, event, instructions)
        self._write(_encoder.encode(_Record(at, event, self._digest)))

    def _write(self, body: bytes) -> None:
        self._file.write(len(body).to_bytes(HEADER_BYTES, "little") + body)

    def close(self) -> None:
        """Write the buffered records to the event log and close the file."""
        self._file.close()


class Replayed(msgspec.Struct, frozen=True):
    """The result of a replay."""

    events: int
    instructions: int
    difference: str = ""
    """The text of the first event that was changed or for which the rules returned other instructions; empty if there
    is none."""
    cut_off: int = 0
    """Bytes at the end of the event log that are no whole record: the process was killed, or a length was changed."""


def replay(path: Path) -> Replayed:
    """Feed the events of an event log to a new `NodeCore` and compare the instructions that it returns. Raises
    `ProtocolRefused` when the file is not an event log."""
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
            return Replayed(events, total, f"event {events}, which cannot be decoded: {error}")
        try:
            instructions = core.handle(record.event, record.at)
        except HandlerFailed as failure:
            instructions = failure.instructions
        except Exception:
            # The recorded node refused the event too, and recorded no instructions for it.
            instructions = []
        total += len(instructions)
        expected = digest(expected, record.at, record.event, instructions)
        if expected != record.digest:
            return Replayed(events, total, f"event {events} at {record.at:.6f}: {record.event} -> {instructions}")
    return Replayed(events, total, cut_off=path.stat().st_size - whole)


def _first_digest(config: CoreConfig, started: float) -> bytes:
    return hashlib.blake2b(_encoder.encode([config, started]), digest_size=8).digest()


def _records(path: Path) -> Iterator[bytes]:
    """The bodies of all whole records of an event log."""
    left = path.stat().st_size
    with path.open("rb") as file:
        while len(header := file.read(HEADER_BYTES)) == HEADER_BYTES:
            size = int.from_bytes(header, "little")
            left -= HEADER_BYTES + size
            # The length of a record is checked before the record is read: the read would allocate as much memory as a
            # damaged length states.
            if left < 0:
                return
            yield file.read(size)
