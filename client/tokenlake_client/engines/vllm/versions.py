"""Tells connectors the version of the weights that a trainer gives to vLLM.

vLLM keeps that version (`finish_weight_update(weight_version)`, `update_weight_version`) in the process of its
scheduler and has no hook for it, so the method that sets it is wrapped. Without that method versions are not heard of
and every change of the weights starts an epoch of its own, which is never wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["hear_versions"]

_HEARD = "_tokenlake_hears_versions"


def hear_versions(tell: Callable[[Any, str], None]) -> None:
    """From now on `tell(connector, version)` is called for each connector of an engine whose version is set. Called
    again, it does nothing."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return
    original = getattr(EngineCore, "set_weight_version", None)
    if original is None or getattr(original, _HEARD, False):
        return

    @functools.wraps(original)
    def set_weight_version(self: Any, weight_version: str) -> Any:
        result = original(self, weight_version)
        connector = getattr(getattr(self, "scheduler", None), "connector", None)
        # vLLM's MultiConnector keeps its connectors in a list.
        for one in (connector, *getattr(connector, "_connectors", ())):
            tell(one, weight_version)
        return result

    setattr(set_weight_version, _HEARD, True)
    EngineCore.set_weight_version = set_weight_version
