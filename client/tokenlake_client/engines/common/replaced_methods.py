"""Methods of an engine that are replaced for the whole process, because the engine has no hook in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_REPLACED = "_tokenlake_hook"


def replace(owner: Any, name: str, hook: Callable[..., Any], mark: str) -> None:
    """Replace the method `name` of the class `owner` by `hook(self, original, *args, **kwargs)`, unless that was done
    before. `mark` names the hook. Raises `AttributeError` where the class lacks the method."""
    original = getattr(owner, name)
    if getattr(original, _REPLACED, None) == mark:
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(self, functools.partial(original, self), *args, **kwargs)

    setattr(method, _REPLACED, mark)
    setattr(owner, name, method)
