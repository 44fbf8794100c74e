"""The salt of a prompt whose engine and request may both have one."""

from __future__ import annotations

import hashlib

from tokenlake.keys import Salt


def joined_salt(ours: str | None, theirs: str | None) -> Salt:
    """The salt made of the engine's (`ours`) and the request's (`theirs`). Different pairs give different salts, and a
    request with a salt never gets the salt of an engine alone. Engines and routers must make the same salt of a pair:
    the keys of all segments depend on it."""
    return ours if theirs is None else (ours, theirs)


def account_of(salt: str | None) -> str:
    """The name of a request's salt in its hints (`Hints.account`), from which the salt cannot be read; empty without
    one."""
    if not salt:
        return ""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8, person=b"tokenlake salt").hexdigest()
