"""Configuration files of daemons: two tenants, and secrets that others may not read."""

from __future__ import annotations

import os
from pathlib import Path

RED, BLUE = "red-token-0123456789", "blue-token-0123456789"
"""The tokens of engines of the two tenants."""
OF_THIS_USER = f"uids = [{os.getuid()}]"
"""A line for a tenant: engines of this user are of it."""


def private(path: Path, text: str) -> str:
    """Write a file that its user alone may read, and return its path."""
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def tenants(directory: Path, first: str = "", *, red: str = "", blue: str = "", allowed: int = os.getuid()) -> str:
    """Write a configuration file with the tenants red and blue and a cluster secret, and return its path. `first`:
    lines before the tables; `red`, `blue`: further lines of these; `allowed`: the uid whose engines may connect."""
    return private(directory / "tokenlake.toml", tenants_text(first, red=red, blue=blue, allowed=allowed))


def tenants_text(first: str = "", *, red: str = "", blue: str = "", allowed: int = os.getuid()) -> str:
    """The text of that file."""
    text = f'allow_uids = [{allowed}]\ncluster_secret = "{"cc" * 32}"\n{first}\n'
    for name, secret, token, more in (("red", "aa", RED, red), ("blue", "bb", BLUE, blue)):
        text += f'[[tenants]]\nname = "{name}"\nsecret = "{secret * 32}"\ntokens = ["{token}"]\n{more}\n'
    return text
