"""Where slots lie in a region."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.memory.region import GENERATION_BYTES, RegionShape, header_room


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 17))
def test_slots_follow_the_header_and_do_not_overlap(region_bytes: int, slot_bytes: int) -> None:
    shape = RegionShape(region_bytes, slot_bytes)
    starts = [shape.offset(slot) for slot in range(shape.slots)]
    assert all(start % 64 == 0 for start in starts)
    for start, following in itertools.pairwise([*starts, shape.file_bytes]):
        assert start + slot_bytes <= following
    if starts:
        assert starts[0] == shape.header_bytes >= shape.slots * GENERATION_BYTES
    assert shape.header_bytes <= header_room(region_bytes)


@given(st.integers(0, 1 << 18).map(lambda pages: pages * 4096), st.integers(1, 1 << 27))
def test_a_fitted_region_has_no_more_than_its_slots(region_bytes: int, slot_bytes: int) -> None:
    shape = RegionShape(region_bytes, slot_bytes)
    fitted = RegionShape(shape.fitted(), slot_bytes)
    assert fitted.region_bytes <= region_bytes
    # A smaller region may have fewer tiny slots.
    assert min(shape.slots, 16384) <= fitted.slots <= shape.slots
    assert fitted.region_bytes - shape.slots * shape.stride < 4096


@pytest.mark.parametrize(
    ("region_bytes", "slot_bytes", "slots", "second"),
    [
        (64 << 20, 1 << 20, 64, 4096 + (1 << 20)),
        (64 << 20, 32 << 20, 2, 4096 + (32 << 20)),
        (64, 64, 1, 4096 + 64),
        (64, 65, 0, 128),
        (256, 65, 2, 4096 + 128),
        (0, 1, 0, 64),
        # Tiny slots: no more than 16,384, or one per 4 KiB of a larger region.
        (64 << 20, 64, 16384, 16384 * 8 + 64),
        (1 << 30, 1, 1 << 18, (1 << 21) + 64),
        (64 << 20, 4096, 16384, 131072 + 4096),
    ],
)
def test_examples(region_bytes: int, slot_bytes: int, slots: int, second: int) -> None:
    shape = RegionShape(region_bytes, slot_bytes)
    assert (shape.slots, shape.offset(1)) == (slots, second)
