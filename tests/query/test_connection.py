"""Sends never block, and a reader reassembles frames and raw bytes."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.robustness.live import LIMIT_S, wait_until
from tokenlake.wire import pack_frame
from tokenlake.wire import query as wire
from tokenlake.wire.fields import RecordKeys
from tokenlake.wire.frames import decode
from tokenlake.wire.query import MAX_FRAME
from tokenlake.wire.records import RecordWriter
from tokenlake_query import connection as module
from tokenlake_query.connection import Connection, FrameReader
from tokenlake_query.tenant_limits import TenantLimits

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=[socket.AF_UNIX, socket.AF_INET])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == socket.AF_UNIX:
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def ended(connection: Connection) -> threading.Event:
    """Start reading; the event is set when the connection has ended."""
    event = threading.Event()
    connection.serve(lambda body: None, event.set)
    return event


@pytest.mark.parametrize("seed", range(5))
def test_frames_and_payloads_in_pieces_of_any_size(pair: Pair, seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 100, 65_000, 70_000, 300_000]) for _ in range(30)]
    payloads = [draw.randbytes(size) for size in sizes]
    stream = b"".join(
        pack_frame(wire.Refused(number, "x" * draw.choice([1, 1000, 80_000]), "")) + payload
        for number, payload in enumerate(payloads)
    )

    def send() -> None:
        start = 0
        while start < len(stream):
            size = draw.choice([1, 3, 1000, 65_536, 200_000])
            pair[0].sendall(stream[start : start + size])
            start += size

    sender = threading.Thread(target=send)
    sender.start()
    reader = FrameReader(pair[1])
    for number, payload in enumerate(payloads):
        message = decode(wire.query_reply_decoder, reader.frame())
        assert isinstance(message, wire.Refused)
        assert message.view == number
        if number % 5 == 4:
            reader.skip(len(payload))
            continue
        target = bytearray(len(payload))
        reader.into(memoryview(target))
        assert target == payload
    sender.join()
    pair[0].close()
    with pytest.raises(EOFError):
        reader.frame()


def test_sends_never_block_and_arrive_in_order(pair: Pair) -> None:
    """Far more bytes than a socket buffers, in many buffers, while the other side reads nothing yet."""
    connection = Connection(pair[0].dup(), "test")
    end = ended(connection)
    payloads = [random.Random(number).randbytes(3_000) for number in range(5_000)]
    expected = b""
    for start in range(0, len(payloads), 1_000):
        message = wire.Result(start, 0, b"", 3_000_000)
        chunk = payloads[start : start + 1_000]
        sent = connection.send(message, [memoryview(payload) for payload in chunk])
        expected += pack_frame(message) + b"".join(chunk)
        assert sent == len(pack_frame(message)) + 3_000_000
    received = bytearray(len(expected))
    FrameReader(pair[1]).into(memoryview(received))
    assert received == expected
    connection.wait_unsent(0)
    connection.close()
    assert end.wait(10)


def test_a_stalled_reader_is_disconnected(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALLED_S", 1)
    connection = Connection(pair[0].dup(), "test")
    end = ended(connection)
    connection.send(wire.CloseView((1,)), [memoryview(bytes(64 << 20))])
    assert end.wait(30)
    assert not connection.open
    connection.send(wire.CloseView((2,)))


def test_too_many_unsent_bytes_disconnect(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 32 << 20)
    connection = Connection(pair[0].dup(), "test")
    end = ended(connection)
    payload = memoryview(bytes(16 << 20))
    for _ in range(4):
        connection.send(wire.CloseView((1,)), [payload])
    assert end.wait(30)


def test_the_socket_is_closed_once(pair: Pair) -> None:
    """The descriptor is closed once, by the reading thread."""
    connection = Connection(pair[0].dup(), "test")
    before = len(os.listdir("/proc/self/fd"))
    end = ended(connection)
    pair[1].shutdown(socket.SHUT_RDWR)
    assert end.wait(10)
    connection.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == before - 1, "the socket is closed")
    assert not [thread for thread in threading.enumerate() if thread.name == "read test" and _lives(thread)]


def _lives(thread: threading.Thread) -> bool:
    thread.join(10)
    return thread.is_alive()


def test_an_incomplete_frame_ends_the_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is silent between frames stays open."""
    monkeypatch.setattr(module, "STALLED_S", 1)
    kept = list[int]()
    silent = Connection(pair[0].dup(), "silent", keep=kept.append)
    assert not ended(silent).wait(1.5)
    pair[1].sendall(MAX_FRAME.to_bytes(4, "little") + bytes(1 << 20))
    wait_until(lambda: not silent.open, "the connection is closed")
    wait_until(lambda: sum(kept) == 0, "no bytes are counted any more")
    assert max(itertools.accumulate(kept)) >= 1 << 19


def test_bytes_of_incomplete_frames_are_limited(pair: Pair) -> None:
    limits = TenantLimits(1 << 10)
    connection = Connection(pair[0].dup(), "test", keep=lambda nbytes: limits.add("red", frame_bytes=nbytes))
    end = ended(connection)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pair[1].sendall(MAX_FRAME.to_bytes(4, "little") + bytes(1 << 20))
    assert end.wait(10)
    limits.add("red", frame_bytes=64 << 10)


KEYS = RecordKeys(b"k" * 16, b"l" * 16)


def test_records_carry_frames_and_payloads(pair: Pair) -> None:
    sender = Connection(pair[0].dup(), "test", keys=KEYS)
    end = ended(sender)
    reader = FrameReader(pair[1], key=KEYS.sending)
    payloads = [random.Random(size).randbytes(size) for size in (0, 1, 100, 65_000, 70_000, 300_000, 3_000_000)]
    for number, payload in enumerate(payloads):
        result = wire.Result(number, 0, b"", len(payload))
        halves = [memoryview(payload)[: len(payload) // 2], memoryview(payload)[len(payload) // 2 :]]
        assert sender.send(result, halves) == len(pack_frame(result)) + len(payload)
    for number, payload in enumerate(payloads):
        assert decode(wire.ask_reply_decoder, reader.frame()) == wire.Result(number, 0, b"", len(payload))
        target = bytearray(len(payload))
        reader.into(memoryview(target))
        assert target == payload
    sender.close()
    assert end.wait(LIMIT_S)


def test_a_repeated_record_closes_the_connection(pair: Pair) -> None:
    frames: list[bytes] = []
    end = threading.Event()
    Connection(pair[0].dup(), "test", keys=KEYS).serve(frames.append, end.set)
    [record] = RecordWriter(KEYS.receiving).sealed([pack_frame(wire.Refused(0, "x", ""))])
    pair[1].sendall(bytes(record) * 2)
    assert end.wait(LIMIT_S)
    assert len(frames) == 1
