"""Published traces: Alibaba's Bailian (block ids, 16 tokens), Mooncake's (block ids, 512 tokens) and Azure's (lengths
alone)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tokenlake.errors import ConfigurationError
from tokenlake_bench.convert.base import Log, Logged, Wrong, unix_s
from tokenlake_bench.trace_lines import TraceError

BAILIAN_BLOCK, MOONCAKE_BLOCK = 16, 512
"""Tokens of a block of each format, where its lines do not name them."""
AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Line(msgspec.Struct, gc=False):
    """The fields of a line with block ids that are used; others are ignored. `timestamp`: seconds in Bailian's format,
    ms in Mooncake's."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[int]
    block_size: Annotated[int, Meta(ge=1)] | None = None


_DECODER: Final = msgspec.json.Decoder(_Line)


def read_bailian(log: Log, block_tokens: int) -> Iterator[Logged]:
    """The requests of a trace of Bailian."""
    return log.each(lambda line: _with_blocks(log, line, block_tokens, 1.0))


def read_mooncake_log(log: Log, block_tokens: int) -> Iterator[Logged]:
    """The requests of a trace in Mooncake's format."""
    return log.each(lambda line: _with_blocks(log, line, block_tokens, 1e-3))


def _with_blocks(log: Log, line: bytes, block_tokens: int, unit_s: float) -> Logged:
    try:
        read = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Wrong(str(error)) from None
    size = read.block_size or block_tokens
    if log.ids.block_tokens % size:
        raise Wrong(f"block_size: expected a divisor of --block-tokens {log.ids.block_tokens}, got {size}")
    full, started = read.input_length // size, -(-read.input_length // size)
    if len(read.hash_ids) not in (full, started):
        raise Wrong(f"hash_ids: expected {full} or {started}, one per {size}-token block; got {len(read.hash_ids)}")
    ids = log.ids.of_blocks(read.hash_ids, size, read.input_length)
    return Logged(read.timestamp * unit_s, read.input_length, ids, read.output_length, 0)


def read_azure(log: Log) -> Iterator[Logged]:
    """The requests of Azure's traces of LLM inference, each with a prompt unlike all others. Raises
    ConfigurationError unless `unshared` says so, because these traces do not tell which prompts share a prefix."""
    if not log.unshared:
        raise ConfigurationError(
            "from",
            "azure",
            "a log that tells which prompts share a prefix: Azure's has lengths alone, so that no hit rate can be "
            "computed from it. '--unshared' writes its times and lengths, with each prompt unlike all others",
        )
    columns: dict[str, int] | None = None
    for number, line in log.lines():
        cells = next(csv.reader([line.decode("utf-8", "replace").strip("\ufeff\r\n")]), [])
        if columns is None:
            columns = {name: place for place, name in enumerate(cells)}
            for name in AZURE_COLUMNS:
                if name not in columns:
                    raise TraceError(log.path, f"expected the columns {', '.join(AZURE_COLUMNS)}", number)
            continue
        try:
            at, context, generated = (cells[columns[name]] for name in AZURE_COLUMNS)
            tokens, output = int(context), int(generated)
            if tokens < 1 or output < 0:
                raise ValueError
            # Seven digits of a second are more than a date of Python has.
            at_s = unix_s(at[:26] + at[27:] if len(at) > 26 and at[26:27].isdigit() else at, AZURE_COLUMNS[0])
        except (IndexError, ValueError):
            log.report.wrong(log.path, number, f"expected a date and two numbers, as {', '.join(AZURE_COLUMNS)}")
        except Wrong as error:
            log.report.wrong(log.path, number, str(error))
        else:
            yield Logged(at_s, tokens, log.ids.unlike(tokens), output, number)
