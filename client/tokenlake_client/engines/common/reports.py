"""The reports of failures of the pool, which do not reach the engine: each failure is counted, and each distinct
message is logged once."""

from __future__ import annotations

import logging
from typing import Any

from tokenlake_client.engines.common.counters import Counters

MAX_MESSAGES = 64
"""The number of distinct messages of one kind that are logged. Later messages are only counted."""


class Reports:
    """Counts and logs the pool's failures for one engine. Several threads may use this object."""

    def __init__(self, logger: logging.Logger, counters: Counters[Any], prefix: str = "") -> None:
        """`counters` has a field `failures`. Each message in the log begins with `prefix`."""
        self._prefix = prefix
        self._logger = logger
        self._counters = counters
        self._logged: dict[str, set[str]] = {}

    def failure(self, operation: str, error: BaseException) -> None:
        """Count and log that `operation` failed; the engine goes on without its result."""
        self._counters.add(failures=1)
        self.warn(f"{operation} failed; continuing without it: {type(error).__name__}: {error}", error)

    def warn(self, message: str, error: BaseException | None = None, *, kind: str = "") -> None:
        """Log `message` unless it was logged before; the traceback of `error` goes to the debug log. `kind`: a name
        for messages with values of requests, of which there may be any number: the limit applies to each kind."""
        logged = self._logged.setdefault(kind, set())
        if message not in logged and len(logged) < MAX_MESSAGES:
            logged.add(message)
            self._logger.warning("%s%s", self._prefix, message)
            if error is not None:
                self._logger.debug("traceback:", exc_info=error)
