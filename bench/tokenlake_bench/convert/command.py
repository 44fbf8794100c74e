"""`tokenlake workload convert`: reads logs, writes a trace, and says what the trace holds."""

from __future__ import annotations

import gzip
import heapq
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec
import zstandard
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.convert.base import Log, Logged, Reader, Report
from tokenlake_bench.convert.blocks import BlockIds, key_from
from tokenlake_bench.convert.openai import read_openai
from tokenlake_bench.convert.order import WINDOW, WINDOW_IDS, in_order
from tokenlake_bench.convert.prompts import Prompts
from tokenlake_bench.convert.published import (
    BAILIAN_BLOCK,
    MOONCAKE_BLOCK,
    read_azure,
    read_bailian,
    read_mooncake_log,
)
from tokenlake_bench.convert.sharegpt import read_sharegpt
from tokenlake_bench.convert.summary import Summary
from tokenlake_bench.convert.vllm import read_vllm
from tokenlake_bench.engine_model import model_named
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_bytes, format_duration, format_share, output, table
from tokenlake_bench.trace_lines import UNREADABLE, TraceError, broken, opened
from tokenlake_bench.workloads.base import TraceLine

STANDARD: Final = Path("-")
"""Standard input, as a log, and standard output, as a trace."""
BLOCK_TOKENS: Final = 64
"""Tokens of a block where the log has texts or token ids and none are named."""
SAY_EVERY: Final = 10_000
"""Requests between two lines of progress where the length of the log is not known."""
AGREE: Final = 0.9
"""Share of the requests whose length the log names: below it the tokenizer is probably that of another model."""

TEXTS: Final[dict[str, Reader]] = {
    "openai": read_openai,
    "vllm": read_vllm,
    "sharegpt": read_sharegpt,
    "azure": read_azure,
}
BLOCKS: Final[dict[str, tuple[Callable[[Log, int], Iterator[Logged]], int]]] = {
    "bailian": (read_bailian, BAILIAN_BLOCK),
    "mooncake": (read_mooncake_log, MOONCAKE_BLOCK),
}
"""Formats whose lines have block ids, with the tokens of a block."""
FORMATS: Final = (*TEXTS, *BLOCKS)
"""The names that `--from` takes."""


class _Line(TraceLine, frozen=True, gc=False):
    """A line of a converted trace: it names the tokens of a block, and its time is taken as it is."""

    block_size: int


@dataclass(frozen=True, kw_only=True)
class ConvertArguments:
    """Arguments of the command. `block_tokens`: of the trace; None: those of the log, or 64 where it has none.
    `log_block_tokens`: of a log with block ids whose lines do not name them. `rate`, `seed`: of the times of a log that
    has none. `model`: that whose cache the summary sizes. `wrong_lines`: lines of another format that are left out at
    most. Raises ConfigurationError for a value out of range."""

    logs: tuple[Path, ...]
    source: str
    out: Path
    tokenizer: Path | None = None
    chat_template: Path | None = None
    block_tokens: int | None = None
    log_block_tokens: int | None = None
    time_field: str | None = None
    rate: float | None = None
    seed: int = 0
    output_tokens: int = 0
    model: str | None = None
    key_file: Path | None = None
    wrong_lines: int = 100
    unshared: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block_tokens", 1), ("log_block_tokens", 1), ("wrong_lines", 0), ("output_tokens", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigurationError(name, value, f"at least {least}")
        if self.model is not None:
            model_named(self.model)
        if self.rate is not None and not 0 < self.rate < 1e6:
            raise ConfigurationError("rate", self.rate, "a number of requests per second, above 0")
        if self.log_block_tokens is not None and self.source not in BLOCKS:
            raise ConfigurationError("log_block_tokens", self.log_block_tokens, f"absent but for {', '.join(BLOCKS)}")
        if self.blocks[1] % self.blocks[0]:
            raise ConfigurationError("block_tokens", self.blocks[1], f"a multiple of {self.blocks[0]}, the log's own")
        if self.out != STANDARD:
            if not self.out.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
                raise ConfigurationError("out", str(self.out), "a name ending in .jsonl, .jsonl.gz or .jsonl.zst, or -")
            if not self.out.parent.is_dir():
                raise ConfigurationError("out", str(self.out), "a file in a directory that exists")

    @property
    def blocks(self) -> tuple[int, int]:
        """(tokens of a block of the log, 1 where it has none; tokens of a block of the trace)."""
        own = (self.log_block_tokens or BLOCKS[self.source][1]) if self.source in BLOCKS else 1
        return own, self.block_tokens or (own if self.source in BLOCKS else BLOCK_TOKENS)

    @property
    def reader(self) -> Reader:
        """The reader of the format."""
        if self.source in TEXTS:
            return TEXTS[self.source]
        read, tokens = BLOCKS[self.source][0], self.blocks[0]
        return lambda log: read(log, tokens)


class _Progress:
    """Progress over all logs on standard error, in MiB of their files."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        sizes = [path.stat().st_size if path.is_file() else None for path in paths]
        self._known = None if None in sizes else max(1, sum(filter(None, sizes)) >> 20)
        self.bar = LiveProgress("MiB", self._known or 1)
        self._files: list[BinaryIO] = []
        self._requests = 0

    def add(self, file: BinaryIO) -> None:
        self._files.append(file)

    def each(self, requests: Iterator[Logged]) -> Iterator[Logged]:
        """The requests, each counted when it is read."""
        for logged in requests:
            self._requests += 1
            if self._known is not None:
                read = sum(file.tell() for file in self._files) >> 20
                self.bar.update(min(self._known, read), f"{self._requests:,} requests")
            elif self._requests % SAY_EVERY == 0:
                self.bar.say(f"{self._requests:,} requests")
            yield logged


def run_convert(arguments: ConvertArguments) -> Summary:
    """Convert the logs, write the trace, and print what it holds. A trace of several logs is in order of time. Raises
    TokenLakeError; then no trace is left."""
    to_standard = arguments.out == STANDARD
    _, block_tokens = arguments.blocks
    key = key_from(arguments.key_file)
    progress = _Progress(arguments.logs)
    report = Report(progress.bar.say, arguments.wrong_lines)
    prompts = Prompts(arguments.tokenizer, arguments.chat_template)
    ids = BlockIds(key, block_tokens)
    summary = Summary(block_tokens)
    with ExitStack() as stack:
        stack.enter_context(progress.bar)
        logs = [
            Log(
                path=path,
                file=_open(stack, path, progress),
                written_s=path.stat().st_mtime if path.is_file() else time.time(),
                report=report,
                ids=ids,
                prompts=prompts,
                rate=arguments.rate or (1.0 if arguments.source == "sharegpt" else None),
                seed=arguments.seed,
                time_field=arguments.time_field,
                unshared=arguments.unshared,
            )
            for path in arguments.logs
        ]
        parts = [_requests(log, arguments.reader, progress, len(logs)) for log in logs]
        write = stack.enter_context(_writer(arguments.out))
        encoder = msgspec.json.Encoder()
        for logged in heapq.merge(*parts, key=lambda each: each.at_s):
            summary.add(logged)
            start_s = 0.0 if arguments.key_file else summary.first_s
            answer = arguments.output_tokens if logged.output_tokens is None else logged.output_tokens
            line = _Line(
                round((logged.at_s - start_s) * 1000),
                logged.input_tokens,
                answer,
                logged.block_ids.tolist(),
                block_tokens,
            )
            write(encoder.encode(line) + b"\n")
        if not summary.requests:
            found = f"{report.wrong_lines} wrong lines" if report.wrong_lines else "none"
            raise TraceError(arguments.logs[0], f"expected requests as '{arguments.source}' logs them; found {found}")
    console = Console(stderr=True) if to_standard else output()
    _show(console, arguments, summary, report)
    return summary


def _requests(log: Log, reader: Reader, progress: _Progress, logs: int) -> Iterator[Logged]:
    """The requests of a log in order of time; errors of its file name it."""
    try:
        yield from in_order(log, progress.each(reader(log)), WINDOW, WINDOW_IDS // logs)
    except UNREADABLE as error:
        raise broken(log.path, error) from None


def _open(stack: ExitStack, path: Path, progress: _Progress) -> BinaryIO:
    if path == STANDARD:
        return sys.stdin.buffer
    try:
        file = stack.enter_context(path.open("rb"))
    except OSError as error:
        raise broken(path, error) from None
    progress.add(file)
    return opened(file, path.suffix)


@contextmanager
def _writer(out: Path) -> Iterator[Callable[[bytes], object]]:
    """A function that appends to the trace. The file has its name only when it is complete."""
    if out == STANDARD:
        yield sys.stdout.buffer.write
        sys.stdout.buffer.flush()
        return
    part = out.with_name(f".{out.name}.part")
    try:
        with part.open("wb") as file:
            if out.suffix == ".zst":
                with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed:
                    yield packed.write
            elif out.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as zipped:
                    yield cast(BinaryIO, zipped).write
            else:
                yield file.write
        part.replace(out)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _show(console: Console, arguments: ConvertArguments, summary: Summary, report: Report) -> None:
    about = "about " if summary.every > 1 else ""
    rows = [
        ("requests", f"{summary.requests:,}"),
        ("time span", format_duration(summary.last_s - summary.first_s)),
        ("prompt tokens", f"{summary.input_tokens:,}"),
        ("answer tokens", f"{summary.output_tokens:,}"),
        ("tokens of a block", f"{summary.block_tokens:,}"),
        ("different prompt tokens", f"{about}{summary.distinct_tokens:,}"),
        *_memory(arguments, summary),
        ("tokens shared with an earlier prompt", f"{about}{summary.shared_tokens:,}"),
        ("hit rate, infinite memory", f"{about}{format_share(summary.shared)}"),
        *((reason, f"{count:,} left out") for reason, count in sorted(report.left_out.items())),
        ("wrong lines", f"{report.wrong_lines:,} left out"),
    ]
    if arguments.unshared:
        rows = [row for row in rows if not row[0].startswith(("different", "their cache", "tokens shared", "hit rate"))]
    console.print(table(f"{arguments.source}: {arguments.out.name}", (), rows))
    for line in _notes(arguments, summary, report):
        console.print(line, soft_wrap=True)


def _memory(arguments: ConvertArguments, summary: Summary) -> Iterator[tuple[str, str]]:
    if arguments.model is not None:
        model = model_named(arguments.model)
        yield f"their cache, {model.name}", format_bytes(summary.distinct_tokens * model.cache_bytes)


def _notes(arguments: ConvertArguments, summary: Summary, report: Report) -> Iterator[str]:
    if summary.unanswered:
        yield (
            f"{summary.unanswered:,} requests have no answer in the log: {arguments.output_tokens} tokens each "
            "('--output-tokens')"
        )
    if report.lengths_compared:
        equal = report.lengths_equal / report.lengths_compared
        yield f"the tokenizer counts as the log does in {format_share(equal)} of {report.lengths_compared:,} requests"
        if equal < AGREE:
            yield "is it the tokenizer, and the chat template, of the model that answered?"
    if arguments.unshared:
        yield "each prompt is unlike all others: times and lengths are the log's, hit rates of this trace mean nothing"
