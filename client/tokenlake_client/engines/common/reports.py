"""The reports of failures of the pool, which do not reach the engine: each failure is counted, and each distinct
message is logged once."""

from __future__ import annotations

import logging
from typing import Any

from tokenlake_client.engines.common.counters import Counters

__all__ = ["Reports"]

MAX_MESSAGES = 64
"""The number of distinct messages that are logged. Later messages are only counted."""


class Reports:
    """Counts and logs the pool's failures for one engine. Several threads may use this object."""

    def __init__(self, logger: logging.Logger, counters: Counters[Any], prefix: str = "") -> None:
        """`counters` has a field `failures`. Each message in the log begins with `prefix`."""
        self._prefix = prefix
        self._logger = logger
        self._counters = counters
        self._logged: set[str] = set()

    def failure(self, operation: str, error: BaseException) -> None:
        """Count and log that `operation` failed; the engine goes on without its result."""
        self._counters.add(failures=1)
        self.warn(f"{operation} failed; continuing without it: {type(error).__name__}: {error}", error)

    def warn(self, message: str, error: BaseException | None = None) -> None:
        """Log `message` unless it was logged before; the traceback of `error` goes to the debug log."""
        if message not in self._logged and len(self._logged) < MAX_MESSAGES:
            self._logged.add(message)
            self._logger.warning("%s%s", self._prefix, message)
            if error is not None:
                self._logger.debug("traceback:", exc_info=error)
