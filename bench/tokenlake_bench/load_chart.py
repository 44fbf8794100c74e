"""Draws requests in objective and the first token against load, of runs of `tokenlake bench cache-hit --rate`::

    python -m tokenlake_bench.load_chart CHART.svg RUN.json [RUN.json ...]

Runs of one rate, with other seeds, are averaged."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

import msgspec

NAMES: Final = {
    "round-robin-real": ("own caches, in turn", "#8c959f"),
    "cache-aware-real": ("own caches, cache-aware router", "#bc4c00"),
    "pool-planned-real": ("TokenLake", "#0969da"),
}
"""Label and colour by system."""
WIDTH, HEIGHT, LEFT, TOP, GAP, BOTTOM = 340, 220, 44, 40, 70, 64
FIRST_S: Final = 10.0
"""Top of the axis of seconds."""

Points = list[tuple[float, float]]


def chart(runs: Sequence[dict[str, Any]]) -> str:
    """The picture as SVG. `runs`: results of `cache-hit --mode simulate`, each with a `rate`."""
    found: dict[tuple[str, float], list[dict[str, float]]] = defaultdict(list)
    for run in runs:
        for system, row in run["systems"].items():
            # The rate is that of the arrivals, which seeds change by less than the last digit here.
            found[system, round(run["rate"], 1)].append(row)
    rates = sorted({rate for _, rate in found})

    def points(system: str, field: str, factor: float) -> Points:
        return [(rate, factor * mean(row[field] for row in found[system, rate])) for rate in rates]

    width, height = 2 * (LEFT + WIDTH) + GAP, TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    panels = (
        ("requests in objective, %", "slo_attainment", 100.0, 100.0, 25.0),
        ("first token, median, s", "ttft_p50_ms", 1e-3, FIRST_S, 2.0),
    )
    for place, (title, field, factor, top, step) in enumerate(panels):
        lines = {system: points(system, field, factor) for system in NAMES if (system, rates[0]) in found}
        parts += _panel(LEFT + place * (LEFT + WIDTH + GAP / 2), title, lines, rates, top, step)
    for place, (label, colour) in enumerate(NAMES.values()):
        x, y = LEFT + 250 * place, height - 14
        parts.append(f'<path d="M{x} {y - 4}h24" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 32}" y="{y}" fill="#1f2328">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    left: float, title: str, lines: dict[str, Points], rates: Sequence[float], top: float, step: float
) -> list[str]:
    """One chart whose area begins at `left`; values above `top` leave it at its upper edge."""

    def x(rate: float) -> float:
        return left + WIDTH * (rate - rates[0]) / (rates[-1] - rates[0])

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - min(value, 1.02 * top) / top)

    parts = [f'<text x="{left}" y="{TOP - 16}" fill="#1f2328" font-weight="bold">{title}</text>']
    value = 0.0
    while value <= top:
        parts.append(f'<path d="M{left} {y(value):.1f}h{WIDTH}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#59636e">{value:g}</text>')
        value += step
    for rate in rates:
        parts.append(
            f'<text x="{x(rate):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle" fill="#59636e">{rate:g}</text>'
        )
    middle = f'x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle"'
    parts.append(f'<text {middle} fill="#59636e">requests per second</text>')
    for system, points in lines.items():
        path = "L".join(f"{x(rate):.1f} {y(value):.1f}" for rate, value in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{NAMES[system][1]}" stroke-width="2.5"/>')
    return parts


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(chart([msgspec.json.decode(Path(name).read_bytes()) for name in sys.argv[2:]]))
