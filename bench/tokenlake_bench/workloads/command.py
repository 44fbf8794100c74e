"""`tokenlake workload NAME --out FILE`: one command per generator, one option per parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args, get_origin

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tokenlake.errors import TokenLakeError
from tokenlake_bench.report import format_duration, format_share, table
from tokenlake_bench.trace_lines import passed_over
from tokenlake_bench.workloads.arrivals import read_azure
from tokenlake_bench.workloads.registry import GENERATORS, Generator, generate
from tokenlake_bench.workloads.statistics import TraceStatistics, statistics_of
from tokenlake_bench.workloads.writer import check_target, write_lines

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def workload() -> None:
    """Write a workload as a trace in Mooncake's format: times, lengths, ids of 512-token blocks."""


def run_workload(name: str, out: Path, arrivals: Path | None, values: dict[str, object]) -> None:
    """Generate the workload, write the file and print its statistics. Raises TokenLakeError."""
    console = Console()
    check_target(out)
    shape, malformed = read_azure(arrivals) if arrivals is not None else (None, [])
    if note := passed_over(malformed):
        console.print(note, soft_wrap=True)
    lines = generate(name, values, shape=shape)
    write_lines(lines, out)
    console.print(_table(name, out, statistics_of(lines)))


def _table(name: str, out: Path, found: TraceStatistics) -> Table:
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
    return table(f"{name}: {out.name}", (), rows)


def _command(generator: Generator) -> click.Command:
    def run(out: Path, arrivals: Path | None, **values: object) -> None:
        given = {field: value for field, value in values.items() if value is not None}
        try:
            run_workload(generator.name, out, arrivals, given)
        except TokenLakeError as error:
            raise click.ClickException(str(error)) from error

    shape = "Use the bursts of these arrivals (Azure's CSV, plain or .zst). [default: a Poisson process]"
    options: list[click.Parameter] = [
        click.Option(["--out"], type=_FILE, required=True, help="The trace, .jsonl or .jsonl.zst."),
        click.Option(["--arrivals"], type=_FILE, help=shape),
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
