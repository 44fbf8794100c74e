"""Lines of the log: one for each record, although texts in it may come from another process.

A record begins with its time; the lines of a traceback are indented. So a text with an end of line, for instance the
name of a field that an engine sent, cannot be taken for a record.
"""

from __future__ import annotations

import logging
from typing import Any

MAX_LINE = 4000
"""Limit of the characters of a line."""
MAX_LINES, PERIOD_S = 100, 60.0
"""At most so many lines of one kind in so many seconds."""


def one_line(text: str) -> str:
    """`text` with an escape sequence in place of each unprintable character, cut off at `MAX_LINE` characters."""
    if len(text) > MAX_LINE:
        text = f"{text[:MAX_LINE]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class _Lines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(f"    {one_line(line)}" for line in super().formatException(ei).splitlines())


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


def set_up_log(form: str) -> None:
    """Write the log of this process, from level INFO on, to stderr. `form`: the format of a record."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(form))
    handler.addFilter(LinesPerKind())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
