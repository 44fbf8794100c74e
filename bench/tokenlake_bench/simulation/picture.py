"""Draws a simulated comparison: hit rates, requests within their objective, and the load of each node over time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tokenlake_bench.balance import WINDOW_S
from tokenlake_bench.pictures import check_plot
from tokenlake_bench.report import format_ratio
from tokenlake_bench.simulation.results import PoolView, SimulatedResult


def plot_simulated(result: SimulatedResult, view: PoolView, path: Path) -> None:
    """Write the picture of a simulated comparison (PNG) to `path`, without a display. Raises ConfigurationError where
    matplotlib is missing."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(result.systems)
    colours = ["tab:blue" if name.startswith("pool") else "tab:gray" for name in names]
    figure = Figure(figsize=(15, 1.5 + max(3.0, 0.35 * len(names))), layout="constrained")
    hits, within, load = figure.subplots(1, 3)
    for axes, values, label in (
        (hits, [row.token_hit_rate for row in result.systems.values()], "token hit rate, %"),
        (within, [row.slo_attainment for row in result.systems.values()], "requests within their objective, %"),
    ):
        bars = axes.barh(names, [value * 100 for value in values], color=colours)
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_xlabel(label)
    hits.set_title(f"{result.requests:,} requests, {result.nodes} nodes, {result.rate:.1f}/s")
    starts, sent = view.sent.table()
    if len(starts):
        table = np.zeros((view.nodes, round(starts[-1] / WINDOW_S) + 1))
        table[:, np.rint(starts / WINDOW_S).astype(np.int64)] = sent.T
        relative = table / np.maximum(1.0, table.mean(axis=0))
        extent = (0.0, table.shape[1] * WINDOW_S, view.nodes - 0.5, -0.5)
        image = load.imshow(relative, aspect="auto", vmin=0, vmax=2, cmap="coolwarm", extent=extent)
        figure.colorbar(image, ax=load, label="bytes sent / mean")
    load.set_xlabel("trace time, s")
    load.set_ylabel("node")
    cv, floor = format_ratio(result.load_cv), format_ratio(result.load_cv_floor)
    load.set_title(f"load per {WINDOW_S:g} s: CV {cv}, floor {floor}")
    FigureCanvasAgg(figure).print_png(str(path))
