"""The log of stored and gone segments."""

from __future__ import annotations

from tokenlake.directory.ring_record import RingRecord
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import Kind, PoolId, Segment
from tokenlake.memory.changes import ChangeLog
from tokenlake.wire.slots import SlotRef


def segment(number: int) -> Segment:
    key = SegmentKey(number.to_bytes(32, "little"))
    return Segment(PoolId(TenantId("red"), 64), key, SlotRef(0, number, 1), Kind.PRIMARY, number, 0.0)


def test_changes_are_read_in_order_behind_a_sequence_number() -> None:
    log = ChangeLog(8)
    assert log.after(0, 10) == []
    log.add(segment(1), True)
    log.add(segment(1), False)
    log.ring(RingRecord.of({"a": 1}))
    found = log.after(0, 10)
    assert found is not None
    assert [(each.sequence, each.stored, each.ring is not None) for each in found] == [
        (1, True, False),
        (2, False, False),
        (3, False, True),
    ]
    assert [each.sequence for each in log.after(1, 1) or []] == [2]
    assert log.after(3, 10) == []


def test_a_cursor_that_the_log_does_not_reach_is_refused() -> None:
    log = ChangeLog(4)
    for number in range(1, 11):
        log.add(segment(number), True)
    assert log.newest == 10
    assert log.after(5, 10) is None
    assert [each.depth for each in log.after(6, 10) or []] == [7, 8, 9, 10]
    assert log.after(11, 10) is None
    assert log.after(-1, 10) is None
