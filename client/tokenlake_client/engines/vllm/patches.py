"""The methods of vLLM that are replaced for the whole process, because vLLM has no hook in their place. Imports no
engine.

Each is replaced by a function `hook(self, original, *args)`, when the part of the connector that needs it starts. If a
version of vLLM lacks the class or the method, none of the group is replaced, and `apply` returns False:

| group | where it no longer fits |
|---|---|
| `VERSION` | each change of the weights in place begins a random epoch: nothing is shared under the trainer's version |
| `ADAPTERS` | requests with LoRA adapters are served without the pool, which a warning says |
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """A method that is replaced."""

    owner: str
    """The class, as module:name."""
    method: str
    hook: str
    """The function that replaces it, as module:name below this package."""
    why: str


VERSION = (
    Patch(
        "vllm.v1.engine.core:EngineCore",
        "set_weight_version",
        "epoch:set_weight_version",
        "names the version of weights that a trainer sets",
    ),
)
ADAPTERS = (
    Patch(
        "vllm.lora.worker_manager:WorkerLoRAManager",
        "_load_adapter",
        "adapters:load_adapter",
        "tells which files of an adapter vLLM has loaded",
    ),
)
_REPLACED = "_tokenlake_hook"


def apply(group: tuple[Patch, ...]) -> bool:
    """Replace the methods of `group`; those that are replaced already stay. False: this vLLM lacks one of them, and
    none is replaced."""
    found = []
    for patch in group:
        try:
            owner = _named(patch.owner)
        except (ImportError, AttributeError):
            return False
        original = getattr(owner, patch.method, None)
        if original is None:
            return False
        found.append((owner, patch, original))
    for owner, patch, original in found:
        if getattr(original, _REPLACED, None) != patch.hook:
            setattr(owner, patch.method, _replaced(original, patch.hook))
    return True


def _replaced(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    hook = _named(f"{__package__}.{name}")

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(self, functools.partial(original, self), *args, **kwargs)

    setattr(method, _REPLACED, name)
    return method


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
