"""Draws hit rates over the capacity of the cache, with one panel per trace."""

from __future__ import annotations

from pathlib import Path

from tokenlake_bench.eviction.results import StudyResult


def plot_study(result: StudyResult, path: Path) -> None:
    """Write a picture (PNG) of hit rates over capacity with a panel per trace. Solid lines are one cache, dashed lines
    the caches of several nodes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(ceiling.trace for ceiling in result.ceilings))
    figure = Figure(figsize=(5 * max(1, len(traces)), 4.2), layout="constrained")
    panels = figure.subplots(1, max(1, len(traces)), squeeze=False)[0]
    lines = list(dict.fromkeys((cell.policy, cell.nodes) for cell in result.cells))
    policies = list(dict.fromkeys(policy for policy, _ in lines))
    for panel, trace in zip(panels, traces, strict=False):
        for policy, nodes in lines:
            mine = [cell for cell in result.cells if (cell.trace, cell.policy, cell.nodes) == (trace, policy, nodes)]
            panel.plot(
                [cell.capacity_tokens / 1e6 for cell in mine],
                [cell.hit_rate * 100 for cell in mine],
                "o-" if nodes == 1 else "s--",
                color=f"C{policies.index(policy)}",
                label=policy if nodes == 1 else f"{policy}, {nodes} nodes",
            )
        ceilings = [ceiling for ceiling in result.ceilings if ceiling.trace == trace]
        sizes = [ceiling.capacity_tokens / 1e6 for ceiling in ceilings]
        panel.plot(sizes, [ceiling.clairvoyant * 100 for ceiling in ceilings], "k^-", label="clairvoyant")
        panel.axhline(ceilings[0].infinite * 100, color="gray", linestyle=":", label="infinite")
        panel.set_xscale("log")
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
        panel.set_xticks([], minor=True)
        panel.set_xlabel("capacity, million tokens")
        panel.set_ylabel("token hit rate, %")
        panel.set_ylim(bottom=0)
        panel.set_title(trace.split(".")[0], fontsize="medium")
    panels[0].legend(fontsize="small")
    FigureCanvasAgg(figure).print_png(str(path))
