"""The state of a request: its hints, the tokens that can be loaded, and the segments that can be stored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.hints import Hints, Outlook
from tokenlake_client.engines.vllm.known.request import loadable_segments, loadable_until
from tokenlake_client.engines.vllm.served_request import hints_of

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda shape: (shape[0] * shape[1] * 4, shape[1] * 4))
AGENT = Hints(Outlook.GOES_ON, "agent", priority=1, ttl_s=600.0)


def test_hints_of_a_request() -> None:
    said = {"outlook": "goes_on", "category": "agent", "priority": 1, "ttl_s": 600}
    assert hints_of({"tokenlake": said, "other": 1}) == AGENT
    assert hints_of(None) is hints_of({}) is hints_of({"other": 1}) is None
    assert hints_of({"tokenlake": {}}) == Hints()


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("over", "Expected `object`, got `str`"),
        ({"outlok": "over"}, "unknown field `outlok`"),
        ({"outlook": "perhaps"}, "Invalid enum value 'perhaps' - at `\\$.outlook`"),
        ({"outlook": 2}, "outlook"),
        ({"category": "x" * 33}, "'category' has 33 characters"),
        ({"priority": 5}, "'priority' is 5"),
        ({"priority": True}, "priority"),
        ({"ttl_s": float("nan")}, "'ttl_s' is nan"),
        ({"ttl_s": "600"}, "ttl_s"),
        ({"ttl_s": 10**400}, "ttl_s"),
        ({"category": "\ud800"}, "'category'"),
    ],
)
def test_an_invalid_hint_is_named(said: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        hints_of({"tokenlake": said})


@pytest.mark.parametrize("params", ["tokenlake", ["tokenlake"], 5, True, 0.0])
def test_parameters_of_a_wrong_type_are_named(params: Any) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params must be an object"):
        hints_of(params)


def test_the_error_shows_the_beginning_of_a_long_value() -> None:
    with pytest.raises(ValueError, match="outlook") as caught:
        hints_of({"tokenlake": {"outlook": "x" * 100_000}})
    assert len(str(caught.value)) < 300


@given(SHAPES, st.integers(1, 300), st.integers(0, 40))
def test_a_load_has_whole_blocks_and_leaves_a_token(shape: tuple[int, int], total: int, hits: int) -> None:
    segment, block = shape
    until = loadable_until(hits, total, segment, block)
    assert until % block == 0
    assert until <= min(hits * segment, total - 1)
    # The next block is not in the pool, or would leave no token to compute.
    assert until + block > min(hits * segment, total - 1)


@given(SHAPES, st.integers(1, 300))
def test_only_loadable_segments_are_looked_up(shape: tuple[int, int], total: int) -> None:
    segment, block = shape
    wanted = loadable_segments(total, segment, block)
    assert wanted <= total // segment
    best = loadable_until(total // segment, total, segment, block)
    assert loadable_until(wanted, total, segment, block) == best
    assert not wanted or loadable_until(wanted - 1, total, segment, block) < best
