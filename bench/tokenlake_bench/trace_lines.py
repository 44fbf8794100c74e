"""Reads the lines of a trace file, plain (`.jsonl`) or compressed (`.jsonl.zst`), and reports malformed ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tokenlake.errors import TokenLakeError

MALFORMED_SHARE: Final = 0.01
"""Largest share of malformed lines in a trace file; a file with more is refused."""
NAMED: Final = 5
"""Maximum number of malformed lines that the text of an error names."""

_CHUNK_BYTES: Final = 1 << 16


class TraceError(TokenLakeError):
    """Raised when a trace cannot be read; the message names file, line, field and the expected value."""

    def __init__(self, path: Path, problem: str, line: int | None = None, field: str | None = None) -> None:
        where = str(path)
        if line is not None:
            where += f", line {line}"
        if field is not None:
            where += f", field '{field}'"
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.line = line
        self.field = field


def explain(message: str, kinds: Mapping[str, str]) -> tuple[str, str | None]:
    """(expected value, name of the field or None) from the text of a msgspec.ValidationError. `kinds`: by field, a
    description of the value that is expected if the field is missing."""
    if missing := re.search(r"missing required field `(\w+)`", message):
        field = missing.group(1)
        return f"expected {kinds.get(field, 'a number of tokens')}; the field is missing", field
    what, _, where = message.partition(" - at `$")
    found = re.findall(r"\.(\w+)", where)
    return what[:1].lower() + what[1:], found[-1] if found else None


def refuse_beyond_share(path: Path, malformed: Sequence[TraceError], lines: int) -> None:
    """Raises a TraceError that names the first malformed lines if they are more than `MALFORMED_SHARE` of all lines."""
    if len(malformed) <= MALFORMED_SHARE * lines:
        return
    first = malformed[0]
    named = "; ".join(str(error) for error in malformed[:NAMED])
    problem = f"expected at most {MALFORMED_SHARE:.0%} malformed lines; {len(malformed)} of {lines} are: {named}"
    raise TraceError(path, problem, first.line, first.field)


def passed_over(malformed: Sequence[TraceError]) -> str:
    """Text for the user about the malformed lines that were skipped; empty if there are none."""
    if not malformed:
        return ""
    lines = "1 malformed line" if len(malformed) == 1 else f"{len(malformed)} malformed lines, the first"
    return f"skipped {lines}: {malformed[0]}"


def text_lines(path: Path, suffixes: tuple[str, ...] = (".jsonl", ".zst")) -> Iterator[bytes]:
    """The lines of the file without their ends. One compressed chunk and one line are in memory at a time."""
    if path.suffix not in suffixes:
        raise TraceError(path, f"expected a file name ending in {suffixes[0]} or {suffixes[0]}.zst")
    rest = b""
    for chunk in _decompressed(path) if path.suffix == ".zst" else _chunks(path):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise TraceError(path, f"expected a readable file; {error.strerror}") from error


def _decompressed(path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise TraceError(path, "reading .zst needs zstandard: pip install tokenlake-bench") from None
    frame = None
    try:
        for chunk in _chunks(path):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data
                if frame.eof:
                    frame = None
    except zstandard.ZstdError as error:
        raise TraceError(path, f"expected zstd data; {error}") from None
    if frame is not None:
        raise TraceError(path, "expected a whole zstd frame; the file ends within one")
