"""What the readers of all formats share: a request as it leaves them, the file that they read, and what they report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake_bench.convert.blocks import BlockIds
from tokenlake_bench.convert.prompts import Prompts
from tokenlake_bench.trace_lines import TraceError
from tokenlake_bench.workloads.base import poisson

LONGEST_LINE: Final = 64 << 20
"""Bytes of the longest line that is read; a longer one is a wrong line."""
SHOWN: Final = 10
"""Wrong lines that are printed; the others are counted."""


@dataclass(slots=True)
class Logged:
    """One request of a log: seconds at which it arrived, tokens of its prompt, ids of the blocks of its prompt, and
    tokens of its answer, None where the log does not have it. A reader may set `output_tokens` later, as long as the
    request waits to be written. `line`: the line of the log."""

    at_s: float
    input_tokens: int
    block_ids: NDArray[np.uint64]
    output_tokens: int | None
    line: int


class Wrong(Exception):
    """Raised by a reader for one line that is not of its format; the message names the field and what was expected."""


class LeftOut(Exception):
    """Raised by a reader for a request that a trace cannot hold, such as one with an image; the message is the
    reason."""


@dataclass(slots=True)
class Report:
    """What a conversion leaves out. `say` prints a line for the user."""

    say: Callable[[str], None]
    most_wrong: int
    """Wrong lines after which the conversion fails."""
    wrong_lines: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Requests that a trace cannot hold, by reason."""
    lengths_compared: int = 0
    lengths_equal: int = 0
    """Requests whose number of prompt tokens the log names, and those among them where the tokenizer counts as
    many."""

    def wrong(self, path: Path, line: int, problem: str) -> None:
        """Count and print a wrong line. Raises TraceError where there are too many."""
        self.wrong_lines += 1
        if self.wrong_lines > self.most_wrong:
            more = (
                f"; {self.most_wrong} wrong lines came before, '--wrong-lines' allows more" if self.most_wrong else ""
            )
            raise TraceError(path, problem + more, line)
        if self.wrong_lines <= SHOWN:
            self.say(f"{path}, line {line}: {problem}")


@dataclass(slots=True)
class Log:
    """One file to convert."""

    path: Path
    file: BinaryIO
    """The uncompressed content."""
    written_s: float
    """Unix time before which its last line was written."""
    report: Report
    ids: BlockIds
    prompts: Prompts
    rate: float | None
    """Requests per second where the log has no times; None: not given."""
    seed: int
    time_field: str | None = None
    """Name of the field that has the time; None: one of the usual names."""
    unshared: bool = False
    """Prompts of a log without any knowledge of their content count as unlike all others."""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(number, line) of the lines that are not empty; one line is in memory at a time. Longer lines than
        `LONGEST_LINE` are reported."""
        number = 0
        while line := self.file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                while (rest := self.file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                self.report.wrong(self.path, number, f"expected a line of at most {LONGEST_LINE >> 20} MiB")
            elif line.strip():
                yield number, line

    def each(self, read: Callable[[bytes], Logged]) -> Iterator[Logged]:
        """The requests that `read` makes of the lines. A line for which it raises `Wrong` or `LeftOut` is counted."""
        for number, line in self.lines():
            try:
                logged = read(line)
            except Wrong as error:
                self.report.wrong(self.path, number, str(error))
            except LeftOut as reason:
                self.report.left_out[str(reason)] += 1
            else:
                logged.line = number
                yield logged

    def arrivals(self) -> Iterator[float]:
        """Endless times of requests whose log has none: a Poisson process of `rate` requests per second. Raises
        TraceError where no rate is given."""
        if self.rate is None:
            raise TraceError(
                self.path,
                "the requests have no time; '--time-field NAME' names theirs, '--rate' draws so many per second",
            )
        return poisson(self.rate, self.seed)


class Reader(Protocol):
    """A format: its requests in about the order of their arrival. Raises TraceError for a log that cannot be
    converted."""

    def __call__(self, log: Log) -> Iterator[Logged]: ...


def json_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises `Wrong`."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"expected a JSON object; {error}") from None
    if not isinstance(found, dict):
        raise Wrong(f"expected a JSON object, got {type(found).__name__}")
    return found


def unix_s(value: object, name: str) -> float:
    """The Unix time that a number of seconds, ms, us or ns or a date of ISO 8601 stands for; a date without a zone is
    UTC. Raises `Wrong`."""
    if isinstance(value, str):
        try:
            at = datetime.fromisoformat(value.strip())
            return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                value = None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e20:
        for least, unit in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
            if value >= least:
                return value / unit
        return float(value)
    raise Wrong(f"{name}: expected a Unix time or a date of ISO 8601")
