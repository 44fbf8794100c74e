"""The pool for LMCache: `TokenLakeL2`, an L2 adapter that `lmcache server --l2-adapter` loads as a plug-in.

Importing this package imports neither LMCache nor torch; naming the adapter does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenlake_client.engines.lmcache.adapter import TokenLakeL2

__all__ = ["TokenLakeL2"]


def __getattr__(name: str) -> object:
    if name == "TokenLakeL2":
        from tokenlake_client.engines.lmcache.adapter import TokenLakeL2

        return TokenLakeL2
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
