"""Records of the ledger: nothing but a whole record of a segment is read as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenlake.disk.places import NOTE_BYTES
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.layout import MAX_SHARDS
from tokenlake.memory import ledger
from tokenlake.memory.ledger import Record

seconds = st.floats(0.0, 1e9, width=32)
records = st.builds(
    Record,
    st.integers(1, ledger.MAX_GENERATION),
    st.binary(min_size=32, max_size=32).map(SegmentKey),
    st.booleans(),
    st.integers(0, (1 << 32) - 1),
    st.binary(min_size=NOTE_BYTES, max_size=NOTE_BYTES),
    seconds,
    seconds,
    st.integers(1, ledger.MANY_SHARDS).flatmap(lambda shards: st.binary(min_size=8 * shards, max_size=8 * shards)),
)


@given(records, st.integers(0, 3))
def test_a_record_is_read_as_it_was_written(record: Record, slot_bytes: int) -> None:
    packed = ledger.pack(record)
    assert len(packed) == ledger.RECORD_BYTES + len(record.checksums)
    assert ledger.unpack(packed) == record
    assert ledger.unpack(packed + bytes(100)) == record, "the place in the ledger is longer"


@given(records, st.data())
def test_a_record_that_is_not_whole_is_none(record: Record, data: st.DataObject) -> None:
    packed = ledger.pack(record)
    at = data.draw(st.integers(0, len(packed) - 1))
    damaged = packed[:at] + bytes([packed[at] ^ (1 << data.draw(st.integers(0, 7)))]) + packed[at + 1 :]
    assert ledger.unpack(damaged) is None
    assert ledger.unpack(packed[:at]) is None
    assert ledger.unpack(packed[:at] + bytes(len(packed) - at)) in (None, record)


def test_a_cleared_place_has_no_record() -> None:
    assert ledger.unpack(b"") is None
    assert ledger.unpack(bytes(ledger.stride(1 << 20))) is None


def test_the_ledger_takes_little_of_large_slots() -> None:
    for slot_bytes in (1, ledger.LARGE_SLOT_BYTES - 1, ledger.LARGE_SLOT_BYTES, 1 << 30):
        assert ledger.stride(slot_bytes) == ledger.RECORD_BYTES + 8 * ledger.max_shards(slot_bytes)
    assert ledger.max_shards(ledger.LARGE_SLOT_BYTES) == MAX_SHARDS
    assert ledger.stride(ledger.LARGE_SLOT_BYTES) <= 0.005 * ledger.LARGE_SLOT_BYTES


def test_every_node_has_a_digest() -> None:
    assert ledger.name_digest(None) == 0
    assert ledger.name_digest(NodeId("a")) not in (0, ledger.name_digest(NodeId("b")))
