"""Locations: labels of domains, and the levels between two nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.location import MAX_LABELS, NOWHERE, Location, levels, parse_location, shown_location

locations = st.lists(st.sampled_from(["a", "b"]), max_size=MAX_LABELS).map(tuple)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("row-2/rack-7/nvlink-1", "row-2/rack-7/nvlink-1", 0),
        ("row-2/rack-7/nvlink-1", "row-2/rack-7/nvlink-4", 1),
        ("row-2/rack-7/nvlink-1", "row-2/rack-9/nvlink-1", 2),
        ("row-2/rack-7", "row-2/rack-7/nvlink-1", 1),
        ("", "rack-7", 1),
        ("", "", 0),
    ],
)
def test_a_label_counts_below_those_before_it(a: str, b: str, expected: int) -> None:
    assert levels(parse_location(a), parse_location(b)) == levels(parse_location(b), parse_location(a)) == expected


@given(locations, locations, locations)
def test_levels_are_a_distance(a: Location, b: Location, c: Location) -> None:
    """The way over a third node is not shorter."""
    assert (levels(a, b) == 0) == (a == b)
    assert levels(a, b) == levels(b, a)
    assert levels(a, c) <= levels(a, b) + levels(b, c)
    assert parse_location(shown_location(a)) == a


@pytest.mark.parametrize("text", ["/", "a/", "/a", "a//b", "a b", "a/b/c/d/e", "a" * 65, "rack\n", "é"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="1 to 4 labels"):
        parse_location(text)


def test_no_text_is_no_location() -> None:
    assert parse_location("") == NOWHERE
