"""The addresses of the pages of the documentation that messages name to users."""

from __future__ import annotations

from typing import Final

SITE: Final = ""
"""The address of the published site, with a / at its end. Empty: it is not published, and messages name the files of
the repository."""


def page(name: str) -> str:
    """The address of a page. `name`: its path below `docs/` without the suffix, and where needed its heading, such as
    `operations/disk#failures-of-a-device`."""
    path, mark, heading = name.partition("#")
    return f"{SITE}{path}.html{mark}{heading}" if SITE else f"docs/{path}.md{mark}{heading}"
