"""Where slots lie in a region."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.store.region import GENERATION_BYTES, RegionShape


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 17))
def test_slots_follow_the_header_and_do_not_overlap(region_bytes: int, slot_bytes: int) -> None:
    shape = RegionShape(region_bytes, slot_bytes)
    starts = [shape.offset(slot) for slot in range(shape.slots)]
    assert all(start % 64 == 0 for start in starts)
    for start, following in itertools.pairwise([*starts, region_bytes]):
        assert start + slot_bytes <= following
    if starts:
        assert starts[0] == shape.header_bytes >= shape.slots * GENERATION_BYTES


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 17))
def test_no_further_slot_would_fit(region_bytes: int, slot_bytes: int) -> None:
    shape = RegionShape(region_bytes, slot_bytes)
    one_more = shape.slots + 1
    header = -(-one_more * GENERATION_BYTES // 4096) * 4096
    assert header + one_more * shape.stride > region_bytes


@pytest.mark.parametrize(
    ("region_bytes", "slot_bytes", "slots", "second"),
    [
        (64 << 20, 1 << 20, 63, 4096 + (1 << 20)),
        (4096 + 64, 64, 1, 4096 + 64),
        (4096 + 64, 65, 0, 128),
        (4096 + 256, 65, 2, 4096 + 128),
        (0, 1, 0, 64),
        # Tiny slots: no more than 16,384, or one per 4 KiB of a larger region.
        (64 << 20, 64, 16384, 16384 * 8 + 64),
        (1 << 30, 1, 1 << 18, (1 << 21) + 64),
        (64 << 20, 4096, 16352, 131072 + 4096),
    ],
)
def test_examples(region_bytes: int, slot_bytes: int, slots: int, second: int) -> None:
    shape = RegionShape(region_bytes, slot_bytes)
    assert (shape.slots, shape.offset(1)) == (slots, second)
