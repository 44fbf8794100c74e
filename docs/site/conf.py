"""The settings of Sphinx for the site of the documentation (`make site`).

The pages are the Markdown files of `docs/`, as they are in the repository. Two changes are made while they are read:
a page that lists others becomes their parent in the navigation, and a link that leaves `docs/` leads to the repository.
"""

from __future__ import annotations

import importlib.metadata
import os
import posixpath
import re

from sphinx.application import Sphinx

project = "TokenLake"
author = "the TokenLake authors"
release = version = importlib.metadata.version("tokenlake")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["examples"]
suppress_warnings = ["misc.highlighting_failure"]  # names of recorded series, in PromQL
myst_heading_anchors = 4  # the anchors of headings are GitHub's
default_role = "code"  # single backticks in docstrings
highlight_language = "none"  # of blocks that name no language: they show what a terminal shows
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = "TokenLake"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False

REPOSITORY = os.environ.get("TOKENLAKE_REPOSITORY", "").rstrip("/")
"""Where the files of the repository can be read, for instance https://github.com/OWNER/tokenlake/blob/main. Empty: a
link to one of them becomes its path."""
PARENTS = {
    "deploy": "deploy/",
    "operations": "operations/",
    "results/README": "results/",
    "decisions/README": "decisions/",
}
"""The folder whose pages a page lists, by that page. `index` lists all others, in groups."""
MADE_BY_CALLS = ("Pool", "Lease", "Write", "EngineCalls", "Prefix")
"""The classes of whose objects a program calls no constructor."""
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def _contents(caption: str, entries: list[str]) -> str:
    lines = "\n".join(dict.fromkeys(entries))
    option = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{option}\n{lines}\n```\n"


def _children(page: str, text: str) -> str:
    """The navigation below a page that lists others: of `index` a group for each heading."""
    if page == "index":
        groups = re.findall(r"^## (.*)\n((?:\n|- .*\n)*)", text, re.MULTILINE)
        return "".join(
            _contents(name, [f"{title} <{target.removesuffix('.md')}>" for title, target, _ in LINK.findall(lines)])
            for name, lines in groups
        )
    here = posixpath.dirname(page)
    pages = [posixpath.normpath(posixpath.join(here, target)) for _, target, _ in LINK.findall(text)]
    inside = [each.removesuffix(".md") for each in pages if each.startswith(PARENTS[page]) and each.endswith(".md")]
    return _contents("", [f"/{each}" for each in inside if each != page])


def _outward(page: str, text: str) -> str:
    """The text with links that leave `docs/` replaced."""
    here = posixpath.join("docs", posixpath.dirname(page))

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[2]))
        if path.startswith("docs/") and not path.startswith("docs/examples/"):
            return link[0]
        if REPOSITORY:
            return f"[{link[1]}]({REPOSITORY}/{path}{link[3] or ''})"
        return f"`{path}`" if link[1].strip("`") in path else f"{link[1]} (`{path}`)"

    prose, code = FENCE.split(text), FENCE.findall(text)
    parts = [LINK.sub(replaced, part) for part in prose]
    return "".join(part + block for part, block in zip(parts, [*code, ""], strict=True))


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    text = _outward(page, source[0])
    source[0] = text + (_children(page, source[0]) if page == "index" or page in PARENTS else "")


def _signature(app: Sphinx, what: str, name: str, *rest: object) -> tuple[str, None] | None:
    """No arguments for classes that the client alone makes."""
    return ("", None) if what == "class" and name.rpartition(".")[2] in MADE_BY_CALLS else None


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)
    app.connect("autodoc-process-signature", _signature)
