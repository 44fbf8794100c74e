"""Partial attention: any split in any order merges to full attention, for every element type and arrangement of
heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.profiles import examples
from tokenlake.attention import Partial, as_float32, attend, empty_partial, from_float32, merge

DTYPES = ["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Case:
    """Inputs in `dtype`'s precision, as float32."""

    query: NDArray[np.float32]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    scale: float

    def part(self, tokens: slice | list[int]) -> Partial:
        return attend(self.query, self.keys[:, tokens], self.values[:, tokens], self.scale)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cases of multi-head, grouped-query and multi-query attention. The values have their own dimension, or are the
    first columns of the keys."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    q_len, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    key_dim, value_dim = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # With factors at both ends of the range, logits differ by up to 1e36.
    spread = draw(st.sampled_from([1.0, 1e-3, 30.0] + ([1e18] if dtype != "float16" else [100.0])))

    def numbers(*shape: int, factor: float = 1.0) -> NDArray[np.float32]:
        values = (rng.standard_normal(shape) * factor).astype(np.float32)
        return as_float32(from_float32(values, dtype), dtype)

    keys = numbers(kv_heads, tokens, key_dim, factor=spread)
    latent = draw(st.booleans()) and value_dim <= key_dim
    values = keys[..., :value_dim] if latent else numbers(kv_heads, tokens, value_dim)
    query = numbers(kv_heads * group, q_len, key_dim, factor=spread)
    return Case(query, keys, values, key_dim**-0.5)


@st.composite
def parted(draw: st.DrawFn) -> tuple[Case, list[list[int]]]:
    """Tokens dealt to parts at random: any split in any order; some parts have no token."""
    case = draw(cases())
    parts = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, parts - 1), min_size=case.keys.shape[1], max_size=case.keys.shape[1]))
    return case, [[token for token, owner in enumerate(owners) if owner == part] for part in range(parts)]


def plain(case: Case) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention by its definition, one query at a time, in Python's floats."""
    group = len(case.query) // len(case.keys)
    out = np.empty((*case.query.shape[:2], case.values.shape[-1]))
    lse = np.empty(case.query.shape[:2])
    for head, queries in enumerate(case.query):
        keys, values = case.keys[head // group].astype(float), case.values[head // group].astype(float)
        for row, query in enumerate(queries.astype(float)):
            logits = [case.scale * math.fsum(query * key) for key in keys]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            lse[head, row] = max(logits) + math.log(math.fsum(weights))
            for column in range(out.shape[-1]):
                out[head, row, column] = math.fsum(np.array(weights) * values[:, column]) / math.fsum(weights)
    return out, lse


@settings(deadline=None)
@given(cases())
def test_reference_equals_the_definition(case: Case) -> None:
    part = case.part(slice(None))
    out, lse = plain(case)
    assert part.out.dtype == part.lse.dtype == np.float32
    # Logits of 1e36 may differ by less than float64 resolves; results are compared only for smaller ones.
    if np.abs(lse).max() < 1e6:
        np.testing.assert_allclose(part.out, out, rtol=1e-5, atol=1e-5 * np.abs(case.values).max())
    np.testing.assert_allclose(part.lse, lse, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=examples(300))
@given(parted())
def test_merged_parts_equal_the_whole(parted: tuple[Case, list[list[int]]]) -> None:
    case, parts = parted
    whole = case.part(slice(None))
    merged = merge([case.part(part) for part in parts])
    assert merged.out.dtype == merged.lse.dtype == np.float32
    assert np.isfinite(merged.out).all()
    assert np.isfinite(merged.lse).all()
    np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-6, atol=1e-6)
    # A log-sum-exp of 1e4 is rounded to 1e-3, and so are the weights of the parts. Where it is far greater, one token
    # has all the weight, and rounding decides between two tokens with nearly equal logits.
    rounding = 4 * float(np.abs(whole.lse).max()) * 2.0**-24
    if rounding < 0.1:
        worst = float(np.abs(case.values).max()) * (1e-5 + 2 * rounding)
        np.testing.assert_allclose(merged.out, whole.out, rtol=0, atol=worst)


@settings(deadline=None)
@given(parted(), st.randoms(use_true_random=False))
def test_order_of_merging_does_not_matter(parted: tuple[Case, list[list[int]]], random: st.DataObject) -> None:
    """Parts are merged two at a time in random order, as the results of peers arrive."""
    case, parts = parted
    left = [case.part(part) for part in parts]
    together = merge(left)
    while len(left) > 1:
        random.shuffle(left)  # type: ignore[attr-defined]
        left = [merge(left[:2]), *left[2:]]
    rounding = 4 * len(parts) * float(np.abs(together.lse).max()) * 2.0**-24
    np.testing.assert_allclose(left[0].lse, together.lse, rtol=1e-6, atol=1e-6)
    if rounding < 0.1:
        worst = float(np.abs(case.values).max()) * (1e-5 + 2 * rounding)
        np.testing.assert_allclose(left[0].out, together.out, rtol=0, atol=worst)


def test_empty_parts_merge_to_an_empty_part() -> None:
    nothing = empty_partial(4, 2, 3)
    merged = merge([nothing, nothing])
    np.testing.assert_array_equal(merged.out, np.zeros((4, 2, 3), np.float32))
    np.testing.assert_array_equal(merged.lse, np.full((4, 2), -np.inf, np.float32))


def test_one_query_is_empty_in_all_parts() -> None:
    first, second = empty_partial(1, 2, 3), empty_partial(1, 2, 3)
    first.lse[0, 1], first.out[0, 1] = 5.0, 7.0
    merged = merge([first, second])
    assert merged.lse.tolist() == [[-np.inf, 5.0]]
    assert merged.out.tolist() == [[[0.0] * 3, [7.0] * 3]]


def test_merging_no_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one part"):
        merge([])


def test_merging_does_not_change_the_parts() -> None:
    rng = np.random.default_rng(1)
    parts = [Partial(rng.random((2, 3, 4), np.float32), rng.random((2, 3), np.float32)) for _ in range(3)]
    before = [(part.out.copy(), part.lse.copy()) for part in parts]
    merged = merge(parts)
    merged.out[:], merged.lse[:] = 0, 0
    for part, (out, lse) in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part.out, out)
        np.testing.assert_array_equal(part.lse, lse)


@pytest.mark.parametrize("lses", [(3e38, -3e38), (-3e38, -3e38), (3e38, 3e38), (1e4, 1e4 + 1), (-200.0, -1e5)])
def test_extreme_log_sum_exps(lses: tuple[float, float]) -> None:
    parts = [Partial(np.full((1, 1), value, np.float32), np.array([lse], np.float32)) for value, lse in enumerate(lses)]
    exact = [np.longdouble(part.lse[0]) for part in parts]
    weights = [np.exp(lse - max(exact)) for lse in exact]
    merged = merge(parts)
    assert merged.out[0, 0] == pytest.approx(float(weights[1] / sum(weights)), rel=1e-6)
    assert merged.lse[0] == pytest.approx(float(max(exact) + np.log(sum(weights))), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@given(number=st.floats(width=32))
def test_rounding_is_that_of_ieee_754(dtype: str, number: float) -> None:
    stored = from_float32(np.array([number], np.float32), dtype)
    back = as_float32(stored, dtype)[0]
    if math.isnan(number):
        assert np.isnan(back)
        return
    bits, least, greatest = {
        "float32": (24, -126, 3.5e38),
        "bfloat16": (8, -126, 3.395e38),
        "float16": (11, -14, 65519),
    }[dtype]
    if abs(number) > greatest:
        assert abs(back) == math.inf
    elif number:
        exponent = max(math.floor(math.log2(abs(number))), least)
        step = 2.0 ** (exponent - bits + 1)
        # Python's round() takes ties to even too.
        assert back == round(number / step) * step
    # Rounding does not change a value that has the precision of `dtype` already.
    np.testing.assert_array_equal(as_float32(from_float32(np.array([back], np.float32), dtype), dtype), [back])
