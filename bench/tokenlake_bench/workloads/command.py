"""`tokenlake workload NAME --out FILE`: the generators by name; one command for each, with one option per parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

import click
import msgspec
import zstandard

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake_bench.convert.cli import convert
from tokenlake_bench.report import format_duration, format_share, output, table
from tokenlake_bench.workloads.agent import AgentSettings, agent_sessions
from tokenlake_bench.workloads.base import Draw, TraceLine, TraceSettings, poisson
from tokenlake_bench.workloads.conversation import ConversationSettings, conversations
from tokenlake_bench.workloads.documents import DocumentSettings, questions
from tokenlake_bench.workloads.statistics import statistics_of
from tokenlake_bench.workloads.toolagent import ToolAgentSettings, tool_calls


@dataclass(frozen=True, slots=True)
class Generator:
    """A workload generator. `lines` makes the lines of a trace from settings of the type `settings`, a source of draws
    (`Draw`), and the times at which sessions begin."""

    name: str
    summary: str
    settings: type[TraceSettings]
    lines: Callable[[Any, Draw, Iterator[float]], list[TraceLine]]


GENERATORS: Final[dict[str, Generator]] = {
    generator.name: generator
    for generator in (
        Generator("conversation", "Long conversations with little in common.", ConversationSettings, conversations),
        Generator("agent", "A coding agent's long sessions.", AgentSettings, agent_sessions),
        Generator("toolagent", "Hot prompt templates beside conversations.", ToolAgentSettings, tool_calls),
        Generator("documents", "Questions about long documents.", DocumentSettings, questions),
    )
}


def generate(name: str, values: Mapping[str, object]) -> list[TraceLine]:
    """The lines of a generated trace in order of time. `values`: settings that differ from the defaults; text is
    converted to numbers. Raises a ConfigurationError that names the field."""
    generator = GENERATORS[name]
    try:
        settings = msgspec.convert(dict(values), generator.settings, strict=False)
    except msgspec.ValidationError as error:
        # "Expected `int` >= 1 - at `$.requests`", or, of the settings themselves, "field: expected".
        expected, _, field = str(error).removeprefix("Expected ").rstrip("`").partition(" - at `$.")
        if not field:
            field, _, expected = expected.partition(": ")
        raise ConfigurationError(field, values.get(field), expected) from None
    starts = poisson(settings.rate / settings.turns_mean, settings.seed)
    return generator.lines(settings, Draw(settings.seed), starts)


def check_target(path: Path) -> None:
    """Check the path before a trace is generated. Raises ConfigurationError for a file name that `read_mooncake` would
    not read, or for a directory that does not exist."""
    if not path.name.endswith((".jsonl", ".jsonl.zst")):
        raise ConfigurationError("out", str(path), "a file name ending in .jsonl or .jsonl.zst")
    if not path.parent.is_dir():
        raise ConfigurationError("out", str(path), "a file in a directory that exists")


def write_lines(lines: list[TraceLine], path: Path) -> None:
    """Write the lines of a trace to the file, or replace it."""
    data = msgspec.json.Encoder().encode_lines(lines)
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)


def run_workload(name: str, out: Path, values: Mapping[str, object]) -> None:
    """Generate the workload, write the file and print its statistics. Raises TokenLakeError."""
    check_target(out)
    lines = generate(name, values)
    write_lines(lines, out)
    found = statistics_of(lines)
    lengths = (found.input_mean, found.input_p50, found.input_p99)
    rows = [
        ("requests", f"{found.requests:,} in {format_duration(found.duration_s)}"),
        ("input, mean / p50 / p99", " / ".join(f"{length:,.0f}" for length in lengths)),
        ("output, mean", f"{found.output_mean:,.0f}"),
        ("tokens found, infinite cache", format_share(found.ideal_token_hit)),
        ("blocks, used once", f"{found.blocks:,}, {format_share(found.used_once)}"),
        ("accesses to the top 0.1 / 1 %", " / ".join(map(format_share, (found.top_permille, found.top_percent)))),
        ("requests with the hottest block", format_share(found.hottest)),
    ]
    output().print(table(f"{name}: {out.name}", (), rows))


@click.group()
def workload() -> None:
    """Write a workload as a trace in Mooncake's format: times, lengths, ids of blocks of tokens."""


def _command(generator: Generator) -> click.Command:
    def run(out: Path, **values: object) -> None:
        try:
            run_workload(generator.name, out, {field: value for field, value in values.items() if value is not None})
        except TokenLakeError as error:
            raise click.ClickException(str(error)) from error

    file = click.Path(dir_okay=False, path_type=Path)
    options: list[click.Parameter] = [
        click.Option(["--out"], type=file, required=True, help="The trace, .jsonl or .jsonl.zst.")
    ]
    for field in msgspec.structs.fields(generator.settings):
        name = f"--{field.name.replace('_', '-')}"
        text = f"{_description(field.type)} [default: {field.default:,.10g}]"
        options.append(click.Option([name], metavar="NUMBER", help=text))
    return click.Command(generator.name, params=options, callback=run, help=generator.summary)


def _description(declared: object) -> str:
    """The description of a parameter: that of the outermost of its nested type annotations that has one."""
    while get_origin(declared) is Annotated:
        inner, *metas = get_args(declared)
        for meta in reversed(metas):
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
        declared = inner
    return ""


for _generator in GENERATORS.values():
    workload.add_command(_command(_generator))
workload.add_command(convert)
