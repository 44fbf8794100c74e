"""Lines of the log: those that requests cause are limited, those about changes of state are not."""

from __future__ import annotations

import datetime
import json
import logging
import os
import subprocess
import sys

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


HOSTILE = "x\n2026-01-01T00:00:00.000+00:00 INFO forged: \u2028\x1b[2J\ud800"


def test_an_object_has_all_fields_on_one_line_of_ascii() -> None:
    ran = _run("log_objects('node')", f"logging.warning({HOSTILE!a}, extra={{'kind': {HOSTILE!a}}})")
    assert ran.isascii()
    [told] = map(json.loads, ran.splitlines())
    assert list(told) == ["time", "level", "logger", "node", "message", "fields"]
    assert datetime.datetime.fromisoformat(told["time"]).tzinfo is not None
    assert (told["level"], told["logger"], told["node"]) == ("warning", "root", "node")
    assert (told["message"], told["fields"]) == (HOSTILE, {"kind": HOSTILE})


def test_an_exception_is_a_field_also_where_no_code_handles_it() -> None:
    ran = _run(
        "threading.excepthook = log_objects('a')",
        "thread = threading.Thread(target=lambda: 1 / 0, name='worker')",
        "thread.start(); thread.join()",
        f"raise ValueError({HOSTILE!a})",
    )
    thread, process = map(json.loads, ran.splitlines())
    assert "ZeroDivisionError" in thread["exception"]
    assert "worker" in thread["message"]
    assert "ValueError" in process["exception"]


def test_the_time_of_a_line_of_text_has_its_zone() -> None:
    ran = _run(f"logging.warning({HOSTILE!a})", zone="America/St_Johns")
    [line] = ran.splitlines()
    time, level, _ = line.split(" ", 2)
    assert level == "WARNING"
    assert datetime.datetime.fromisoformat(time).utcoffset() is not None
    assert time[-6:] in ("-03:30", "-02:30", "+00:00")  # UTC where the machine has no zones


def _run(*lines: str, zone: str = "UTC") -> str:
    """What a program writes to its log."""
    program = "\n".join(
        (
            "import logging, threading",
            "from tokenlake.log_lines import log_objects, set_up_log",
            "set_up_log('%(asctime)s %(levelname)s %(name)s: %(message)s')",
            *lines,
        )
    )
    environment = {**os.environ, "TZ": zone}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment).stderr
