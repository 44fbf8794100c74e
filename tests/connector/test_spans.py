from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenlake_client.engines.vllm.spans import loadable_until, wanted_segments

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda shape: (shape[0] * shape[1] * 4, shape[1] * 4))


@given(SHAPES, st.integers(1, 300), st.integers(0, 40))
def test_a_load_has_whole_blocks_that_the_pool_has_and_leaves_a_token(
    shape: tuple[int, int], total: int, hits: int
) -> None:
    segment, block = shape
    until = loadable_until(hits, total, segment, block)
    assert until % block == 0
    assert until <= min(hits * segment, total - 1)
    # One block more would not be there, or leave nothing to compute.
    assert until + block > min(hits * segment, total - 1)


@given(SHAPES, st.integers(1, 300))
def test_no_segment_is_asked_for_that_no_load_could_use(shape: tuple[int, int], total: int) -> None:
    segment, block = shape
    wanted = wanted_segments(total, segment, block)
    assert wanted <= total // segment
    best = loadable_until(total // segment, total, segment, block)
    assert loadable_until(wanted, total, segment, block) == best
    assert not wanted or loadable_until(wanted - 1, total, segment, block) < best
