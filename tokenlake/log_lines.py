"""Lines of the log: one for each record, although texts in it may come from another process.

A record begins with its time; the lines of a traceback are indented. So a text with an end of line, for instance the
name of a field that an engine sent, cannot be taken for a record.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["one_line", "set_up_log"]

MAX_LINE = 4000
"""Limit of the characters of a line."""


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


def set_up_log(form: str) -> None:
    """Write the log of this process, from level INFO on, to stderr. `form`: the format of a record."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
