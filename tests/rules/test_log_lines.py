"""Lines of the log: those that requests cause are limited, those about changes of state are not."""

from __future__ import annotations

import logging

from tokenlake.log_lines import MAX_LINES, PERIOD_S, LinesPerKind


def record(text: str, kind: str, created: float) -> logging.LogRecord:
    made = logging.LogRecord("daemon", logging.WARNING, "", 1, "%s", (text,), None)
    made.kind, made.created = kind, created
    return made


def test_lines_are_limited_by_kind_and_changes_of_state_are_not() -> None:
    lines = LinesPerKind()
    passed = [lines.filter(record("no answer", "missed deadline", 1.0 + number * 1e-3)) for number in range(1000)]
    assert passed == [True] * MAX_LINES + [False] * (1000 - MAX_LINES)
    assert lines.filter(record("a fetch ended", "fetch", 2.0))
    assert all(lines.filter(record(f"peer {number} is down", "", 2.0)) for number in range(1000))
    again = record("no answer", "missed deadline", 1.0 + PERIOD_S)
    assert lines.filter(again)
    assert again.getMessage() == f"no answer ({1000 - MAX_LINES} earlier lines of this kind were left out)"
    assert lines.filter(record("no answer", "missed deadline", 2.0 + PERIOD_S))
