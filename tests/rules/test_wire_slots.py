"""Packed keys and slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.identity import SegmentKey
from tokenlake.wire.slots import NO_SLOT_BYTES, SLOT_BYTES, SlotRef, join_keys, split_keys, unpack_slots

indices = st.integers(0, (1 << 32) - 1)


@given(st.lists(st.builds(SlotRef, indices, indices, st.integers(0, (1 << 64) - 1)), max_size=5))
def test_slots_survive_packing(slots: list[SlotRef]) -> None:
    packed = b"".join(slot.pack() for slot in slots)
    assert len(packed) == len(slots) * SLOT_BYTES
    assert unpack_slots(packed) == slots


def test_a_slot_is_little_endian_and_zeros_stand_for_none() -> None:
    assert SlotRef(1, 2, 3).pack().hex() == "01000000020000000300000000000000"
    assert unpack_slots(NO_SLOT_BYTES) == [SlotRef(0, 0, 0)]


@given(st.lists(st.binary(min_size=32, max_size=32).map(SegmentKey), max_size=5))
def test_keys_survive_packing(keys: list[SegmentKey]) -> None:
    assert split_keys(join_keys(keys)) == keys


@pytest.mark.parametrize("length", [1, 15, 17, 31, 33])
def test_packed_keys_and_slots_of_a_wrong_length_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"keys take {length} bytes"):
        split_keys(bytes(length))
    with pytest.raises(ValueError, match=f"slots take {length} bytes"):
        unpack_slots(bytes(length))
