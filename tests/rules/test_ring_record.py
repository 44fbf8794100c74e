"""Ring record: changes count up, the unit stays, equal rings have equal digests."""

from __future__ import annotations

import msgspec
import pytest

from tokenlake.directory.ring_record import MAX_EPOCH, Member, RingRecord

GIB = 1 << 30


def test_each_change_counts_and_no_change_does_not() -> None:
    record = RingRecord.of({"b": 64 * GIB, "a": 64 * GIB})
    assert (record.epoch, list(record.members)) == (0, ["a", "b"])
    joined = record.with_member("c", 16 * GIB)
    assert (joined.epoch, joined.unit) == (1, record.unit)
    assert joined.with_member("c", 16 * GIB) is joined
    draining = joined.draining("a")
    assert (draining.epoch, list(draining.weights())) == (2, ["b", "c"])
    assert draining.with_member("a", 64 * GIB).weights() == joined.weights()
    assert draining.without("a").weights() == draining.weights()
    assert record.without("c") is record
    with pytest.raises(KeyError):
        record.draining("c")


def test_members_that_all_drain_keep_their_ring() -> None:
    record = RingRecord.of({"a": 1, "b": 2}).draining("a").draining("b")
    assert record.weights() == {"a": 1, "b": 2}


def test_the_digest_depends_on_members_and_weights() -> None:
    base = {"a": 1, "b": 2}
    # The last but one has a name that looks like a part of the encoded list of members.
    others = [{"a": 1}, {"a": 1, "c": 2}, {"a": 2, "b": 1}, {"a": 1, "b": 3}, {"a=1|b": 2}, {"a": 1, "b": 2, "E": 1}]
    digests = [RingRecord.of(weights).digest() for weights in (base, *others)]
    assert len(set(digests)) == len(digests)
    assert all(0 < digest < 1 << 63 for digest in digests)
    assert RingRecord.of(dict(reversed(base.items()))).digest() == digests[0]


@pytest.mark.parametrize(
    ("epoch", "unit", "weight"), [(-1, 1.0, 1), (MAX_EPOCH, 1.0, 1), (0, 0.0, 1), (0, float("nan"), 1), (0, 1.0, 0)]
)
def test_a_record_out_of_range_is_refused(epoch: int, unit: float, weight: int) -> None:
    with pytest.raises(ValueError, match="a ring record needs"):
        RingRecord(epoch, unit, {"a": Member(weight)})


def test_a_record_survives_its_encoding() -> None:
    record = RingRecord.of({"a": 1, "b": 2}).draining("a")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=RingRecord) == record
    assert msgspec.json.decode(msgspec.json.encode(record), type=RingRecord) == record
