"""The shards of each rank, and the merged reports of several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.errors import LayoutRefused
from tokenlake.layout import MAX_SHARDS, Layout
from tokenlake_client.engines.vllm.known.ranks import rank_shards
from tokenlake_client.engines.vllm.known.step_plan import StepReport
from tokenlake_client.engines.vllm.load_worker import LoadTime


def layout(heads: int) -> Layout:
    return Layout(
        model_id="m",
        weights_digest="d",
        dtype="float32",
        layers=1,
        kv_heads=heads,
        key_dim=8,
        value_dim=8,
        position="p",
    )


SIZES = {
    1: (1, 8, 64),
    2: (1, 2, 4, 64),
    4: (1, 4, 16, 64),
    8: (1, 2, 4, 8, 16, 32, 64),
    10: (1, 2, 5, 10, 20, 40),
    16: (1, 8, 16, 32, 64),
    32: (1, 2, 4, 8, 16, 32, 64),
    40: (1, 5, 8, 10, 20, 40),
    64: (1, 2, 4, 8, 16, 32, 64),
    96: (1, 8, 16, 32),
    128: (1, 8, 64),
}
"""Tensor-parallel sizes, by number of KV heads: 1 of multi-query models, 8 of Llama 3 and Qwen 2.5, 10 of Phi 4, 32, 40
and 64 of models with multi-head attention."""


@pytest.mark.parametrize(("heads", "size"), [(heads, size) for heads, sizes in SIZES.items() for size in sizes])
def test_each_shard_is_written_once(heads: int, size: int) -> None:
    shape = layout(heads)
    ranks = [rank_shards(shape, rank, size) for rank in range(size)]
    written = [shard for rank in ranks if rank.writes for shard in range(rank.first, rank.stop)]
    assert written == list(range(shape.shards))
    assert {rank.writers for rank in ranks} == {sum(rank.writes for rank in ranks)}
    assert sum(rank.mask for rank in ranks if rank.writes) == (1 << shape.shards) - 1
    held = sum((rank.stop - rank.first) * shape.heads_per_shard for rank in ranks)
    assert held == max(heads, size)


@given(heads=st.integers(1, MAX_SHARDS), factor=st.integers(1, MAX_SHARDS), replicated=st.booleans())
def test_every_size_of_vllm_has_whole_shards(heads: int, factor: int, replicated: bool) -> None:
    """Of up to 64 heads: the sizes that divide their number, and its multiples."""
    size = heads * factor if replicated else max(each for each in range(1, factor + 1) if heads % each == 0)
    shape = layout(heads)
    ranks = [rank_shards(shape, rank, size) for rank in range(size)]
    assert [rank.first for rank in ranks] == [rank * heads // size for rank in range(size)]
    assert sum(rank.mask for rank in ranks if rank.writes) == (1 << heads) - 1


def test_16_ranks_of_8_heads() -> None:
    """Pairs of ranks hold one head, which the first of each pair stores and both load."""
    ranks = [rank_shards(layout(8), rank, 16) for rank in range(16)]
    assert [rank.first for rank in ranks] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert [rank.writes for rank in ranks] == [True, False] * 8
    assert {rank.writers for rank in ranks} == {8}


@pytest.mark.parametrize(("heads", "size"), [(8, 3), (6, 4), (96, 12), (128, 128)])
def test_partial_shards_are_refused(heads: int, size: int) -> None:
    with pytest.raises(LayoutRefused, match=f"tensor parallel size {size}"):
        rank_shards(layout(heads), 0, size)


def test_merged_reports_have_the_longer_times() -> None:
    first = StepReport(7, computed={2: 1.0, 3: 4.0}, loaded={"a": LoadTime(1, 1), "b": LoadTime(5, 0)})
    second = StepReport(5, computed={3: 2.0, 4: 1.0}, loaded={"b": LoadTime(1, 2), "c": LoadTime(0, 1)})
    both = StepReport(
        5,
        computed={2: 1.0, 3: 4.0, 4: 1.0},
        loaded={"a": LoadTime(1, 1), "b": LoadTime(5, 0), "c": LoadTime(0, 1)},
    )
    assert first.merged(second) == both
    assert second.merged(first) == both
