"""The shards of each rank, and the merged reports of several."""

from __future__ import annotations

import pytest

from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
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


@pytest.mark.parametrize(("heads", "size"), [(8, 1), (8, 2), (8, 8), (2, 2), (32, 4), (2, 4), (8, 16), (1, 8), (24, 8)])
def test_each_shard_is_written_once(heads: int, size: int) -> None:
    shape = layout(heads)
    ranks = [rank_shards(shape, rank, size) for rank in range(size)]
    written = [shard for rank in ranks if rank.writes for shard in range(rank.first, rank.stop)]
    assert written == list(range(shape.shards))
    assert {rank.writers for rank in ranks} == {sum(rank.writes for rank in ranks)}
    assert sum(rank.mask for rank in ranks if rank.writes) == (1 << shape.shards) - 1
    held = sum((rank.stop - rank.first) * shape.heads_per_shard for rank in ranks)
    assert held == max(heads, size)


@pytest.mark.parametrize(("heads", "size"), [(12, 6), (3, 6), (8, 3), (6, 4)])
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
