"""A picture of a `bench cache-hit` result."""

from __future__ import annotations

from pathlib import Path

from tokenlake_bench.pictures import check_plot
from tokenlake_bench.report import CacheHitResult, hit_rates

__all__ = ["plot_cache_hit"]


def plot_cache_hit(result: CacheHitResult, node_bytes: dict[str, int], path: Path) -> None:
    """Write a PNG to `path`: token hit rates per system, and GiB read from each node's arena.

    `node_bytes` maps node names to bytes, as in `CacheHitDetails`. matplotlib is imported here, without a display.
    Raises ConfigurationError where it is missing or `path` does not end in .png.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = hit_rates(result)
    bars = left.barh(
        [name.replace(", ", ",\n") for name in rates],
        [rate * 100 for rate in rates.values()],
        color=["tab:blue" if name == "pool" else "tab:gray" for name in rates],
    )
    left.bar_label(bars, fmt="%.1f", padding=3)
    left.margins(x=0.15)
    left.invert_yaxis()
    left.set_xlabel("token hit rate, %")
    left.set_title(f"{result.requests:,} requests, {result.nodes} nodes")

    loads = [count / 2**30 for count in node_bytes.values()]
    right.bar(list(node_bytes), loads, color="tab:blue")
    if loads:
        right.axhline(sum(loads) / len(loads), color="black", linewidth=1, linestyle="--")
    right.set_ylabel("read from the arena, GiB")
    right.set_title(f"CV per 10 s {result.load_cv:.3f}, floor {result.load_cv_floor:.3f}")
    if len(node_bytes) > 8:
        right.tick_params(axis="x", labelrotation=90)
    FigureCanvasAgg(figure).print_png(str(path))
