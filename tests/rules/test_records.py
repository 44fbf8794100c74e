"""Records: whole streams arrive, and a record that was changed, repeated, moved or cut is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenlake.errors import ProtocolRefused
from tokenlake.wire.fields import RECORD_KEY_BYTES
from tokenlake.wire.records import OVERHEAD_BYTES, RECORD_BYTES, RecordReader, RecordWriter

KEY = bytes(range(RECORD_KEY_BYTES))


def source(stream: bytes) -> Callable[[memoryview], None]:
    """A connection that ends after `stream`."""
    at = 0

    def receive(view: memoryview) -> None:
        nonlocal at
        part = stream[at : at + len(view)]
        if len(part) < len(view):
            raise EOFError
        view[:] = part
        at += len(view)

    return receive


def sealed(pieces: Iterable[bytes], key: bytes = KEY) -> list[bytes]:
    writer = RecordWriter(key)
    return [bytes(record) for piece in pieces for record in writer.sealed([piece])]


def opened(stream: bytes, nbytes: int, key: bytes = KEY) -> bytes:
    target = memoryview(bytearray(nbytes))
    RecordReader(key).into(target, source(stream), bytearray())
    return bytes(target)


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 400)))
def test_reads_of_any_size_see_the_bytes_that_were_written(pieces: list[bytes], reads: list[int]) -> None:
    plain = b"".join(pieces)
    reader, receive = RecordReader(KEY), source(b"".join(sealed(pieces)))
    buffer = bytearray()
    found = b""
    for size in [*reads, len(plain)]:
        target = memoryview(bytearray(min(size, len(plain) - len(found))))
        reader.into(target, receive, buffer)
        found += bytes(target)
    assert found == plain


def test_long_bytes_take_several_records() -> None:
    plain = os.urandom(2 * RECORD_BYTES + 5)
    records = sealed([plain])
    assert [len(record) - OVERHEAD_BYTES for record in records] == [RECORD_BYTES, RECORD_BYTES, 5]
    assert opened(b"".join(records), len(plain)) == plain


@given(st.lists(st.sampled_from([0, 1, 100, (64 << 10) - 1, 64 << 10, RECORD_BYTES, RECORD_BYTES + 1]), max_size=20))
@settings(max_examples=20, deadline=None)
def test_buffers_of_any_size_are_joined_in_order(sizes: list[int]) -> None:
    buffers = [bytes([at]) * size for at, size in enumerate(sizes)]
    records = list(map(bytes, RecordWriter(KEY).sealed(buffers)))
    assert opened(b"".join(records), sum(sizes)) == b"".join(buffers)
    assert all(OVERHEAD_BYTES < len(record) <= RECORD_BYTES + OVERHEAD_BYTES for record in records)


def test_short_buffers_share_a_record() -> None:
    assert len(RecordWriter(KEY).sealed([b"frame", *[bytes(100)] * 50])) == 1


def test_a_record_in_place() -> None:
    room = memoryview(bytearray(100))
    record = RecordWriter(KEY).seal(b"hello", room)
    assert len(record) == 5 + OVERHEAD_BYTES
    assert opened(bytes(record), 5) == b"hello"
    assert bytes(room[len(record) :]) == bytes(100 - len(record))


def test_no_bit_may_change() -> None:
    [record] = sealed([b"some bytes"])
    for bit in range(8 * len(record)):
        changed = bytearray(record)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((ProtocolRefused, EOFError)):
            # Behind the record there are bytes enough for a longer one.
            opened(bytes(changed) + bytes(300), 10)


@pytest.mark.parametrize("order", [[0, 0], [1], [1, 0], [0, 2], [0, 2, 1]], ids=str)
def test_records_come_once_and_in_order(order: list[int]) -> None:
    records = sealed([b"one..", b"two..", b"three"])
    with pytest.raises(ProtocolRefused, match="changed, repeated or moved"):
        opened(b"".join(records[at] for at in order), 5 * len(order))


def test_the_key_of_the_other_direction_opens_nothing() -> None:
    with pytest.raises(ProtocolRefused):
        opened(b"".join(sealed([b"hello"])), 5, key=bytes(RECORD_KEY_BYTES))


@pytest.mark.parametrize("size", [0, RECORD_BYTES + 1, (1 << 32) - 1])
def test_a_length_out_of_bounds_takes_no_memory(size: int) -> None:
    """A length out of bounds is refused before memory is taken."""
    buffer = bytearray()
    with pytest.raises(ProtocolRefused, match=f"a record of {size} bytes"):
        RecordReader(KEY).into(memoryview(bytearray(8)), source(size.to_bytes(4, "little")), buffer)
    assert not buffer


def test_a_cut_record_is_no_record() -> None:
    [record] = sealed([b"hello"])
    with pytest.raises(EOFError):
        opened(record[:-1], 5)
