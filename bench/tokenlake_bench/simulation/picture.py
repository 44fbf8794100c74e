"""A picture of a simulated comparison: hit rates, requests within their objective, the load of each node over time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tokenlake_bench.balance import WINDOW_S
from tokenlake_bench.pictures import check_plot
from tokenlake_bench.simulation.results import PoolView, SimulatedResult

__all__ = ["plot_simulated"]


def plot_simulated(result: SimulatedResult, view: PoolView, path: Path) -> None:
    """Write a PNG to `path`, without a display. Raises ConfigurationError where matplotlib is missing."""
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
    reads = view.reads.arrays()
    if len(reads.at_s):
        window = np.floor(reads.at_s / WINDOW_S).astype(np.int64)
        shape = (view.nodes, int(window.max()) + 1)
        table = np.bincount(reads.node * shape[1] + window, weights=reads.nbytes, minlength=shape[0] * shape[1])
        relative = table.reshape(shape) / np.maximum(1.0, table.reshape(shape).mean(axis=0))
        extent = (0.0, shape[1] * WINDOW_S, view.nodes - 0.5, -0.5)
        image = load.imshow(relative, aspect="auto", vmin=0, vmax=2, cmap="coolwarm", extent=extent)
        figure.colorbar(image, ax=load, label="read from the node / mean")
    load.set_xlabel("trace time, s")
    load.set_ylabel("node")
    load.set_title(f"load per {WINDOW_S:g} s: CV {result.load_cv:.3f}, floor {result.load_cv_floor:.3f}")
    FigureCanvasAgg(figure).print_png(str(path))
