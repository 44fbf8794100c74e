"""Checks that a picture can be drawn, before the measurement that it shows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tokenlake.errors import ConfigurationError

__all__ = ["check_plot"]


def check_plot(path: Path | None) -> None:
    """Raises ConfigurationError where `path` is no .png file, or matplotlib is missing. For None nothing is checked."""
    if path is None:
        return
    if path.suffix != ".png":
        raise ConfigurationError("plot", str(path), "a file name ending in .png")
    if find_spec("matplotlib") is None:
        raise ConfigurationError("plot", str(path), "matplotlib: pip install tokenlake-bench")
