"""The salt of a prompt whose engine and request may both have one."""

from __future__ import annotations

from tokenlake.keys import Salt


def joined_salt(ours: str | None, theirs: str | None) -> Salt:
    """The salt made of the engine's (`ours`) and the request's (`theirs`). Different pairs give different salts, and a
    request with a salt never gets the salt of an engine alone. Engines and routers must make the same salt of a pair:
    the keys of all segments depend on it."""
    return ours if theirs is None else (ours, theirs)
