"""Draws the measured rates and times of all systems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenlake_bench.pictures import check_plot
from tokenlake_bench.transfer.results import Row


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Write a picture (PNG): rates of all systems with the machine's own rates, and times of the calls that move no
    bytes. Raises ConfigurationError where matplotlib is missing."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rates = [row for row in rows if row.gbps is not None]
    times = [row for row in rows if row.gbps is None]
    figure = Figure(figsize=(14, 2 + 0.25 * max(len(rates), len(times))), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, shown, values, title in (
        (left, rates, [row.gbps for row in rates], "GB/s; the line is the machine's ceiling"),
        (right, times, [row.p50_us for row in times], "p50, us"),
    ):
        names = [row.name for row in shown]
        bars = axes.barh(names, values, color=["tab:gray" if "/" in name else "tab:blue" for name in names])
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set_title(title)
    for place, row in enumerate(rates):
        left.vlines(row.ceiling_gbps, place - 0.4, place + 0.4, color="black")
    FigureCanvasAgg(figure).print_png(str(path))
