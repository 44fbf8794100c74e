"""The salt of a prompt whose engine and request both have one."""

from __future__ import annotations

__all__ = ["joined_salt"]


def joined_salt(ours: str | None, theirs: str | None) -> str | None:
    """One salt made of the engine's (`ours`) and the request's (`theirs`). Different pairs give different salts.
    Engines and routers must make the same salt of a pair: the keys of all segments depend on it."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return f"{len(ours)}:{ours}{theirs}"
