"""Weights that change in place. Imports no engine, until `watch` is called.

SGLang does not tell a storage backend of it, so methods of SGLang's scheduler are replaced for the whole process::

    the update begins       nothing is looked up, loaded or stored; leases end
    SGLang's caches are empty   pages are stored and found again, under a random version of the weights

Between these two SGLang's memory may hold pages of the old weights. SGLang empties its caches as a part of the update,
unless the update says otherwise; then the pool is used again after `/flush_cache`. A random version is shared with no
other engine, nor with another rank."""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tokenlake.errors import Unreachable
from tokenlake_client.engines.common.replaced_methods import replace
from tokenlake_client.weights import digest_of_version, random_version

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager"
UPDATES = (
    "begin_weight_update",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)
CONTROLLER = "sglang.srt.managers.cache_controller", "HiCacheController"


class Weights:
    """The version of the weights of one engine process. Thread-safe."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called when the weights are about to change, and again when the caches are empty after that: no
        lease on pages of the old weights may outlive the change."""
        self._changed = changed
        self._lock = threading.Lock()
        self._base: str | None = None
        self._version: str | None = None
        self._usable = True

    def starts_as(self, digest: str) -> None:
        """Record the digest of the weights that the engine has loaded."""
        self._base = digest

    def digest(self) -> str | None:
        """The weights digest for the keys; None: that of the layout. Raises `Unreachable` while SGLang's memory may
        hold pages of other weights."""
        with self._lock:
            if not self._usable:
                raise Unreachable("the weights have changed, and SGLang's caches were not emptied since")
            return None if self._version is None else digest_of_version(self._base or "", self._version)

    def change(self) -> None:
        """Record that the weights are about to change."""
        with self._lock:
            self._usable = False
        self._changed()

    def emptied(self) -> None:
        """Record that SGLang's caches are empty, and that no call of it is under way."""
        with self._lock:
            usable = self._usable
        if usable:
            return
        # 1. A lookup had made its keys.  2. `change` released the leases.  3. The lookup kept a lease on old pages.
        # SGLang's names of pages are the same with all weights.
        self._changed()
        with self._lock:
            self._usable = True
            self._version = random_version()


_watching: weakref.WeakSet[Weights] = weakref.WeakSet()


def watch(weights: Weights) -> bool:
    """Call `change` and `emptied` of `weights` from now on. False: this SGLang has other methods, so that a change of
    the weights would not be noticed."""
    try:
        updater, controller = (getattr(importlib.import_module(path), name) for path, name in (UPDATER, CONTROLLER))
        for name in UPDATES:
            replace(updater, name, functools.partial(_before_update, name), name)
        replace(controller, "reset", _after_reset, "reset")
    except (ImportError, AttributeError):
        return False
    _watching.add(weights)
    return True


def _before_update(name: str, updater: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # The end of a session changes weights only where none was loaded in it: they were written from outside then.
    session = getattr(updater, "_session", None)
    if name != "end_weight_update" or not getattr(session, "loaded_weights", False):
        for weights in list(_watching):
            weights.change()
    return original(*args, **kwargs)


def _after_reset(controller: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    for weights in list(_watching):
        weights.emptied()
    return result
