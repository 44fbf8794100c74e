"""Merging in torch equals merging in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tokenlake.attention import Partial, merge

torch = pytest.importorskip("torch")
torch_merge = pytest.importorskip("tokenlake.attention.torch_merge")

SHAPE = (4, 2, 3, 5)
"""[part, head, row, dim]"""


def parts_of(spread: float) -> Partial:
    draw = np.random.default_rng(3)
    lse = draw.standard_normal(SHAPE[:-1]).astype(np.float32) * np.float32(spread)
    return Partial(draw.standard_normal(SHAPE).astype(np.float32), lse)


@pytest.mark.parametrize("spread", [1.0, 1e-3, 50.0, 1e4, 1e38])
def test_torch_merges_equal_numpy(spread: float) -> None:
    parts = parts_of(spread)
    expected = merge([Partial(out, lse) for out, lse in zip(*parts, strict=True)])
    out, lse = (torch.from_numpy(array) for array in parts)
    running = torch_merge.RunningMerge(out[0].clone(), lse[0].clone())
    for number in range(1, len(out)):
        running.add(out[number], lse[number])
    for got in (torch_merge.merge_stacked(out, lse), (running.out, running.lse)):
        np.testing.assert_allclose(got[0].numpy(), expected.out, rtol=0, atol=1e-5 + 1e-6 * min(spread, 1e4))
        np.testing.assert_allclose(got[1].numpy(), expected.lse, rtol=1e-6, atol=1e-6)


def test_a_single_part_is_returned_itself() -> None:
    out, lse = (torch.from_numpy(array[:1]) for array in parts_of(1.0))
    merged = torch_merge.merge_stacked(out, lse)
    assert torch.equal(merged[0], out[0])
    assert torch.equal(merged[1], lse[0])


def test_adding_a_part_does_not_change_it() -> None:
    out, lse = (torch.from_numpy(array) for array in parts_of(1.0))
    before = out[1].clone(), lse[1].clone()
    torch_merge.RunningMerge(out[0].clone(), lse[0].clone()).add(out[1], lse[1])
    assert torch.equal(out[1], before[0])
    assert torch.equal(lse[1], before[1])
