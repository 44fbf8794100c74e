"""Links between documents lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that headings of a page have in links."""
    headings = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(prose(page)))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        if ":" in path:
            continue
        to = page.parent / path if path else page
        assert to.exists(), f"{target} does not exist"
        if anchor and to.suffix == ".md":
            assert anchor in anchors(to), f"{target}: there is no such heading"
