"""Lines of the log: one for each record, although texts in it may come from another process.

A record begins with its time; the lines of a traceback are indented. So a text with an end of line, for instance the
name of a field that an engine sent, cannot be taken for a record. In the form `json` each record is one object on one
line, its traceback included, and no character outside ASCII is written.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

MAX_LINE = 4000
"""Limit of the characters of a line."""
MAX_TRACEBACK = 16_000
"""Limit of the characters of a traceback in an object."""
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
"""Names of the attributes of every record; all others were given with `extra`."""
MAX_LINES, PERIOD_S = 100, 60.0
"""At most so many lines of one kind in so many seconds."""


def one_line(text: str) -> str:
    """`text` with an escape sequence in place of each unprintable character, cut off at `MAX_LINE` characters."""
    if len(text) > MAX_LINE:
        text = f"{text[:MAX_LINE]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def rfc3339(seconds: float) -> str:
    """The time in RFC 3339, in this machine's time zone."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


class _Lines(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return rfc3339(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(f"    {one_line(line)}" for line in super().formatException(ei).splitlines())


class _Objects(logging.Formatter):
    """Objects with `time`, `level`, `logger`, `node` (where it is known), `message`, and where there are such `fields`
    (what a record was given with `extra`) and `exception` (a traceback)."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if self._node:
            told["node"] = self._node
        told["message"] = _cut(record.getMessage(), MAX_LINE)
        if fields := {name: value for name, value in vars(record).items() if name not in _OWN}:
            told["fields"] = {name: _plain(value) for name, value in fields.items()}
        if record.exc_info:
            told["exception"] = _cut(self.formatException(record.exc_info), MAX_TRACEBACK)
        return json.dumps(told)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float) else _cut(str(value), MAX_LINE)


class LinesPerKind(logging.Filter):
    """Limits the lines that requests cause, so that they leave room for the others in a log that is bounded. A record
    names its kind with `extra={"kind": ...}`, of which there is a fixed number. A record without a kind, such as one of
    a change of state, always passes."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, tuple[float, int]] = {}
        """For each kind: the time at which its period began, and the records since then."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = getattr(record, "kind", "")
        if not kind:
            return True
        began, count = self._kinds.get(kind, (0.0, 0))
        if not began <= record.created < began + PERIOD_S:
            if count > MAX_LINES:
                record.msg = f"{record.getMessage()} ({count - MAX_LINES} earlier lines of this kind were left out)"
                record.args = None
            began, count = record.created, 0
        self._kinds[kind] = began, count + 1
        return count < MAX_LINES


def set_up_log(line: str) -> None:
    """Write the log of this process, from level INFO on, to stderr. `line`: the format of a record as text."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(line))
    handler.addFilter(LinesPerKind())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def log_objects(node: str) -> Callable[[Any], None]:
    """Let the log of this process, which is set up, be in the form `json` from now on, errors that no code handles
    included. Returns the function for `threading.excepthook`."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Objects(node))
    logging.captureWarnings(True)
    log = logging.getLogger(__name__)

    def unhandled(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.critical("the process ends by an error", exc_info=(kind, error, trace))

    def in_thread(told: Any) -> None:
        name = told.thread.name if told.thread is not None else "?"
        log.error("the thread %s ended by an error", name, exc_info=told.exc_value)

    sys.excepthook = unhandled
    return in_thread
