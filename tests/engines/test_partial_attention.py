"""Attention of a transformers engine over its own tokens, against the reference in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tokenlake import attention
from tokenlake_client.engines.transformers import partial_attention
from tokenlake_client.engines.transformers.partial_attention import Part, attend, attend_own, merge, merge_rows

SCALE = 0.3
SHAPES = {"multi-head": (4, 4, 16), "grouped-query": (6, 2, 16), "multi-query": (4, 1, 16), "other values": (4, 2, 24)}
"""Heads, KV heads, value dimension; keys have 16."""
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}

LARGE = 1e-4
"""The tolerance where the logarithms are up to 100."""


def draw(shape: str, tokens: int, cached: int, dtype: Any = torch.float32, rows: int = 3) -> tuple[Any, Any, Any]:
    heads, kv_heads, value_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(tokens * 1000 + cached)
    sizes = ((heads, tokens, 16), (kv_heads, cached, 16), (kv_heads, cached, value_dim))
    query, keys, values = (torch.randn((rows, *size), generator=generator).to(dtype) for size in sizes)
    return query, keys, values


def expected(query: Any, keys: Any, values: Any, seen: Any) -> Part:
    """Each query of each row by itself, over the tokens that `seen` [rows, tokens, cached] marks."""
    out, lse = torch.empty((*query.shape[:3], values.shape[3])), torch.empty(query.shape[:3])
    for row, token in np.ndindex(query.shape[0], query.shape[2]):
        marks = seen[row, token]
        arrays = (query[row, :, token : token + 1], keys[row][:, marks], values[row][:, marks])
        one, some_keys, some_values = (array.float().numpy() for array in arrays)
        part = attention.attend(one, some_keys, some_values, SCALE)
        out[row, :, token], lse[row, :, token] = torch.from_numpy(part.out[:, 0]), torch.from_numpy(part.lse[:, 0])
    return Part(out, lse)


def near(got: Part, wanted: Part, tolerance: float = 2e-6) -> None:
    assert got.out.dtype == got.lse.dtype == torch.float32
    assert float((got.out - wanted.out).abs().max()) <= tolerance
    assert float((got.lse - wanted.lse).abs().max()) <= tolerance


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "cached"), [(1, 1), (1, 37), (5, 37)])
def test_over_all_tokens(shape: str, tokens: int, cached: int, dtype: Any) -> None:
    query, keys, values = draw(shape, tokens, cached, dtype)
    seen = torch.ones((3, tokens, cached), dtype=torch.bool)
    near(attend(query, keys, values, SCALE), expected(query, keys, values, seen), TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "cached"), [(1, 9), (7, 7), (7, 20)])
def test_causal_behind_what_is_cached(shape: str, tokens: int, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_attention, "MAX_LOGITS", 3 * 6 * 40)
    query, keys, values = draw(shape, tokens, cached)
    seen = torch.ones((tokens, cached), dtype=torch.bool).tril(cached - tokens).expand(3, -1, -1)
    near(attend_own(query, keys, values, SCALE), expected(query, keys, values, seen))
    # The same step, with a mask that hides the first tokens of two rows.
    first = torch.tensor([0, min(1, cached - tokens), cached - tokens])[:, None, None]
    masked = seen & (torch.arange(cached) >= first)
    near(attend_own(query, keys, values, SCALE, masked[:, None]), expected(query, keys, values, masked))


def test_inputs_of_any_strides_are_not_changed() -> None:
    tensors = draw("grouped-query", 4, 11)
    strided = [tensor.transpose(1, 3).contiguous().transpose(1, 3) for tensor in tensors]
    copies = [tensor.clone() for tensor in strided]
    near(attend_own(strided[0], strided[1], strided[2], SCALE), attend_own(*tensors, scale=SCALE))
    assert all(torch.equal(one, other) for one, other in zip(strided, copies, strict=True))


def copied(part: Part) -> Part:
    return Part(part.out.clone(), part.lse.clone())


def test_parts_in_either_order_merge_to_the_whole() -> None:
    query, keys, values = draw("grouped-query", 3, 40)
    # The keys of the parts differ much, so that in some rows one part outweighs the other by far.
    keys[:, :, :10] *= 20
    whole = attend(query, keys, values, SCALE)
    for cut in (1, 10, 39):
        one, other = (
            attend(query, keys[:, :, part], values[:, :, part], SCALE) for part in (slice(cut), slice(cut, 40))
        )
        near(merge(copied(one), other), whole, LARGE)
        near(merge(copied(other), one), whole, LARGE)
        got = merge_rows(copied(one), [0, 2], Part(other.out[[0, 2]], other.lse[[0, 2]]))
        near(Part(got.out[[0, 2]], got.lse[[0, 2]]), Part(whole.out[[0, 2]], whole.lse[[0, 2]]), LARGE)
        assert torch.equal(got.out[1], one.out[1])
