"""The parts of the documentation that benchmarks generate are up to date."""

import pytest

from tests.bench.pages import PARTS
from tests.house.pages import ROOT, Part, renewed


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_generated_parts_are_up_to_date(part: Part) -> None:
    """If this fails, run `python -m tests.bench.pages`."""
    page = (ROOT / part.page).read_text()
    assert renewed(part, page) == page
