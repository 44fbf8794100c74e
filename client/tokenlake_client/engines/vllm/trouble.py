"""Nothing that goes wrong in the pool reaches the engine: it is logged once, counted, and done without."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from tokenlake_client.engines.vllm.counters import Counters

__all__ = ["Guarded", "Trouble", "guarded"]

logger = logging.getLogger("tokenlake.vllm")

MAX_REPORTS = 64
"""Distinct messages that are logged; later ones are counted only."""


class Trouble:
    """What has been said. Usable from several threads."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._said: set[str] = set()

    def report(self, what: str, error: BaseException) -> None:
        """`what` failed and is done without."""
        self.counters.add(failures=1)
        self.say(f"{what} failed, and is done without: {type(error).__name__}: {error}", error)

    def say(self, message: str, error: BaseException | None = None) -> None:
        """Log `message` the first time."""
        if message not in self._said and len(self._said) < MAX_REPORTS:
            self._said.add(message)
            logger.warning("%s", message)
            logger.debug("where it came from:", exc_info=error)


class Guarded(Protocol):
    """An object whose hooks are `guarded`."""

    _trouble: Trouble

    def _hook_failed(self, error: Exception) -> None:
        """After the report."""


Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(otherwise: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """For methods of a `Guarded`: a hook that never raises, and returns `otherwise()` then. Its time is counted."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                self._trouble.report(f"hook {hook.__name__}", error)
                self._hook_failed(error)
                return otherwise()
            finally:
                self._trouble.counters.add(hook_seconds=time.perf_counter() - started)

        return cast(Hook, call)

    return decorate
