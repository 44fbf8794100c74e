"""Draws several results of `bench cache-hit --mode simulate` as one picture: over the rate, the capacity or the nodes.

python -m tokenlake_bench.simulation.series --over rate --plot FILE.png RESULT.json ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click
import msgspec

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake_bench.pictures import check_plot
from tokenlake_bench.routing import SystemRow
from tokenlake_bench.simulation.pooled import POOL
from tokenlake_bench.simulation.results import SimulatedResult


class Panel(NamedTuple):
    """One panel of the picture. `value(result, system, row)` is the plotted number; None leaves the system out."""

    label: str
    value: Callable[[SimulatedResult, str, SystemRow], float | None]
    line: float | None = None
    """Height at which the panel has a horizontal line."""


PANELS: Final[dict[str, tuple[Panel, ...]]] = {
    "rate": (
        Panel("goodput, requests/s within their objective", lambda result, name, row: row.goodput_rps),
        Panel("requests within their objective, %", lambda result, name, row: row.slo_attainment * 100, 90.0),
    ),
    "capacity_tokens": (Panel("token hit rate, %", lambda result, name, row: row.token_hit_rate * 100),),
    "nodes": (
        Panel(
            "messages between nodes per request",
            lambda result, name, row: result.messages_per_request if name == POOL else None,
        ),
        Panel("load CV per 10 s", lambda result, name, row: row.load_cv),
    ),
}
"""The panels of the picture, by the field of a result that the horizontal axis shows."""


def plot_series(results: Sequence[SimulatedResult], over: str, path: Path) -> None:
    """Write the picture (PNG) to `path`, without a display. Raises ConfigurationError."""
    if over not in PANELS:
        raise ConfigurationError("over", over, " or ".join(PANELS))
    if not results:
        raise ConfigurationError("results", 0, "at least one")
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ordered = sorted(results, key=lambda result: float(getattr(result, over)))
    figure = Figure(figsize=(6.5 * len(PANELS[over]), 4), layout="constrained")
    names = list(dict.fromkeys(name for result in ordered for name in result.systems))
    for panel, axes in zip(PANELS[over], figure.subplots(1, len(PANELS[over]), squeeze=False)[0], strict=True):
        for name in names:
            points = [
                (getattr(result, over), value)
                for result in ordered
                if name in result.systems and (value := panel.value(result, name, result.systems[name])) is not None
            ]
            # A system that has only one point among several results is left out, because it shows no dependence.
            if len(points) >= min(2, len(ordered)):
                axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=3 if name == POOL else 1)
        if panel.line is not None:
            axes.axhline(panel.line, color="black", linestyle="--", linewidth=1)
        if over != "rate":
            axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel({"rate": "requests/s", "capacity_tokens": "capacity, tokens", "nodes": "nodes"}[over])
        axes.set_ylabel(panel.label)
        axes.legend(fontsize="small")
    FigureCanvasAgg(figure).print_png(str(path))


def _read(path: Path) -> SimulatedResult:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SimulatedResult)
    except (OSError, msgspec.MsgspecError) as error:
        problem = f"JSON of 'bench cache-hit --mode simulate'; {error}"
        raise ConfigurationError("results", str(path), problem) from None


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--over", type=click.Choice(list(PANELS)), required=True, help="What differs between the results.")
@click.option("--plot", "plot_file", required=True, type=click.Path(dir_okay=False, path_type=Path))
def main(results: tuple[Path, ...], over: str, plot_file: Path) -> None:
    """Draw several results of a simulated comparison in one picture."""
    try:
        plot_series([_read(path) for path in results], over, plot_file)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
