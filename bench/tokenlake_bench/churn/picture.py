"""Draws a churn run over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenlake_bench.churn.results import Run, p99_ms, rate


def draw(runs: Sequence[tuple[str, Run]], path: Path) -> None:
    """Write a PNG to `path`: per run, the share of the fixed segments that is found and the p99 of the matches, second
    by second; the seconds of the change are shaded."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.2 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 2, squeeze=False, sharex=True)
    for (title, run), (found, match) in zip(runs, axes, strict=True):
        seconds = range(int(max((each.at_s for each in run.requests), default=0.0)) + 1)
        by_second = [[each for each in run.requests if int(each.at_s) == second] for second in seconds]
        found.plot(seconds, [100 * rate(requests, fixed=True) for requests in by_second], color="tab:blue")
        match.plot(seconds, [p99_ms(requests) for requests in by_second], color="tab:blue")
        for axis in (found, match):
            axis.axvspan(run.phases.change_s, run.phases.settled_s, color="0.9")
            axis.set_title(title, fontsize=9)
        found.set_ylim(0, 105)
        found.set_ylabel("found, %")
        match.set_yscale("log")
        match.set_ylabel("match p99, ms")
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    FigureCanvasAgg(figure).print_png(str(path))
