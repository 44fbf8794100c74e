"""Draws a restart run over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenlake_bench.restart.load import Answered
from tokenlake_bench.restart.results import RestartResult, hit_rate, ideal_rate

WINDOW_S = 2.0
"""Seconds of the requests that one point of the curves covers."""


def draw(result: RestartResult, answered: Sequence[Answered], path: Path) -> None:
    """Write a PNG to `path`: the hit rate over time, beside that of a cache that forgets nothing. Each restart is
    shaded from its signal to the time at which all segments had been read."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axis = figure.subplots()
    slices: dict[int, list[Answered]] = {}
    for each in answered:
        slices.setdefault(int(each.at_s // WINDOW_S), []).append(each)
    seconds = [(number + 0.5) * WINDOW_S for number in sorted(slices)]
    for name, rate, colour in (("cache that forgets nothing", ideal_rate, "0.6"), ("pool", hit_rate, "tab:blue")):
        axis.plot(seconds, [100 * rate(slices[number]) for number in sorted(slices)], label=name, color=colour)
    for restart in result.restarts:
        colour = "tab:red" if restart.signal == "SIGKILL" else "tab:green"
        axis.axvspan(restart.down_s, restart.ready_s, color=colour, alpha=0.2)
        name = restart.nodes[0] if len(restart.nodes) == 1 else "all"
        axis.text(restart.down_s, 2, f"{restart.signal} {name}", rotation=90, fontsize=7, verticalalignment="bottom")
    axis.set_ylim(0, 105)
    axis.set_ylabel("token hit rate, %")
    axis.set_xlabel("seconds")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))
