"""The pool for vLLM: `TokenLakeConnector`, named in `--kv-transfer-config`.

Importing this package imports neither vLLM nor torch; naming the connector does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenlake_client.engines.vllm.front import TokenLakeConnector

__all__ = ["TokenLakeConnector"]


def __getattr__(name: str) -> object:
    if name == "TokenLakeConnector":
        from tokenlake_client.engines.vllm.front import TokenLakeConnector

        return TokenLakeConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
