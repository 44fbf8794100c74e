"""The pool for SGLang: `TokenLakeStorage`, a storage backend of HiCache, which
`--hicache-storage-backend-extra-config` names.

Importing this package imports neither SGLang nor torch; naming the backend does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenlake_client.engines.sglang.storage import TokenLakeStorage

__all__ = ["TokenLakeStorage"]


def __getattr__(name: str) -> object:
    if name == "TokenLakeStorage":
        from tokenlake_client.engines.sglang.storage import TokenLakeStorage

        return TokenLakeStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
