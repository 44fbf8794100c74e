"""The methods of vLLM that are replaced for the whole process, because vLLM has no hook in their place. Imports no
engine.

Each is replaced by a function `hook(self, original, *args)`, when the part of the connector that needs it starts. If a
version of vLLM lacks the class or the method, `apply` returns False.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from tokenlake_client.engines.common.replaced_methods import replace


class Patch(NamedTuple):
    """A method that is replaced."""

    owner: str
    """The class, as module:name."""
    method: str
    hook: str
    """The function that replaces it, as module:name below this package."""


VERSION = Patch("vllm.v1.engine.core:EngineCore", "set_weight_version", "epoch:set_weight_version")
"""Names the version of weights that a trainer sets. Where it no longer fits, each change of the weights in place begins
a random epoch: nothing is shared under the trainer's version."""
ADAPTERS = Patch("vllm.lora.worker_manager:WorkerLoRAManager", "_load_adapter", "adapters:load_adapter")
"""Tells which files of an adapter vLLM has loaded. Where it no longer fits, requests with LoRA adapters are served
without the pool, which a warning says."""


def apply(patch: Patch) -> bool:
    """Replace a method, unless that was done before. False: this vLLM lacks it."""
    try:
        owner = _named(patch.owner)
        replace(owner, patch.method, _named(f"{__package__}.{patch.hook}"), patch.hook)
    except (ImportError, AttributeError):
        return False
    return True


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
