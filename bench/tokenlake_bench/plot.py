"""Draws a result of `bench cache-hit`."""

from __future__ import annotations

from pathlib import Path

from tokenlake_bench.pictures import check_plot
from tokenlake_bench.report import CacheHitResult, format_ratio, hit_rates


def plot_cache_hit(result: CacheHitResult, sent_bytes: dict[str, int], path: Path) -> None:
    """Write a PNG to `path`: token hit rates per system, and GiB that each node sent to others.

    `sent_bytes` maps node names to bytes, as in `CacheHitDetails`. matplotlib is imported here, without a display.
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

    loads = [count / 2**30 for count in sent_bytes.values()]
    right.bar(list(sent_bytes), loads, color="tab:blue")
    if loads:
        right.axhline(sum(loads) / len(loads), color="black", linewidth=1, linestyle="--")
    right.set_ylabel("sent to other nodes, GiB")
    right.set_title(f"CV per 10 s {format_ratio(result.load_cv)}")
    if len(sent_bytes) > 8:
        right.tick_params(axis="x", labelrotation=90)
    FigureCanvasAgg(figure).print_png(str(path))
