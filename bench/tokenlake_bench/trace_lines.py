"""Reads the lines of a trace file, plain (`.jsonl`) or compressed (`.jsonl.zst`)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import zstandard

from tokenlake.errors import TokenLakeError

T = TypeVar("T")


class TraceError(TokenLakeError):
    """Raised when a trace cannot be read; the message names the file, the line and the problem."""

    def __init__(self, path: Path, problem: str, line: int | None = None) -> None:
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {problem}")


def text_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that are not empty. One chunk and one line are in memory at a time. Raises
    TraceError."""
    if path.suffix not in (".jsonl", ".zst"):
        raise TraceError(path, "expected a file name ending in .jsonl or .jsonl.zst")
    try:
        with path.open("rb") as file:
            lines: Iterable[bytes] = file
            if path.suffix == ".zst":
                reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
                lines = io.BufferedReader(reader)
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise TraceError(path, f"expected a readable file; {error.strerror}") from error
    except zstandard.ZstdError as error:
        raise TraceError(path, f"expected zstd data; {error}") from None


def decoded(decoder: msgspec.json.Decoder[T], path: Path) -> Iterator[tuple[int, T]]:
    """(number, decoded line) of the lines of a file. Raises TraceError."""
    for number, text in text_lines(path):
        try:
            yield number, decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(path, str(error), number) from None
