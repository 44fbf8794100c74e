"""Pictures of results. matplotlib is an optional dependency: `pip install 'tokenlake-bench[plot]'`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenlake.errors import ConfigurationError


def check_plot(path: Path | None) -> None:
    """Check that `path` is a .png file and that matplotlib is installed; raises ConfigurationError if not. With None
    nothing is checked. Commands call it before they measure."""
    if path is None:
        return
    if path.suffix != ".png":
        raise ConfigurationError("plot", str(path), "a file name ending in .png")
    if find_spec("matplotlib") is None:
        raise ConfigurationError("plot", str(path), "matplotlib: pip install 'tokenlake-bench[plot]'")


@contextmanager
def drawn(path: Path, size: tuple[float, float], panels: int) -> Iterator[tuple[Any, list[Any]]]:
    """Context with a figure of `size` inches and its `panels` side by side; it is written to `path` at the end, without
    a display."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure, list(figure.subplots(1, panels, squeeze=False)[0])
    FigureCanvasAgg(figure).print_png(str(path))


def bars(panel: Any, label: str, shares: dict[str, float], highlighted: str) -> None:
    """Draw shares by name as horizontal bars in per cent; names that begin with `highlighted` are blue."""
    colours = ["tab:blue" if name.startswith(highlighted) else "tab:gray" for name in shares]
    drawn_bars = panel.barh([name.replace(", ", ",\n") for name in shares], [100 * each for each in shares.values()])
    for bar, colour in zip(drawn_bars, colours, strict=True):
        bar.set_color(colour)
    panel.bar_label(drawn_bars, fmt="%.1f", padding=3)
    panel.margins(x=0.15)
    panel.invert_yaxis()
    panel.set_xlabel(label)
