"""Times at which sessions begin: a Poisson process, or the bursts of a real service's arrivals.

The bursts are those of `AzureLLMInferenceTrace_conv_2023.csv` (Azure Public Dataset, CC-BY-4.0; Patel et al.,
Splitwise, ISCA 2024): columns TIMESTAMP, ContextTokens, GeneratedTokens. Only the times are used.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from tokenlake.errors import ConfigurationError
from tokenlake_bench.trace_lines import TraceError, refuse_beyond_share, text_lines

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Endless times in seconds of a Poisson process, `rate` per second on average."""
    rng = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


def bursts(shape: Sequence[float], rate: float, seed: int) -> Iterator[float]:
    """Endless times at `rate` per second in the bursts of `shape` (times in order), stretched and repeated; `seed`
    draws the point of `shape` at which they begin.

    A burst keeps its height relative to the mean. Raises ConfigurationError for a shape without duration.
    """
    if len(shape) < 2 or shape[-1] <= shape[0]:
        raise ConfigurationError("arrivals", len(shape), "at least two arrivals at different times")
    # The period ends one mean gap after the last arrival, so that the next period's first arrival does not coincide
    # with it.
    period = (shape[-1] - shape[0]) * len(shape) / (len(shape) - 1)
    stretch = len(shape) / rate / period
    first = random.Random(seed).randrange(len(shape))
    begin = shape[first]
    rounds = 0
    while True:
        for index in range(len(shape)):
            place = (first + index) % len(shape)
            wrapped = period if first + index >= len(shape) else 0.0
            yield (shape[place] - begin + wrapped + rounds * period) * stretch
        rounds += 1


def read_azure(path: Path | str) -> tuple[list[float], list[TraceError]]:
    """Read arrival times from a CSV file. Returns (seconds of each arrival since the first, errors of the malformed
    lines that were skipped).

    Plain or compressed (`.csv`, `.csv.zst`). Raises TraceError for a file that cannot be read, lacks the columns, goes
    back in time, or has more malformed lines than `MALFORMED_SHARE`.
    """
    path = Path(path)
    lines = enumerate(text_lines(path, suffixes=(".csv", ".zst")), start=1)
    _check_header(path, next(lines, (1, b""))[1])
    times: list[float] = []
    malformed: list[TraceError] = []
    count = 0
    for number, text in lines:
        if not text.strip():
            continue
        count += 1
        try:
            at_s = _seconds(path, number, text)
        except TraceError as error:
            malformed.append(error)
            continue
        if times and at_s < times[-1]:
            raise TraceError(path, "expected a time not before that of the line before", number, "TIMESTAMP")
        times.append(at_s)
    refuse_beyond_share(path, malformed, count)
    if not times:
        raise TraceError(path, "expected at least one arrival; the file has none")
    return [at_s - times[0] for at_s in times], malformed


def _check_header(path: Path, text: bytes) -> None:
    columns = text.decode("utf-8", "replace").lstrip("\ufeff").strip().split(",")
    if tuple(columns) != AZURE_COLUMNS:
        raise TraceError(path, f"expected the columns {','.join(AZURE_COLUMNS)}; got {','.join(columns)[:80]}", 1)


def _seconds(path: Path, number: int, text: bytes) -> float:
    """The time on one line of the file, in seconds of a clock without a time zone."""
    try:
        [fields] = csv.reader([text.decode()])
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        raise TraceError(path, f"expected comma-separated text; {error}", number) from None
    if len(fields) != len(AZURE_COLUMNS):
        raise TraceError(path, f"expected {len(AZURE_COLUMNS)} fields, got {len(fields)}", number)
    for name, field in zip(AZURE_COLUMNS[1:], fields[1:], strict=True):
        if not field.isdecimal():
            raise TraceError(path, f"expected a number of tokens, got '{field[:32]}'", number, name)
    stamp, _, fraction = fields[0].partition(".")
    try:
        # The last digit is cut off, because the file has seven digits of a second, one more than datetime reads.
        whole = datetime.fromisoformat(stamp)
        return (whole - datetime(1970, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")
    except (ValueError, TypeError):
        problem = f"expected a time like 2023-11-16 18:15:46.6805900, got '{fields[0][:32]}'"
        raise TraceError(path, problem, number, "TIMESTAMP") from None
