"""Places: labels of domains, and the levels between two nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.place import MAX_LABELS, NOWHERE, Place, levels, parse_place, shown_place

places = st.lists(st.sampled_from(["a", "b"]), max_size=MAX_LABELS).map(tuple)


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
    assert levels(parse_place(a), parse_place(b)) == levels(parse_place(b), parse_place(a)) == expected


@given(places, places, places)
def test_levels_are_a_distance(a: Place, b: Place, c: Place) -> None:
    """The way over a third node is not shorter."""
    assert (levels(a, b) == 0) == (a == b)
    assert levels(a, b) == levels(b, a)
    assert levels(a, c) <= levels(a, b) + levels(b, c)
    assert parse_place(shown_place(a)) == a


@pytest.mark.parametrize("text", ["/", "a/", "/a", "a//b", "a b", "a/b/c/d/e", "a" * 65, "rack\n", "é"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="1 to 4 labels"):
        parse_place(text)


def test_no_text_is_no_place() -> None:
    assert parse_place("") == NOWHERE
