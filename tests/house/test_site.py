"""The site of the documentation: it builds without a warning, and has each page that programs name to their users."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.house.test_links import ROOT, anchors

DOCS = ROOT / "docs"
PYTHON = ROOT / ".venv-site" / "bin" / "python"
NAMED = re.compile(r"\bdocs/([\w/-]+)\.md(?:#([\w-]+))?")


def named_pages() -> set[tuple[str, str]]:
    """The pages and headings that alert rules name."""
    return set(NAMED.findall((ROOT / "deploy" / "prometheus" / "rules.yml").read_text()))


def test_every_page_is_in_the_navigation() -> None:
    """The navigation of the site has the links of these pages, so that GitHub's readers find all pages too."""
    parents = [DOCS / "index.md", DOCS / "operations.md", *DOCS.glob("*/README.md")]
    linked = {
        (parent.parent / target).resolve()
        for parent in parents
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", parent.read_text())
    }
    pages = {page for page in DOCS.rglob("*.md") if page.name != "index.md"}
    assert pages <= linked, sorted(str(page.relative_to(DOCS)) for page in pages - linked)


@pytest.mark.rest
@pytest.mark.skipif(not PYTHON.exists(), reason="the site's generator is not installed: make install-site")
def test_the_site_builds_and_has_the_named_pages(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [PYTHON, "-m", "sphinx", "-c", DOCS / "site", "-d", tmp_path / "read", "-q", "-W", "--keep-going"]
    done = subprocess.run([*map(str, command), str(DOCS), str(site)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in DOCS.rglob("*.md"):
        built = (site / page.relative_to(DOCS)).with_suffix(".html").read_text()
        missing = {name for name in anchors(page) if f'id="{name}"' not in built}
        assert not missing, f"{page}: {missing}"
    for name, anchor in named_pages():
        built = (site / f"{name}.html").read_text()
        assert not anchor or f'id="{anchor}"' in built, (name, anchor)
    assert "tokenlake.Pool.match" in (site / "site" / "api.html").read_text()
    assert "quarantin" in (site / "searchindex.js").read_text()
