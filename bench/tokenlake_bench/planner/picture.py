"""Draws the fastest way to use a cached prefix for each link and batch, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenlake_bench.planner.judging import Row

WAYS: Final = {"fetch": "tab:blue", "ship": "tab:orange", "recompute": "tab:gray"}


def plot_regions(rows: Sequence[Row], path: Path) -> None:
    """Write a picture (PNG) of the batches whose prefix lies at another node, with a line per link and a column per
    batch. The upper half of a cell shows the way that the planner predicts to be fastest, the lower half the measured
    one; a cross marks a regret above 10 %."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    there = [row for row in rows if not row.here]
    links = list(dict.fromkeys((row.megabytes_per_s, row.delay_ms) for row in there))
    works = list(dict.fromkeys((row.sharing, row.prefix, row.new, row.decode) for row in there))
    works.sort()
    figure = Figure(figsize=(3 + 0.35 * len(works), 2.6 + 0.5 * len(links)), layout="constrained")
    axes = figure.subplots()
    for row in there:
        x = works.index((row.sharing, row.prefix, row.new, row.decode))
        y = links.index((row.megabytes_per_s, row.delay_ms))
        for way, low in ((row.chosen, y), (row.best, y - 0.42)):
            axes.add_patch(Rectangle((x - 0.45, low), 0.9, 0.42, color=WAYS[way]))
        if row.regret > 0.1:
            axes.text(x, y, "x", ha="center", va="center")
    axes.set_xlim(-0.5, len(works) - 0.5)
    axes.set_ylim(-0.5, len(links) - 0.5)
    axes.set_yticks(range(len(links)), [f"{rate:.0f} MB/s, {delay:g} ms" for rate, delay in links])
    names = [f"{sharing} x {prefix} + {new}, {decode}" for sharing, prefix, new, decode in works]
    axes.set_xticks(range(len(works)), names, rotation=90)
    axes.set_xlabel("requests x cached + new tokens, decode steps")
    axes.set_title("upper half: chosen; lower half: fastest as measured\nx: regret above 10 %")
    figure.legend(handles=[Patch(color=color, label=way) for way, color in WAYS.items()], loc="outside right upper")
    FigureCanvasAgg(figure).print_png(str(path))
