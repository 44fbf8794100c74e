"""The site of the documentation: it builds without a warning, and has each page that programs name to their users."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.house.test_links import ROOT, anchors
from tokenlake.documentation import page
from tokenlake_operator.doctor.pages import PAGES, SYMPTOMS, page_of

DOCS = ROOT / "docs"
OF_OTHERS = ("docs/components/router/router-concepts.md", "docs/design_overview.md", "docs/router/router.md")
"""Pages of other projects, which docstrings cite."""
PYTHON = ROOT / ".venv-site" / "bin" / "python"
PACKAGES = ("tokenlake", "server", "client", "query", "bench")
PATH = re.compile(r"\bdocs/([\w/-]+)\.md(?:#([\w-]+))?")
CALL = re.compile(r"""\bpage\(['"]([\w/-]+)(?:#([\w-]+))?['"]\)""")


def named_pages() -> set[tuple[str, str]]:
    """The pages and headings that alert rules, the chart, messages, findings and docstrings name."""
    modules = [module.read_text() for package in PACKAGES for module in (ROOT / package).rglob("*.py")]
    deployed = [each.read_text() for kind in ("yml", "yaml", "tpl") for each in (ROOT / "deploy").rglob(f"*.{kind}")]
    found = {each for text in (*deployed, *modules) for each in PATH.findall(text)}
    found |= {each for text in modules if "tokenlake.documentation import" in text for each in CALL.findall(text)}
    found |= {(name, heading) for name, _, heading in (each.partition("#") for each in (*PAGES.values(), SYMPTOMS))}
    return {each for each in found if f"docs/{each[0]}.md" not in OF_OTHERS}


def test_programs_name_pages_that_exist() -> None:
    named = named_pages()
    assert len(named) > 30
    for name, heading in named:
        path = DOCS / f"{name}.md"
        assert path.exists(), name
        assert not heading or heading in anchors(path), (name, heading)


def test_a_finding_names_the_page_of_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    assert page_of("peer-certificate-ca") == "docs/operations/certificates.md#refused-connections"
    assert page_of("peer-name-twice") == "docs/operations/runbook.md#peers-are-not-connected"
    assert page_of("path-slow") == "docs/operations/symptoms.md"
    monkeypatch.setattr("tokenlake.documentation.SITE", "https://example.org/")
    assert page("operations/disk#files") == "https://example.org/operations/disk.html#files"


def test_every_page_is_in_the_navigation() -> None:
    """The navigation of the site has the links of these pages, so that GitHub's readers find all pages too."""
    parents = [DOCS / "index.md", DOCS / "deploy.md", DOCS / "operations.md", *DOCS.glob("*/README.md")]
    linked = {
        (parent.parent / target).resolve()
        for parent in parents
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", parent.read_text())
    }
    pages = {each for each in DOCS.rglob("*.md") if each.name != "index.md"}
    assert pages <= linked, sorted(str(each.relative_to(DOCS)) for each in pages - linked)


@pytest.mark.rest
@pytest.mark.skipif(not PYTHON.exists(), reason="the site's generator is not installed: make install-site")
def test_the_site_builds_and_has_the_named_pages(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [PYTHON, "-m", "sphinx", "-c", DOCS / "site", "-d", tmp_path / "read", "-q", "-W", "--keep-going"]
    done = subprocess.run([*map(str, command), str(DOCS), str(site)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for each in DOCS.rglob("*.md"):
        built = (site / each.relative_to(DOCS)).with_suffix(".html").read_text()
        missing = {name for name in anchors(each) if f'id="{name}"' not in built}
        assert not missing, f"{each}: {missing}"
    for name, anchor in named_pages():
        built = (site / f"{name}.html").read_text()
        assert not anchor or f'id="{anchor}"' in built, (name, anchor)
    assert "tokenlake.Pool.match" in (site / "site" / "api.html").read_text()
    assert "quarantin" in (site / "searchindex.js").read_text()
