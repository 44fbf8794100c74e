"""The version of TokenLake, which pyproject.toml states, in the other files that need it:
`python -m tests.house.version [NEW]` writes it there, after it has changed the version to NEW where that is given."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

PLACES = (
    ("pyproject.toml", r'(?m)^version = "(.*)"$'),
    ("bench/pyproject.toml", r'(?m)^version = "(.*)"$'),
    ("bench/pyproject.toml", r'"tokenlake\[server,scheduler\]==(.*)"'),
    ("deploy/chart/tokenlake/Chart.yaml", r"(?m)^version: (.*)$"),
    ("deploy/chart/tokenlake/Chart.yaml", r'(?m)^appVersion: "(.*)"$'),
    ("CITATION.cff", r"(?m)^version: (.*)$"),
    ("docs/deploy/image.md", r"tokenlake:(\d[\w.]*)"),
)
"""(file, pattern whose group is the version)."""


def stated() -> str:
    """The version in pyproject.toml."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return version


def written() -> list[tuple[str, str]]:
    """(file, version) of each place, in order. Every place has at least one."""
    found = []
    for name, pattern in PLACES:
        versions = re.findall(pattern, (ROOT / name).read_text())
        if not versions:
            raise ValueError(f"{name} states no version as {pattern}")
        found += [(name, version) for version in versions]
    return found


def write(version: str) -> None:
    """Change the version in all places."""
    for name, pattern in PLACES:
        path = ROOT / name
        path.write_text(re.sub(pattern, lambda found: found[0].replace(found[1], version), path.read_text()))


if __name__ == "__main__":
    write(sys.argv[1] if len(sys.argv) > 1 else stated())
    print("then `python -m tests.deploy.generated`, and CHANGELOG.md")
